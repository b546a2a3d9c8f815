"""Adapters: the low-rank adapters that are loaded, within the limit on their size.

An adapter is served by the engine of its base, and so a request for it leases the base. Its
matrices may be dropped, and are read again when a request needs them: that takes milliseconds.
Everything here is used on the event loop only.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from maskdial.bundle.adapter import read_adapter
from maskdial.config import Config
from maskdial.engine.thread import in_thread
from maskdial.errors import BundleError, ConfigError, UnavailableError
from maskdial.kernels.installed import find_kernels
from maskdial.registry.entry import Entry, LoadedAdapter
from maskdial.registry.served import ServedModel
from maskdial.runtime.adapter import Adapter, load_adapter

_log = logging.getLogger("maskdial.models")


class Adapters:
    """Loads adapters one at a time, and drops those unused for longest when room is needed.

    Args:
        config: the limit.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._turn = asyncio.Lock()
        self._loaded: list[Entry] = []

    async def open(
        self, entry: Entry, folder: Path, models: Sequence[ServedModel], *, anew: bool = False
    ) -> LoadedAdapter:
        """An entry's adapter, which is loaded if necessary, or ``anew`` in any case.

        Args:
            entry: its name.
            folder: its bundle.
            models: those of its base.

        Raises:
            BundleError: it cannot be served with these models.
            ConfigError: it does not fit into the limit.
            UnavailableError: not beside those that are in use.
        """
        async with self._turn:
            if entry.adapter is not None and entry.adapter.fits(models) and not anew:
                return entry.adapter
            started = time.perf_counter()
            adapter = await in_thread(partial(_load, entry.name, folder, models, self._config))
            self._make_room(entry, adapter.num_bytes)
            entry.adapter = LoadedAdapter(adapter, tuple(model.manifest for model in models))
            entry.folder = folder
            self._loaded.append(entry)
            seconds = time.perf_counter() - started
            _log.info("adapter %s: loaded in %.0f ms", entry.name, 1000 * seconds)
            return entry.adapter

    def drop(self, entry: Entry) -> LoadedAdapter | None:
        """Has an entry take no more requests with its adapter; those that run keep it."""
        loaded, entry.adapter = entry.adapter, None
        if entry in self._loaded:
            self._loaded.remove(entry)
        return loaded

    def _make_room(self, entry: Entry, size: int) -> None:
        """Drops the entry's own adapter, which is replaced, and others until ``size`` bytes fit."""
        limit = self._config.adapters_memory
        if limit is not None and size > limit:
            raise ConfigError(
                f"adapter {entry.name!r} has {size:,} bytes, but all adapters together may have "
                f"{limit:,} (--adapters-memory)"
            )
        others = [each for each in self._loaded if each is not entry]
        idle = [each for each in others if each.adapter and not each.adapter.num_leases]
        idle.sort(key=lambda each: each.adapter.used_at if each.adapter else 0.0, reverse=True)
        dropped = []
        while limit is not None and sum(map(_num_bytes, others)) + size > limit:
            if not idle:
                raise UnavailableError(
                    f"adapter {entry.name!r} does not fit beside those in use (--adapters-memory); "
                    "try again in a moment"
                )
            dropped.append(idle.pop())
            others.remove(dropped[-1])
        for each in (entry, *dropped):
            self.drop(each)


def _num_bytes(entry: Entry) -> int:
    return 0 if entry.adapter is None else entry.adapter.adapter.num_bytes


def _load(name: str, folder: Path, models: Sequence[ServedModel], config: Config) -> Adapter:
    """Raises: BundleError: the adapter cannot be served with these models."""
    bundle = read_adapter(name, folder)
    base = models[0].name
    for model in models:
        if bundle.manifest.base_sha256 != model.manifest.source_sha256:
            raise BundleError(
                f"adapter {name!r} was made for {bundle.manifest.base}, and model {base!r} was "
                f"exported from {model.manifest.source}, or from other weights of that name"
            )
        if model.why_no_adapters:
            raise BundleError(f"adapter {name!r}: model {base!r} {model.why_no_adapters}")
    kernels = find_kernels(config.kernels)
    assert kernels is not None, "only models with the kernels have projections"
    projections = [model.projections for model in models]
    return load_adapter(bundle, kernels, projections, base, _columns(models))


def _columns(models: Sequence[ServedModel]) -> int | None:
    """The columns of the hidden states that a base returns; None if it returns something else."""
    (manifest, *others) = [model.manifest for model in models]
    if others or manifest.task != "embed-all" or manifest.embedding is None:
        return None
    return manifest.embedding.dimension
