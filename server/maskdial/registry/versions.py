"""Versions: the bundles that are loaded, within the limits on their number and size.

They are loaded one at a time, in the order in which they were asked for, in a thread of their own.
One whose files are overwritten while it is served answers nothing any more. Everything here is used
on the event loop only.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from maskdial.bundle.bundle import num_bytes, read_manifests
from maskdial.bundle.manifest import Manifest
from maskdial.config import Config
from maskdial.engine.thread import in_thread
from maskdial.errors import ConfigError
from maskdial.intake import take_in
from maskdial.metrics import Metrics
from maskdial.model_cache import is_source
from maskdial.registry.entry import Version
from maskdial.registry.served import ServedModel
from maskdial.runtime.memory import return_free_memory

_log = logging.getLogger("maskdial.models")

_WATCH_SECONDS = 2.0

T = TypeVar("T")
Start = Callable[[str, Path], tuple[ServedModel, ...]]
"""Loads the graphs of a bundle folder under a name, all or none, and starts their engines.

Raises:
    BundleError, ConfigError: they cannot be served.
"""


class Versions:
    """Loads versions, shares them between names, and stops them when nobody uses them.

    Args:
        config: the limits.
        metrics: where the time of loads is recorded.
        start: loads a bundle.
        evict: has all names of a version withdraw it, so that another fits.
    """

    def __init__(
        self, config: Config, metrics: Metrics, start: Start, evict: Callable[[Version], None]
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._start = start
        self._evict = evict
        self._turn, self._intake = asyncio.Lock(), asyncio.Lock()
        self._loader = ThreadPoolExecutor(1, "maskdial-load")
        self._serving: list[Version] = []
        self._draining: dict[Version, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def open(self, name: str, folder: Path, install: Callable[[Version], None]) -> None:
        """Opens a folder for a name: as the version that a name has already, or as a new one.

        If the caller is cancelled, what was loaded for it is stopped.

        Args:
            name: what the models are loaded as.
            folder: the bundle's, or a file or a checkpoint of which it is made first.
            install: has the name serve the version.

        Raises:
            BundleError: the bundle cannot be served.
            ConfigError: it does not fit the provider or into memory.
        """
        if is_source(folder):
            async with self._intake:  # others are loaded meanwhile
                folder = await in_thread(partial(take_in, name, folder, self._config.provider))
        async with self._turn:
            resolved, manifests, size = await self._in_loader(partial(_read, name, folder))
            for version in self._serving:
                same = version.folder == resolved and [*version.manifests] == manifests
                if same and not version.cause_of_death:
                    install(version)
                    return
            await self._make_room(name, size)
            started = time.perf_counter()
            version = Version(resolved, await self._load(name, resolved))
            self._metrics.model_load_duration.observe(time.perf_counter() - started)
            self._serving.append(version)
            install(version)
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch_files())

    def has_room(self, name: str, size: int, seconds: float) -> bool:
        """Whether a version of ``size`` bytes fits without unloading one that is in use, or was in
        the last ``seconds``.
        """
        since = time.monotonic() - seconds
        kept = [
            each
            for each in self._serving
            if each.names != {name} and (each.num_leases or each.used_at > since)
        ]
        return self._fits([*kept, *self._draining], size)

    def drain(self, version: Version) -> "asyncio.Task[None]":
        """Stops a version that no name has any more, once its requests are finished.

        Returns:
            What ends when it is stopped.
        """
        assert not version.names, "a version that takes requests is not stopped"
        if version not in self._draining:
            self._serving.remove(version)
            self._draining[version] = asyncio.create_task(self._drain(version))
        return self._draining[version]

    async def close(self) -> None:
        """Stops all versions at once. No load may be under way."""
        left, tasks = [*self._serving, *self._draining], [*self._draining.values()]
        self._serving.clear()
        if self._watching is not None:
            tasks.append(self._watching)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(in_thread(version.stop) for version in left))
        self._loader.shutdown(wait=False)

    async def _drain(self, version: Version) -> None:
        try:
            await version.idle.wait()
            await in_thread(version.stop)
        finally:
            del self._draining[version]
        await in_thread(return_free_memory)

    async def _watch_files(self) -> None:
        """Ends the engines of versions whose files somebody writes to."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            for version in (*self._serving, *self._draining):
                if version.cause_of_death:
                    continue
                overwritten = await in_thread(version.find_overwritten)
                for model in version.models if overwritten else ():
                    cause = f"{overwritten} of model {model.name!r} was overwritten while in use"
                    _log.critical("%s", cause)
                    model.engine.fail(cause)

    async def _load(self, name: str, folder: Path) -> tuple[ServedModel, ...]:
        """Loads a folder and runs a first pass of each graph."""
        loading = self._in_loader(partial(self._start, name, folder))
        try:
            models = await asyncio.shield(loading)
        except asyncio.CancelledError:
            # The thread cannot be interrupted; what it makes is stopped.
            await asyncio.wait({loading})
            if loading.exception() is None:
                await _stop(loading.result())
            raise
        try:
            for model in models:
                await model.engine.warm_up()
        except BaseException:
            await _stop(models)
            raise
        return models

    async def _make_room(self, name: str, size: int) -> None:
        """Unloads what was unused for longest until one more version of ``size`` bytes fits.

        Idle versions go first. If all are in use, the one that began to be idle the longest ago
        takes no more requests and is waited for: otherwise a busy model would keep others out for
        ever. The version that the new one replaces does not count.

        Raises:
            ConfigError: it does not fit alone either.
        """
        limit = self._config.models_memory
        if limit is not None and size > limit:
            raise ConfigError(
                f"model {name!r} has {size:,} bytes of weights, but all models together may have "
                f"{limit:,} (--models-memory)"
            )
        while True:
            others = [each for each in self._serving if each.names != {name}]
            if self._fits([*others, *self._draining], size):
                return
            if self._draining and self._fits(others, size):
                await asyncio.wait(self._draining.values(), return_when=asyncio.FIRST_COMPLETED)
                continue
            victim = min(others, key=lambda each: (each.num_leases > 0, each.used_at))
            self._evict(victim)

    def _fits(self, versions: Sequence[Version], size: int) -> bool:
        max_models, limit = self._config.models_max, self._config.models_memory
        if max_models is not None and len(versions) >= max_models:
            return False
        return limit is None or sum(each.num_bytes for each in versions) + size <= limit

    def _in_loader(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._loader, work)


def _read(name: str, folder: Path) -> tuple[Path, list[Manifest], int]:
    """A bundle's folder without links, its manifests, and the bytes of its models."""
    manifests = read_manifests(name, folder)
    return folder.resolve(), manifests, sum(num_bytes(folder, each) for each in manifests)


async def _stop(models: Sequence[ServedModel]) -> None:
    await asyncio.gather(*(in_thread(model.stop) for model in models))
