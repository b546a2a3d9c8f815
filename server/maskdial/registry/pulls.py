"""Pulls: models of the Hub that requests have taken into the cache, as far as the operator allows.

A request chooses among the repositories that ``--allow-pull`` names, and nothing else: no address,
no path, no revision. Weights are safetensors or GGUF files, which run no code.
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from maskdial.config import Config
from maskdial.engine.thread import in_thread
from maskdial.errors import ConfigError, ForbiddenError, ValidationError, shortened
from maskdial.exporting import Progress
from maskdial.intake import hub_bundle, take_in
from maskdial.model_cache import HubSource, cached_models, remove
from maskdial.registry.choice import LATEST


class Pulls:
    """What may be pulled, and what was.

    Args:
        config: ``allow_pull``, patterns of ORG/NAME, and the provider.
    """

    def __init__(self, config: Config) -> None:
        self._patterns: Sequence[str] = config.allow_pull
        self._provider = config.provider
        self._turn = asyncio.Lock()

    def check_allowed(self) -> None:
        """Raises: ForbiddenError: the server pulls and removes nothing."""
        if not self._patterns:
            raise ForbiddenError(
                "this server neither pulls nor removes models; its owner allows it with "
                "--allow-pull, and has models loaded and unloaded with POST /models/load"
            )

    def source(self, name: str) -> HubSource:
        """What a request asks for.

        Raises:
            ValidationError: it is no name of the Hub.
            ForbiddenError: this server does not pull that.
        """
        self.check_allowed()
        found = HubSource.parse(name.removesuffix(LATEST))
        if found is None or found.revision is not None:
            raise ValidationError(
                f"{shortened(name)!r} is no name of the Hub: ORG/NAME, or ORG/NAME:Q4_K_M for a "
                "GGUF file there",
                field="model",
            )
        if not self._fits(found):
            patterns = ", ".join(self._patterns)
            raise ForbiddenError(
                f"this server pulls no {shortened(found.repository)!r}; --allow-pull has {patterns}"
            )
        return found

    def bundles(self) -> dict[str, Path]:
        """The bundles of the cache that are served, by name. It reads the disk."""
        found = {}
        for model in cached_models() if self._patterns else ():
            source = HubSource.of_folder(model.folder)
            if source is None or source.revision is not None or not self._fits(source):
                continue
            if model.folder == hub_bundle(source, self._provider):
                found[source.served_name] = model.folder
        return found

    async def pull(self, source: HubSource) -> AsyncGenerator[Progress, None]:
        """Takes a model in, one at a time; closing the iterator gives it up.

        Raises:
            ValidationError: that failed.
        """
        events: asyncio.Queue[Progress | None] = asyncio.Queue()
        loop, stopping = asyncio.get_running_loop(), threading.Event()

        def show(progress: Progress) -> None:
            loop.call_soon_threadsafe(events.put_nowait, progress)

        yield Progress("pulling manifest", 0, 0, "")
        work = partial(take_in, source.repository, source.folder(), self._provider)
        async with self._turn:
            taking = in_thread(partial(work, show=show, stopping=stopping))
            taking.add_done_callback(lambda _: events.put_nowait(None))
            try:
                while (progress := await events.get()) is not None:
                    yield progress
                taking.result()
            except ConfigError as error:
                raise ValidationError(error.message) from error
            finally:
                stopping.set()

    async def remove(self, folder: Path) -> None:
        """Removes a bundle that was pulled.

        Raises:
            ValidationError: it cannot be removed.
        """
        try:
            await in_thread(partial(remove, f"{folder.parent.name}/{folder.name}"))
        except ConfigError as error:
            raise ValidationError(error.message, field="model") from error

    def _fits(self, source: HubSource) -> bool:
        return any(fnmatchcase(source.repository, pattern) for pattern in self._patterns)
