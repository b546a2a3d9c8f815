"""Application: the server's routes in this process, without a socket."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path

from starlette.types import Message

from maskdial.app import create_app
from maskdial.batches.requests import Requests
from maskdial.config import Config, model_name_fault
from maskdial.errors import MaskdialError
from maskdial.http.in_process import InProcess, Reply
from maskdial.http.lifecycle import Phase
from maskdial.receipts.receipt import HEADER

_OPEN = {
    "api_keys": (),
    "api_key_file": None,
    "admin_key": None,
    "otlp_endpoint": None,
    "batch_dir": None,
    "prefix_cache_dir": None,
    "responses_store": None,
}
# A caller in this process waits for its turn; nobody refuses it (`ClientUsage.unlimited`).
_MAX_QUEUE = 2**20


_UNNAMED = "model"


class Application(Requests):
    """A running application; use it in the event loop of `start`."""

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, config: Config) -> AsyncIterator["Application"]:
        """An application whose configured models are loaded.

        It asks for no keys, and limits no clients: its only one is this process.

        Raises:
            BundleError, ConfigError: a model cannot be served.
        """
        loading: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(error: MaskdialError) -> None:
            if not loading.done():
                loading.set_exception(error)

        app = create_app(
            config.model_copy(update=_OPEN | {"max_queue": _MAX_QUEUE}), on_load_failure=fail
        )
        lifecycle = app.state.context.lifecycle
        async with app.router.lifespan_context(app):
            with _no_errors_logged():
                while lifecycle.phase is Phase.LOADING:
                    await asyncio.wait({loading}, timeout=0.005)
                    if loading.done():
                        loading.result()
            yield cls(app)

    def stream(self, method: str, path: str, body: bytes) -> AsyncGenerator[Message]:
        """The messages of a reply as they come; leaving cancels the request."""
        return InProcess(self._app).stream(method, path, body, state={"unlimited": True})

    @property
    def bundles(self) -> frozenset[str]:
        """The SHA-256 of the manifests that are served; empty if others may be loaded."""
        if self.context.config.model_dir is not None:
            return frozenset()
        return frozenset(model.bundle.sha256 for model in self.context.models)

    async def repeat(self, path: str, body: bytes, seed: int | None) -> Reply:
        """The reply to a request with a receipt.

        Args:
            path: of the route.
            body: the JSON of a request, or of one that was answered before.
            seed: that was drawn for it then; None for its own, or a fresh one.
        """
        state = {"unlimited": True, "seed": seed}
        return await InProcess(self._app).ask("POST", path, body, [(HEADER, "1")], state=state)


def models_setting(folder: Path, name: str | None = None) -> list[str]:
    """The setting ``model`` that serves one bundle, under its folder's name where that is one."""
    if name is None:
        name = folder.resolve().name
        name = _UNNAMED if model_name_fault(name) else name
    return [f"{name}={folder}"]


@contextlib.contextmanager
def _no_errors_logged() -> Iterator[None]:
    """Leaves errors of loading out of the log: they are raised."""

    def is_no_error(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR

    loggers = [logging.getLogger(name) for name in ("maskdial", "maskdial.models")]
    for logger in loggers:
        logger.addFilter(is_no_error)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_no_error)
