"""Bodies and texts of megabytes: refused by their size, before they cost their weight."""

import asyncio
import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest
import tokenizers

from maskdial.bundle.manifest import SpecialTokens
from maskdial.bundle.tokenizer import Tokenizer, cut_tokens
from maskdial.dialects import ROUTES
from maskdial.dialects.anthropic.body import MessagesBody
from maskdial.dialects.body import parse_body, read_body
from maskdial.dialects.native.classify_bodies import ClassifyBody
from maskdial.dialects.native.generate_bodies import GenerateBody
from maskdial.dialects.native.tokens import DetokenizeBody, _write_texts
from maskdial.dialects.openai.chat import ChatBody
from maskdial.dialects.openai.completions import CompletionsBody
from maskdial.engine import offload as offloading
from maskdial.engine.offload import offload
from maskdial.errors import ValidationError
from maskdial.http.route import TaskRoute
from maskdial.masked.tasks import pairs
from maskdial.masked.tasks.task import Truncation
from tests.held import HOUR, HeldTimers


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    words = {"[UNK]": 0, "a": 1, "b" * 120: 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return backend


@pytest.mark.parametrize(
    ("schema", "body", "words"),
    [
        (
            GenerateBody,
            {f"k{i}": 1 for i in range(40_000)},
            "an object in the body has 40,000 fields; the limit is 30,000",
        ),
        (
            GenerateBody,
            {"inputs": "a", "parameters": {"x": [{}, {f"k{i}": 1 for i in range(40_000)}]}},
            "has 40,000 fields",
        ),
        (ClassifyBody, {"inputs": ["a"] * 20_000}, "at most 16,384 items, not 20,000"),
        (
            ChatBody,
            {"model": "m", "messages": [{"role": "user", "content": "a"}] * 10_001},
            "messages: must have at most 10000 items, not 10001",
        ),
        (
            ChatBody,
            {"model": "m", "messages": [{"wrong": 1}] * 2000},
            "messages[0].role: this field is required",
        ),
        (
            ChatBody,
            {"messages": [{"role": "user", "content": "a"}], "tools": [{}] * 20_000},
            "tools[0].type: this field is required",
        ),
        (
            MessagesBody,
            {"model": "m", "messages": [{"role": "user", "content": [{}] * 20_000}]},
            "messages[0].content[0].type: this field is required",
        ),
        (
            CompletionsBody,
            {"prompt": [[]] * 40_000},
            "the body has more than 30,000 lists and objects",
        ),
        (
            GenerateBody,
            {"inputs": "a", "parameters": {"x": ["a", {f"k{i}": 1 for i in range(40_000)}]}},
            "has 40,000 fields",
        ),
    ],
)
def test_bodies_of_many_parts_are_refused_in_one_sentence(
    schema: type, body: dict[str, object], words: str
) -> None:
    with pytest.raises(ValidationError, match=r"^[^\n]{1,150}$") as caught:
        parse_body(schema, json.dumps(body).encode())
    assert words in str(caught.value)
    cause = caught.value.__cause__  # the errors of one part, not of all
    assert cause is None or cause.error_count() < 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ['{"a": [' * 40_000, '\\"{[' * 20_000])
def test_brackets_in_a_text_are_not_counted(text: str) -> None:
    body = parse_body(GenerateBody, json.dumps({"inputs": text}).encode())
    assert body.inputs == text


def test_every_list_of_a_body_is_refused_at_its_first_wrong_item() -> None:
    bodies = {route.body for route in ROUTES if isinstance(route, TaskRoute) and route.body}
    lists = [part for body in bodies for part in _lists(pydantic.TypeAdapter(body).core_schema)]
    assert len(lists) > 50
    assert all(part.get("fail_fast") for part in lists)


def _lists(schema: object) -> list[dict[str, object]]:
    if isinstance(schema, list | tuple):
        return [found for part in schema for found in _lists(part)]
    if not isinstance(schema, dict):
        return []
    own = [schema] if schema.get("type") == "list" else []
    return own + [found for part in schema.values() for found in _lists(part)]


def test_a_wide_schema_within_the_limit_is_read() -> None:
    properties = {f"property {i}": {"type": "string"} for i in range(5000)}
    grammar = {"type": "json", "value": {"type": "object", "properties": properties}}
    body = {"inputs": "a", "parameters": {"grammar": grammar}}
    parsed = parse_body(GenerateBody, json.dumps(body).encode())
    assert parsed.parameters is not None


def test_a_text_exceeds_a_length_that_no_tokenization_of_it_has(
    backend: tokenizers.Tokenizer,
) -> None:
    tokenizer = Tokenizer(backend, SpecialTokens())
    # The longest token has 120 characters; an unknown word of 500 is one token as well, but no
    # text of 8 such words is refused where 8 tokens fit.
    assert not tokenizer.exceeds("b" * 120 * 8, 8)
    assert tokenizer.exceeds("b" * 120 * 8 + "b", 8)
    assert not tokenizer.exceeds("a " * 8, 8)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 1.0])
