"""llama.cpp, by llama-cpp-python in this process: the same prompts on the same model."""

import argparse
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests import LoadTestError
from loadtests.measurement import Section
from loadtests.prefix.asking import serving
from loadtests.prefix.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Row:
    """The least of some rounds; ``differ``: whether a logit has other bits than when cold."""

    comes_from: str
    prompt_tokens: int
    computed_tokens: int
    first_token_s: float
    cpu_s: float
    differ: str


def turns(args: argparse.Namespace, bundle: Path, conversation: Conversation) -> Section:
    """The first token of the last turn with llama.cpp; its state goes through a file."""
    with serving(bundle, args.context) as agent:
        prompt, before = map(agent.tokens, conversation.last())
    file = args.work / "llama.state"
    model = _open(args)
    cold = _run(model, prompt)
    model.reset()
    _run(model, before)
    state = model.save_state()
    file.write_bytes(pickle.dumps(state))
    memory, disk = [], []
    for _ in range(args.rounds):
        model.load_state(state)
        memory.append(_run(model, prompt))
        model = _open(args)
        disk.append(_run(model, prompt, file))
    runs = {"nowhere: computed": [cold], "memory": memory, "a file, after a restart": disk}
    rows = tuple(
        Row(
            name,
            len(prompt),
            found[0][2],
            min(run[0] for run in found),
            min(run[1] for run in found),
            "-" if name.startswith("nowhere") else str(any(run[3] != cold[3] for run in found)),
        )
        for name, found in runs.items()
    )
    size = file.stat().st_size / 1e6
    file.unlink()
    return Section("llama.cpp", "as above", args.rounds, rows, (f"its state has {size:.0f} MB",))


def cached(args: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens of each prompt it had already, when they come one after the other."""
    model = _open(args)
    return [len(prompt) - _run(model, prompt)[2] for prompt in prompts]


def _open(args: argparse.Namespace) -> Any:
    try:
        from llama_cpp import Llama
    except ImportError as error:
        raise LoadTestError("--gguf needs llama-cpp-python") from error
    threads = os.cpu_count() or 1
    return Llama(
        str(args.gguf),
        n_ctx=args.context,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=256,
        verbose=False,
    )


def _run(
    model: Any, prompt: Sequence[int], file: Path | None = None
) -> tuple[float, float, int, bytes]:
    """Seconds to the first token, of the clock and of this process, the tokens that were computed,
    and the first token's logits.
    """
    num_computed = 0
    real = model.eval

    def evaluate(tokens: Sequence[int]) -> None:
        nonlocal num_computed
        num_computed += len(tokens)
        real(tokens)

    model.eval = evaluate
    started, cpu = time.perf_counter(), time.process_time()
    if file is not None:
        model.load_state(pickle.loads(file.read_bytes()))
    next(iter(model.generate([*prompt], temp=0.0, reset=True)))
    seconds = time.perf_counter() - started, time.process_time() - cpu
    model.eval = real
    logits = model._ctx.get_logits()
    last = bytes((logits._type_ * model.n_vocab()).from_address(_address(logits)))
    return *seconds, num_computed, last


def _address(pointer: Any) -> int:
    import ctypes

    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)
