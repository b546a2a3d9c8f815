"""The largest bodies to every route that takes one, and what they do to the event loop.

Measured in CPU time of the loop's thread for each turn of the loop, which does not depend on what
else the machine does, and by the threads in which texts are tokenized.
"""

import asyncio
import copy
import gc
import json
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import pytest
import tokenizers
from starlette.types import Receive, Scope, Send

from loadtests.kinds import ADMIN_KEY, KEY, KINDS, Kind
from maskdial.bundle import tokenizer as tokenizing
from maskdial.dialects import body as bodies
from maskdial.dialects.body import Wire
from maskdial.dialects.kserve import infer
from tests.documented import DocumentCheck
from tests.http.every_route import TASKS, make_models

pytestmark = pytest.mark.slow

_MAX_BYTES = 100_000
_TEXT = "a, b " * (_MAX_BYTES * 9 // 50)
_ITEMS = 3000
_MAX_INLINE_CHARACTERS = 5000  # about 2 ms
_MAX_INLINE_BYTES = 25_000  # of JSON, likewise
_MAX_TURN_SECONDS = 0.05  # a twentieth of the default limit of a body takes this share of a second
_POSTS = [kind for kind in (*KINDS, *TASKS) if kind.body is not None and not kind.half]


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, start_server: Callable[..., Any]
) -> Iterator[Any]:
    """Within this process, with a model for each route."""
    models = make_models(tmp_path_factory.mktemp("models"))
    running = start_server(
        models=models,
        api_keys=(KEY,),
        admin_key=ADMIN_KEY,
        max_body_bytes=_MAX_BYTES,
        max_queue=128,  # or long texts are answered for minutes
        threads=1,
    )
    gc.collect()
    gc.disable()  # a collection of all that the tests hold would fall into some turn
    yield running
    gc.enable()
    running.stop()


