"""Memory of grammars: it ends with the request, whatever the garbage collector does meanwhile."""

import gc
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import maskdial.grammar.memory as memory_module
from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.errors import OverloadedError, ValidationError
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.grammar.masks import MaskThreads
from maskdial.grammar.memory import GrammarMemory
from maskdial.registry.catalog import STARTER_FOLDER

pytestmark = pytest.mark.slow

TOKENIZER_JSON = (STARTER_FOLDER / "hybrid" / "tokenizer.json").read_text(encoding="utf-8")


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(TOKENIZER_JSON, vocab_size=12_000, eos_token_ids=[0])
    yield compiler
    compiler.close()


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def wait_until_gone(reference: "weakref.ref[Any]") -> None:
    """Threads let go of what they worked on a moment after its result is there."""
    deadline = time.monotonic() + 30
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert reference() is None


@pytest.mark.usefixtures("no_collection")
def test_a_grammar_is_gone_with_the_last_reference_to_it(compiler: GrammarCompiler) -> None:
    """Without a collection: no cycle keeps the future, the grammar or the matcher."""
    future = compiler.submit("json", {"enum": ["a", "b"]})
    grammar = future.result()
    matcher = grammar.matcher()
    references: list[weakref.ref[Any]] = [weakref.ref(each) for each in (future, grammar, matcher)]
    assert compiler.num_bytes > 0
    del future, grammar
    wait_until_gone(references[0])
    wait_until_gone(references[1])
    assert matcher.allowed().any()
    assert compiler.num_bytes > 0
    del matcher
    wait_until_gone(references[2])
    assert compiler.num_bytes == 0


@pytest.mark.usefixtures("no_collection")
def test_a_refused_grammar_leaves_nothing(compiler: GrammarCompiler) -> None:
    future = compiler.submit("json", {"type": "nothing"})
    with pytest.raises(ValidationError):
        future.result()
    reference = weakref.ref(future)
    del future
    wait_until_gone(reference)
    assert compiler.num_bytes == 0


@pytest.mark.usefixtures("no_collection")
def test_a_grammar_that_is_given_up_leaves_nothing(compiler: GrammarCompiler) -> None:
    futures = [compiler.submit("regex", text) for text in ("a", "b")]
    futures[1].cancel()
    futures[0].result()
    references = [weakref.ref(future) for future in futures]
    del futures
    for reference in references:
        wait_until_gone(reference)
    assert compiler.num_bytes == 0


@pytest.mark.usefixtures("no_collection")
def test_idle_threads_keep_no_mask() -> None:
    """Nor what computed it, which is the matcher."""

    class Compute:
        def __call__(self) -> Any:
            return np.zeros(1, np.bool_)

    threads = MaskThreads(1)
    compute = Compute()
    pending = threads.submit(compute)
    pending.result()
    reference = weakref.ref(compute)
    del compute, pending
    wait_until_gone(reference)
    threads.close()


def test_the_bytes_of_grammars_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "MAX_BYTES_PER_CLIENT", 100)
    monkeypatch.setattr(memory_module, "MAX_BYTES", 150)
    memory = GrammarMemory()
    first = memory.hold("a", 80)
    with pytest.raises(OverloadedError, match="80 bytes, and 80 in all; there is no room"):
        memory.hold("a", 30)
    second = memory.hold("b", 60)
    with pytest.raises(OverloadedError, match="no room"):
        memory.hold("c", 20)
    assert memory.num_bytes == 140
    del first
    third = memory.hold("a", 90)
    assert memory.num_bytes == 150
    del second, third
    assert memory.num_bytes == 0


def test_waiting_grammars_count(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in use, too; a client's own are no reason to refuse another's."""
    monkeypatch.setattr(memory_module, "MAX_BYTES_PER_CLIENT", 2000)
    token = usage_of_request.set(ClientUsage("one"))
    held = compiler.submit("regex", "a" * 1500).result().matcher()
    with pytest.raises(OverloadedError, match=r"no room for 15\d\d more; try again"):
        compiler.submit("regex", "b" * 1500)
    other = usage_of_request.set(ClientUsage("another"))
    assert compiler.submit("regex", "b" * 1500).result().matcher().allowed().any()
    usage_of_request.reset(other)
    del held
    assert compiler.submit("regex", "b" * 1500).result().matcher().allowed().any()
    usage_of_request.reset(token)


def test_the_grammars_of_this_process_are_counted_and_not_refused(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "MAX_BYTES_PER_CLIENT", 1000)
    held = [compiler.submit("regex", letter * 1500).result().matcher() for letter in "ab"]
    assert compiler.num_bytes > 3000
    del held


def test_memory_is_given_back_when_much_was_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    memory = GrammarMemory()
    monkeypatch.setattr(memory_module, "_trim", lambda: trims.append(memory.num_bytes))
    for _ in range(20):
        memory.hold("a", 100_000)
    assert trims == [0]


_LARGE = """
import gc, random, psutil
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.registry.catalog import STARTER_FOLDER
gc.disable()
tokenizer = (STARTER_FOLDER / "hybrid" / "tokenizer.json").read_text(encoding="utf-8")
compiler = GrammarCompiler(tokenizer, vocab_size=12_000, eos_token_ids=[0])
letters, sizes = random.Random(0), []
for _ in range(40):
    words = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=12)) for _ in range(16_000)]
    compiler.submit("json", {"enum": words}).result().matcher().allowed()
    sizes.append(psutil.Process().memory_info().rss >> 20)
compiler.close()
print(sizes[-1] - sizes[4])
"""


def test_large_grammars_one_after_the_other_take_no_more_memory_than_one() -> None:
    """They took 12 MB each, 420 MB over these, without a collection."""
    done = subprocess.run(
        [sys.executable, "-c", _LARGE], capture_output=True, text=True, timeout=300, check=True
    )
    assert int(done.stdout) < 150  # MB
