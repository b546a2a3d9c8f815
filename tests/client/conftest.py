"""A fake server, so that the clients are tested over real HTTP."""

import asyncio
import inspect
import json
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from maskdial_client import AsyncClient, Client, RetryPolicy

TASK_ROUTES = (
    "/fill-mask",
    "/infill",
    "/classify",
    "/token-classify",
    "/redact",
    "/extract",
    "/question-answering",
    "/zero-shot-classify",
    "/embed",
    "/embed-all",
    "/embed-hybrid",
    "/embed-chunks",
    "/similarity",
    "/summarize",
    "/translate",
    "/rerank",
    "/score",
    "/tokenize",
    "/detokenize",
    "/generate",
)


@dataclass
class FakeServer:
    """The server's state: what a test configures, and the requests that came.

    ``queued`` replies are sent before any other; ``stream`` is how the event stream goes: whole,
    cut, error or endless. ``closed`` is set when a stream's connection is closed.
    """

    url: str
    paths: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    queued: deque[Response] = field(default_factory=deque)
    ready: bool = True
    stream: str = "whole"
    closed: threading.Event = field(default_factory=threading.Event)

    def refuse(self, status: int, error_type: str, **headers: str) -> None:
        """Queues an error reply. An underscore in a header's name stands for a hyphen."""
        content = {"error": f"this is {error_type}", "error_type": error_type}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.queued.append(JSONResponse(content, status, named))

    def answer(self, document: Any) -> None:
        """Queues a successful reply."""
        self.queued.append(JSONResponse(document))

    async def task(self, request: Request) -> Response:
        body = await request.json()
        self.paths.append(request.url.path)
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.queued:
            return self.queued.popleft()
        return self.reply(request.url.path, body)

    def reply(self, path: str, body: dict[str, Any]) -> Response:
        inputs: Any = body.get("inputs")
        batch = isinstance(inputs, list)
        entries: list[Any] = inputs if batch else [inputs]
        if path == "/fill-mask":
            results = [_fills(text) for text in entries]
        elif path == "/classify":
            labels = [{"label": "positive", "score": 0.75}, {"label": "negative", "score": 0.25}]
            return JSONResponse([labels for _ in entries])
        elif body.get("stream"):
            return StreamingResponse(
                self.events(), headers={"x-request-id": "r-7"}, media_type="text/event-stream"
            )
        else:
            parameters = body.get("parameters", {})
            results = [_generations(parameters) for _ in entries]
        return JSONResponse(results if batch else results[0])

    async def events(self) -> AsyncIterator[bytes]:
        closed = self.closed  # the next test replaces it
        try:
            yield b": keep-alive\n\n" + _event(0, " caf\u00e9")
            if self.stream == "error":
                failure = {"error": "the step failed", "error_type": "generation"}
                yield b"data: " + json.dumps(failure).encode() + b"\n\n"
            elif self.stream == "endless":
                await asyncio.Event().wait()
            elif self.stream == "whole":
                yield _event(1, " ole")
                yield _event(2, "</s>", special=True, text=" caf\u00e9 ole")
        finally:
            closed.set()

    async def models(self, request: Request) -> Response:
        return JSONResponse([_MODEL])

    async def info(self, request: Request) -> Response:
        limits = {"slots": 8}
        return JSONResponse(
            {"version": "0.1.0", "phase": "serving", "limits": limits, "models": [_MODEL]}
        )

    async def health(self, request: Request) -> Response:
        if self.ready:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "engine down", "models": ["story"]}, 503)


_MODEL = {
    "name": "story",
    "family": "causal",
    "tasks": ["generate"],
    "architecture": "LlamaForCausalLM",
    "precision": "fp32",
    "batch_invariant": True,
    "max_length": 512,
    "labels": [],
    "provider": "cpu",
    "ready": True,
}


def _fills(text: str) -> list[Any]:
    def fill(word: str, score: float) -> dict[str, Any]:
        return {
            "score": score,
            "token": len(word),
            "token_str": word,
            "sequence": text.replace("[MASK]", word, 1),
        }

    masks = [[fill("capital", 0.5), fill("heart", 0.25)] for _ in range(text.count("[MASK]"))]
    return masks[0] if len(masks) == 1 else masks