def test_long_work_has_two_threads_of_its_own(seconds: float) -> None:
    name = asyncio.run(offload(lambda: threading.current_thread().name, seconds))
    assert name.startswith("long-work") == (seconds == 1.0)
    assert (name == "MainThread") == (seconds == 0.0)
    assert offloading._LONG_WORK._max_workers == 2


@pytest.mark.parametrize(
    ("num_bytes", "thread"), [(100, "MainThread"), (100_000, "asyncio"), (1_900_000, "long-work")]
)
def test_large_bodies_are_parsed_in_a_thread(num_bytes: int, thread: str) -> None:
    parsed_in = []

    class NotedBody(GenerateBody):
        @pydantic.field_validator("inputs")
        @classmethod
        def note(cls, value: str) -> str:
            parsed_in.append(threading.current_thread().name)
            return value

    text = "a" * num_bytes
    body = asyncio.run(read_body(NotedBody, json.dumps({"inputs": text}).encode()))
    assert body.inputs == text
    assert [name.startswith(thread) for name in parsed_in] == [True]


def test_many_ids_are_decoded_as_few(backend: tokenizers.Tokenizer) -> None:
    """In a thread's time, not the event loop's: a batch releases the GIL."""
    special = SpecialTokens()
    backend.add_special_tokens(["[X]"])
    tokenizer = Tokenizer(backend, special)
    ids = [1, 2, 3, 1] * 600
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        part = tokenizer.decode(ids[:4], skip_special_tokens=skip)
        assert whole == " ".join([part] * 600)
        assert ("[X]" in whole) is not skip


@pytest.mark.parametrize(
    ("ids", "texts"),
    [([], [[]]), ([1, 2], [[1, 2]]), ([[]], [[]]), ([[1], [], [2]], [[1], [], [2]])],
)
def test_lists_of_ids_are_texts(ids: object, texts: object) -> None:
    assert parse_body(DetokenizeBody, json.dumps({"ids": ids}).encode()).texts == texts


def test_long_replies_are_written_in_parts(
    backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def spy(write: Callable[[object], bytes]) -> Callable[[list[object]], bytes]:
        return lambda part: sizes.append(len(part)) or write(part)  # type: ignore[func-returns-value]

    monkeypatch.setattr("maskdial.dialects.native.tokens.encode_json", spy(_encode))
    texts = ["a " * 12_000, "", "a b"]
    encodings = [backend.encode(text) for text in texts]
    written = json.loads(_write_texts(encodings, texts))
    assert [len(tokens) for tokens in written] == [12_000, 0, 2]
    assert written[0][11_999] == {
        "id": 1, "text": "a", "special": False, "start": 23_998, "stop": 23_999
    }  # fmt: skip
    assert sizes == [5000, 5000, 2000, 2]


def _encode(value: object) -> bytes:
    return json.dumps(value).encode()


def test_long_texts_of_pairs_are_cut_to_the_models_length_first(
    backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cut writes what it is given as JSON, within which nothing else runs."""
    lengths: list[int] = []

    def spy(encoding: tokenizers.Encoding, limit: int, direction: Any) -> tokenizers.Encoding:
        lengths.append(len(encoding))
        return cut_tokens(encoding, limit, direction)

    monkeypatch.setattr(pairs, "cut_tokens", spy)
    settings = SimpleNamespace(truncation_side="right")
    manifest = SimpleNamespace(max_length=64, tokenization=settings)
    model: Any = SimpleNamespace(
        name="m", tokenizer=Tokenizer(backend, SpecialTokens()), manifest=manifest
    )
    query, documents = "a " * 100_000, ["a", "a " * 40, "a " * 100_000]
    inputs, num_truncated = pairs.read_pairs(
        model,
        [query],
        documents,
        Truncation(enabled=True),
        strategy="longest_first",
        error=lambda first, second, words: ValidationError(words),
    )
    assert [len(each.input_ids) for each in inputs] == [64, 64, 64]
    assert num_truncated == 3 * (100_000 - 64) + 1 + 40 + 100_000
    assert lengths
    assert max(lengths) <= 64


def test_memory_of_long_work_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, some time after the last of it; short work does not begin that time."""
    trimmed: list[int] = []
    monkeypatch.setattr(offloading, "return_free_memory", lambda: trimmed.append(0))
    monkeypatch.setattr(offloading, "_TRIM_SECONDS", HOUR)

    async def scenario() -> None:
        with HeldTimers(asyncio.get_running_loop()) as timers:
            await offload(lambda: None, 0.01)
            assert timers.num_set == 0
            for _ in range(3):
                await offload(lambda: None, 1.0)
                assert timers.num_set == 1
            assert trimmed == []
            timers.go_off()
            async with asyncio.timeout(60):
                while not trimmed:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert timers.num_set == 0
        assert trimmed == [0]

    asyncio.run(scenario())
