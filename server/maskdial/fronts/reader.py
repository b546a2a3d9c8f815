"""Reader: a front end's share of the work for masked models: all but the passes.

It runs the routes of the server themselves, with models whose engine is the owner's. What it cannot
finish, such as a body with an error, the owner answers as if nobody had read it before.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from fastapi import Request, Response
from starlette.types import Message, Scope

from maskdial import dialects
from maskdial.ask import catalogue
from maskdial.bundle.bundle import Bundle, load_bundles
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.config import Config
from maskdial.dialects.native.tasks import TASKS
from maskdial.engine.thread import in_thread
from maskdial.fronts.inputs import Asked
from maskdial.http.context import ServerContext
from maskdial.http.keys import Keys
from maskdial.http.lifecycle import Lifecycle
from maskdial.http.route import TaskRoute
from maskdial.http.shared import SharedWork
from maskdial.http.watchdog import Watchdog
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.model import MaskedModel
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.metrics import Metrics
from maskdial.receipts.receipt import HEADER
from maskdial.registry.catalog import find_bundles
from maskdial.registry.registry import Models
from maskdial.registry.served import ServedModel
from maskdial.runtime.adapter import Adapter

_MAX_BODY_BYTES = 65_536
_HEADS = frozenset({"classify", "embed", "question-answering", "rerank", "token-classify"})
"""The heads of models whose requests are read here: a pass answers them, and its results are
small."""
_RECEIPT = HEADER.encode()

Ask = Callable[[Asked], Awaitable[list[MaskedResult]]]
"""Has the owner run inputs."""


class UnreadError(Exception):
    """A request that the owner has to read itself."""


@dataclass(slots=True)
class _Asking:
    """The request that is being read, and how the owner is asked, which happens once."""

    ask: Ask
    began: float = field(default_factory=time.perf_counter)
    has_asked: bool = False


_asking: ContextVar[_Asking] = ContextVar("asking")


@contextlib.contextmanager
def asking_by(ask: Ask) -> Iterator[None]:
    """Has engines ask the owner so, within a request."""
    token = _asking.set(_Asking(ask))
    try:
        yield
    finally:
        _asking.reset(token)


class _RemoteEngine(MaskedEngine):
    """The engine of a model that the owner runs; its thread is never started."""

    def __init__(self, bundle: Bundle, config: Config, metrics: Metrics) -> None:
        super().__init__(
            _NoSession(),
            max_batch_tokens=1,
            max_queue=config.max_queue,
            pad_token_id=0,
            free_padding=0,
            metrics=metrics.declare_masked(bundle.label),
            name=bundle.label,
        )
        self._bundle = bundle

    async def warm_up(self) -> None:
        """The owner's engine is warm."""

    def check_room(self, num_texts: int) -> None:
        """The owner refuses what has no room."""

    async def submit_many(
        self,
        inputs: Sequence[MaskedInput],
        timeout: float | None = None,  # noqa: ASYNC109 (as the engine's)
        adapter: Adapter | None = None,
    ) -> list[MaskedResult]:
        """Has the owner run them.

        Raises:
            UnreadError: that is not possible, or has happened in this request.
        """
        asking = _asking.get()
        further = any(each.reduce is not None or each.canvas is not None for each in inputs)
        # The owner's sentence of a timeout would name another one.
        if asking.has_asked or further or timeout is not None or adapter is not None:
            raise UnreadError
        asking.has_asked = True
        seconds = time.perf_counter() - asking.began
        return await asking.ask(Asked(self._bundle.name, self._bundle.sha256, seconds, inputs))


class _NoSession:
    """Stands where an engine has its graph."""

    input_names: frozenset[str] = frozenset()

    def run(self, feeds: object) -> NoReturn:
        """Is never called, as the engine's thread is not started."""
        raise AssertionError

    def run_until(self, feeds: object, stop: object) -> NoReturn:
        """As `run`."""
        raise AssertionError


class Reader:
    """Reads requests to masked models, and renders their replies.

    Args:
        config: of the server, without its keys.
    """

    def __init__(self, config: Config) -> None:
        # The owner keeps the timeout, tells the log of fields that mean nothing, and has the
        # adapters.
        self._config = config.model_copy(
            update={
                "request_timeout": None,
                "unknown_fields": "refuse",
                "adapters": {},
            }
        )
        self._max_body_bytes = min(config.max_body_bytes, _MAX_BODY_BYTES)
        metrics = Metrics()
        start = partial(_start, self._config, metrics)
        self.models = Models(catalogue.LISTED, self._config, metrics, start)
        """Those whose requests are read here."""
        self._context = ServerContext(
            self._config,
            self.models,
            metrics,
            Lifecycle(),
            Keys(self._config),
            SharedWork(metrics.render, 1.0),
            Watchdog(lambda: (), self._config),
        )
        paths = {
            path
            for task in TASKS
            if task.head in _HEADS
            for path in (f"/{task.name}", *task.aliases)
        } | {"/v1/embeddings"}
        self._routes = {
            route.path: route
            for route in dialects.ROUTES
            if isinstance(route, TaskRoute) and route.path in paths
        }
        self._app = SimpleNamespace(state=SimpleNamespace(context=self._context))

    @staticmethod
    def is_for(config: Config) -> bool:
        """Whether a server's requests may be read in front ends: where nothing else has to see
        their texts, and no models come that could be meant by those that name none.
        """
        sees_texts = config.policy is not None or config.log_format == "json-texts"
        return not sees_texts and config.model_dir is None and not config.allow_pull

    async def open(self) -> None:
        """Reads the bundles, without their weights.

        Raises:
            MaskdialError: one cannot be read.
        """
        catalog = await in_thread(partial(find_bundles, self._config))
        await self.models.open(catalog)

    def reads(self, scope: Scope, body: bytes) -> bool:
        """Whether it can be tried with this request."""
        return (
            scope["method"] == "POST"
            and scope["path"] in self._routes
            and not scope["root_path"]
            and len(body) <= self._max_body_bytes
            and all(name != _RECEIPT for name, _ in scope["headers"])
        )

    async def answer(self, scope: Scope, body: bytes, ask: Ask) -> Response:
        """The reply to a request, whose results ``ask`` gives, without the guard's headers.

        Raises:
            Exception: there is none here; the owner knows why.
        """
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # that the client leaves is told to the owner
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        request = Request({**scope, "app": self._app, "state": {}}, receive)
        request.state.key, request.state.client = "", ""
        try:
            with asking_by(ask):
                response: Response = await self._routes[scope["path"]].endpoint(request)
            return response
        finally:
            lease = getattr(request.state, "lease", None)
            if lease is not None:
                lease.release()


def _start(config: Config, metrics: Metrics, name: str, path: Path) -> tuple[ServedModel, ...]:
    """The models of a folder whose requests can be read here; the others are the owner's affair."""
    return tuple(
        MaskedModel(
            bundle,
            Tokenizer.from_file(bundle.tokenizer, bundle.manifest.special_tokens),
            metrics.declare_masked(bundle.label),
            "cpu",
            _RemoteEngine(bundle, config, metrics),
            auto_truncate=config.truncates(bundle.name),
        )
        for bundle in load_bundles(name, path)
        if bundle.manifest.task in _HEADS and not _has_more(bundle)
    )


def _has_more(bundle: Bundle) -> bool:
    """Whether a model has parts beside its graph, which the owner has loaded."""
    manifest = bundle.manifest
    return bool(
        manifest.task_adapters
        or manifest.extraction is not None
        or manifest.decision is not None
        or manifest.entities is not None
        or bundle.label_encoder() is not None
    )