class Turns:
    """The longest turn of the server's loop; the longest text that was tokenized in one, and the
    largest JSON that was read in one.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.what = ""
        self.num_characters = 0
        self.num_bytes = 0

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run, encode = asyncio.events.Handle._run, tokenizing._encode
        validate, read = Wire.model_validate_json.__func__, bodies.from_json  # type: ignore[attr-defined]

        def run_timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            took = time.thread_time() - began
            if took > self.seconds:
                self.seconds, self.what = took, repr(handle)

        def encode_noted(
            backend: tokenizers.Tokenizer, text: str, pair: str | None = None, **options: Any
        ) -> tokenizers.Encoding:
            if asyncio._get_running_loop() is not None:
                self.num_characters = max(self.num_characters, len(text) + len(pair or ""))
            return encode(backend, text, pair, **options)

        def note(content: bytes) -> None:
            if asyncio._get_running_loop() is not None:
                self.num_bytes = max(self.num_bytes, len(content))

        def validate_noted(schema: type[Wire], /, content: bytes, **options: Any) -> Wire:
            note(content)
            found: Wire = validate(schema, content, **options)
            return found

        def read_noted(content: bytes) -> Any:
            note(content)
            return read(content)

        async def unchecked(
            check: DocumentCheck, scope: Scope, receive: Receive, send: Send
        ) -> None:
            await check._app(scope, receive, send)

        monkeypatch.setattr(DocumentCheck, "__call__", unchecked)  # it reads replies in the loop
        monkeypatch.setattr(asyncio.events.Handle, "_run", run_timed)
        monkeypatch.setattr(tokenizing, "_encode", encode_noted)
        monkeypatch.setattr(Wire, "model_validate_json", classmethod(validate_noted))
        monkeypatch.setattr(bodies, "from_json", read_noted)


@pytest.mark.parametrize("kind", _POSTS, ids=lambda kind: kind.name.replace("/", " "))
def test_no_turn_of_the_loop_is_long(
    server: Any, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    turns.watch(monkeypatch)
    headers = {"Authorization": f"Bearer {KEY}", **kind.headers}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:
        for content in _large(kind):
            http.post(kind.target or kind.path, content=content)
            assert turns.num_characters <= _MAX_INLINE_CHARACTERS, content[:200]
            assert turns.num_bytes <= _MAX_INLINE_BYTES, content[:200]
            assert turns.seconds <= _MAX_TURN_SECONDS, (content[:200], turns.what)


def _in_bytes(number: int) -> tuple[bytes, dict[str, str]]:
    """A body of `/infer` with a tensor of so many texts as bytes, and its header."""
    content = b"\1\0\0\0a" * number
    size = {"binary_data_size": len(content)}
    tensor = {"name": "inputs", "shape": [number], "datatype": "BYTES", "parameters": size}
    header = json.dumps({"inputs": [tensor]}).encode()
    return header + content, {infer.HEADER_LENGTH: str(len(header))}


def _tensor(texts: list[str]) -> bytes:
    tensor = {"name": "inputs", "shape": [len(texts)], "datatype": "BYTES", "data": texts}
    return json.dumps({"inputs": [tensor]}).encode()


_INFER, _PREDICT = "/v2/models/sentiment/infer", "/v1/models/sentiment:predict"
_INSTANCES = {"instances": [{"inputs": "a b " * 220, "parameters": {"truncate": True}}] * 100}
LARGE_TENSORS: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "many texts": (_INFER, _tensor(["ab"] * 15_000), {}),
    "long texts": (_INFER, _tensor(["ab " * 1000] * 30), {}),
    "too many texts": (_INFER, _tensor(["a"] * 19_000), {}),
    "texts in bytes": (_INFER, *_in_bytes(16_000)),
    "too many texts in bytes": (_INFER, *_in_bytes(18_000)),
    "instances": (_PREDICT, json.dumps(_INSTANCES).encode(), {}),
    "vertex": ("/vertex", json.dumps(_INSTANCES | {"model": "sentiment"}).encode(), {}),
    "a prompt": (
        "/v2/models/hybrid/generate",
        json.dumps({"text_input": _TEXT[:90_000]}).encode(),
        {},
    ),
}


@pytest.mark.parametrize("name", LARGE_TENSORS)
def test_large_tensors_are_not_read_in_a_turn_of_the_loop(
    server: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns()
    turns.watch(monkeypatch)
    in_loop = []
    read = infer._read

    def read_noted(*arguments: Any) -> Any:
        in_loop.append(asyncio._get_running_loop() is not None)
        return read(*arguments)

    monkeypatch.setattr(infer, "_read", read_noted)
    path, content, headers = LARGE_TENSORS[name]
    headers = {"Authorization": f"Bearer {KEY}", **headers}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as http:
        reply = http.post(path, content=content)
    assert reply.status_code in (200, 400, 422), reply.text
    assert not any(in_loop)
    assert turns.num_bytes <= _MAX_INLINE_BYTES
    assert turns.seconds <= _MAX_TURN_SECONDS, turns.what


def _large(kind: Kind) -> Iterator[bytes]:
    """The kind's body, with each of its texts, or else each of its lists, as large as may be."""
    assert kind.body is not None
    body = kind.body(0)
    if isinstance(body, bytes):
        yield body
        return
    for path in _paths(body):
        for large in _enlarged(_at(body, path)):
            changed = copy.deepcopy(body)
            if path:
                _at(changed, path[:-1])[path[-1]] = large
            content = json.dumps(changed).encode()
            if len(content) <= _MAX_BYTES:
                yield content


def _enlarged(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [_TEXT]
    if isinstance(value, list) and value:
        size = len(json.dumps(value[0])) + 2
        large = [value[:1] * n for n in {256, min(_ITEMS, _MAX_BYTES * 9 // 10 // size)}]
        if isinstance(value[0], str):  # and with items that a search for equal ones has to compare
            large.append([f"{number:x}" for number in range(_MAX_BYTES * 9 // 90)])
        return large
    return []


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    """Where the values of a body are."""
    yield ()
    parts: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    parts = enumerate(value[:1]) if isinstance(value, list) else parts
    for name, part in parts:
        for path in _paths(part):
            yield (name, *path)


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        value = value[name]
    return value