def _generations(parameters: dict[str, Any]) -> Any:
    """One text, or a list of ``n``, each with details if ``parameters`` ask for them."""
    n = parameters.get("n", 1)
    texts = [" there was", *(f" text {number}" for number in range(2, n + 1))]
    replies = [_generation(text, parameters) for text in texts]
    return replies if n > 1 else replies[0]


def _generation(text: str, parameters: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = {"generated_text": text}
    if parameters.get("details"):
        token = {"id": 9, "text": text, "logprob": -0.5, "special": False}
        details: dict[str, Any] = {
            "finish_reason": "length",
            "generated_tokens": 1,
            "seed": None,
            "input_length": 1,
            "prefill": [{"id": 5, "text": "Once", "logprob": None}],
            "tokens": [token],
        }
        if parameters.get("top_n_tokens"):
            details["top_tokens"] = [[token, {**token, "id": 10, "text": " is"}]]
        reply["details"] = dict(details)
        if parameters.get("best_of"):
            reply["details"]["best_of_sequences"] = [details | {"generated_text": " is"}]
    return reply


def _event(index: int, token: str, *, special: bool = False, text: str | None = None) -> bytes:
    details = {
        "finish_reason": "eos_token",
        "generated_tokens": index + 1,
        "seed": 3,
        "input_length": 4,
    }
    chosen = {"id": index, "text": token, "logprob": -0.25, "special": special}
    document = {
        "index": index,
        "token": chosen,
        "top_tokens": [chosen],
        "generated_text": text,
        "details": None if text is None else details,
    }
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


@pytest.fixture
def fake(fake_server: FakeServer) -> FakeServer:
    """The server in its initial state."""
    vars(fake_server).update(vars(FakeServer(fake_server.url)))
    return fake_server


@pytest.fixture(scope="session")
def fake_server() -> Iterator[FakeServer]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    state = FakeServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
    routes = [
        *(Route(path, state.task, methods=["POST"]) for path in TASK_ROUTES),
        Route("/models", state.models),
        Route("/info", state.info),
        Route("/health/ready", state.health),
    ]
    config = uvicorn.Config(
        Starlette(routes=routes), lifespan="off", log_config=None, ws="none", loop="asyncio"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield state
    server.should_exit = True
    thread.join(timeout=30)
    listener.close()
    assert not thread.is_alive()


class Driver:
    """Runs either client in a sync test. ``waits`` records the delays between retries."""

    def __init__(self, kind: str, runner: asyncio.Runner) -> None:
        self.is_async = kind == "async"
        self.waits: list[float] = []
        self._runner = runner
        self._open: list[Any] = []

    def client(self, url: str, **options: Any) -> Any:
        options.setdefault("retry", RetryPolicy(uniform=lambda: 0.0))
        if self.is_async:
            client: Any = AsyncClient(url, sleep=self._sleep, **options)
        else:
            client = Client(url, sleep=self.waits.append, **options)
        self._open.append(client)
        return client

    def wait(self, result: Any) -> Any:
        return self._runner.run(self._await(result)) if inspect.isawaitable(result) else result

    def read(self, stream: Any, count: int | None = None) -> list[Any]:
        """The events of a stream; with ``count`` the loop is left after that many."""
        if self.is_async:
            return self._runner.run(self._read(stream, count))
        events = []
        for event in stream:
            events.append(event)
            if len(events) == count:
                break
        return events

    def close(self) -> None:
        for client in self._open:
            self.wait(client.aclose() if self.is_async else client.close())

    async def _sleep(self, seconds: float) -> None:
        self.waits.append(seconds)

    async def _await(self, result: Any) -> Any:
        return await result

    async def _read(self, stream: Any, count: int | None) -> list[Any]:
        events = []
        async for event in stream:
            events.append(event)
            if len(events) == count:
                break
        return events


@pytest.fixture(params=["sync", "async"])
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    with asyncio.Runner() as runner:
        driver = Driver(request.param, runner)
        yield driver
        driver.close()
