"""Entry: one name that models are served under, and where it is in its life.

unloaded   there is a bundle; a request may have it loaded
loading    its graphs are being loaded; requests wait
ready      requests run; a new version may be loading meanwhile
draining   it takes no more requests; those that run finish
failed     it could not be loaded, or its engine died; the reason is known. An adapter has failed
           where its base has

A `Version` is what loading makes of a bundle folder. A request holds a `Lease` on one, and it is
stopped when nobody serves it under any name and the last lease is released. Everything here is used
on the event loop only.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import is_
from pathlib import Path

from maskdial.bundle.manifest import Manifest
from maskdial.engine.life import EngineState
from maskdial.errors import MaskdialError
from maskdial.metrics import ModelState
from maskdial.registry.served import ServedModel
from maskdial.runtime.adapter import Adapter


@dataclass(eq=False)
class Version:
    """A loaded bundle folder: the models of its graphs.

    Attributes:
        folder: the bundle's, links resolved.
        models: one for each graph, under the name that had it loaded; none once it is stopped.
        names: the names that it is served under. Two names of one folder share its version.
        num_leases: requests that use it.
        used_at: when the last of them ended, or it was loaded, by `time.monotonic`.
        idle: set while nobody uses it.
    """

    folder: Path
    models: tuple[ServedModel, ...]
    names: set[str] = field(default_factory=set)
    num_leases: int = 0
    used_at: float = field(default_factory=time.monotonic)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.num_bytes = sum(model.bundle.num_bytes for model in self.models)
        self.manifests = tuple(model.manifest for model in self.models)
        self.idle.set()

    @property
    def cause_of_death(self) -> str:
        """Why an engine does not run any more; empty if all of them do."""
        engines = (model.engine for model in self.models)
        return next((each.cause_of_death for each in engines if each.state is EngineState.DEAD), "")

    def under(self, name: str) -> tuple[ServedModel, ...]:
        """Its models, served under a name."""
        return tuple(
            model if model.name == name else replace(model, bundle=replace(model.bundle, name=name))
            for model in self.models
        )

    def find_overwritten(self) -> str | None:
        """The name of a file that was overwritten since it was loaded; call it in a thread."""
        found = (model.bundle.find_overwritten() for model in self.models)
        return next((name for name in found if name is not None), None)

    def stop(self) -> None:
        """Stops the engines at once, and gives their memory up; call it in a thread."""
        for model in self.models:
            model.stop()
        self.models = ()


@dataclass(eq=False)
class LoadedAdapter:
    """An adapter in memory, for the models of a base.

    Attributes:
        adapter: the adapter.
        manifests: the base's, as it was loaded.
        num_leases: requests that use it.
        used_at: when the last of them ended, or it was loaded, by `time.monotonic`.
        idle: set while nobody uses it.
    """

    adapter: Adapter
    manifests: tuple[Manifest, ...]
    num_leases: int = 0
    used_at: float = field(default_factory=time.monotonic)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.idle.set()

    @property
    def adapted(self) -> tuple[Manifest, ...]:
        """The base's manifests, of which a head of the adapter's own changes the task."""
        head = self.adapter.head
        if head is None:
            return self.manifests
        return tuple(head.settings.on(each) for each in self.manifests)

    def fits(self, models: Sequence[ServedModel]) -> bool:
        """Whether it was loaded for these models of its base, and not for a version before."""
        others = [model.manifest for model in models]
        return len(others) == len(self.manifests) and all(map(is_, self.manifests, others))

    def hold(self) -> None:
        """Notes a request that uses it."""
        self.num_leases += 1
        self.idle.clear()

    def release(self) -> None:
        """Notes the end of one."""
        self.num_leases -= 1
        self.used_at = time.monotonic()
        if self.num_leases == 0:
            self.idle.set()


class Lease:
    """A request's hold on a version, which is not stopped before the lease is released.

    Attributes:
        name: the entry's.
        models: the version's, under that name.
    """

    __slots__ = ("_adapter", "_entry", "_version", "models", "name")

    def __init__(self, entry: "Entry", version: Version) -> None:
        self.name = entry.name
        self.models = entry.models
        self._entry = entry
        self._version: Version | None = version
        self._adapter: LoadedAdapter | None = None
        version.num_leases += 1
        version.idle.clear()

    def adapt(self, name: str, loaded: LoadedAdapter) -> None:
        """Makes it a lease on an adapter of the models, under the adapter's name."""
        loaded.hold()
        self._adapter = loaded
        self.name = name
        self.models = tuple(
            replace(
                model,
                bundle=replace(model.bundle, name=name, manifest=manifest),
                adapter=loaded.adapter,
            )
            for model, manifest in zip(self.models, loaded.adapted, strict=True)
        )

    def release(self) -> None:
        """Ends the hold; a second call does nothing."""
        version, self._version = self._version, None
        if version is None:
            return
        if self._adapter is not None:
            self._adapter.release()
        version.num_leases -= 1
        version.used_at = time.monotonic()
        if version.num_leases == 0:
            version.idle.set()


@dataclass(frozen=True, slots=True)
class Loading:
    """A load under way: of which folder, and the task that does it."""

    folder: Path
    task: "asyncio.Task[None]"


@dataclass(eq=False)
class Entry:
    """One name, its bundle and its versions.

    Attributes:
        name: what requests call it.
        folder: where its bundle is.
        manifests: those of the bundle, one for each graph; none if they could not be read.
        keep_alive: seconds after which it is unloaded when nobody uses it; None: never.
        current: the version that takes requests.
        models: its models, under this name.
        loading: the load under way, possibly of a new version.
        waiters: the requests that wait for it.
        draining: the versions that it served before and that still run, each with its task.
        failure: why the last load failed; None if it did not.
        failed_at: when it did, by `time.monotonic`.
        base: of an adapter, the entry of its base, whose version its requests lease. The adapter
            has no version of its own; its ``manifests`` are the base's, unless it has a head.
        adapter: what is loaded of it.
    """

    name: str
    folder: Path
    manifests: tuple[Manifest, ...] = ()
    keep_alive: float | None = None
    current: Version | None = None
    models: tuple[ServedModel, ...] = ()
    loading: Loading | None = None
    waiters: list["asyncio.Future[Lease]"] = field(default_factory=list)
    draining: "set[asyncio.Task[None]]" = field(default_factory=set)
    failure: MaskdialError | None = None
    failed_at: float = 0.0
    base: "Entry | None" = None
    adapter: LoadedAdapter | None = None

    @property
    def state(self) -> ModelState:
        if self.base is not None:
            if self.base.state == "failed":
                return "failed"
            loaded = self.adapter is not None and self.base.current is not None
            return "ready" if loaded else "failed" if self.failure else "unloaded"
        if self.current is not None:
            return "failed" if self.current.cause_of_death else "ready"
        if self.loading is not None:
            return "loading"
        if self.draining:
            return "draining"
        return "failed" if self.failure else "unloaded"

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing runs, loads or waits under the name."""
        return not (self.current or self.loading or self.draining or self.waiters)

    @property
    def reason(self) -> str:
        """Why it failed, or why its new version or its base did; empty if none did."""
        if self.base is not None and self.base.state == "failed":
            return f"its base failed: {self.base.reason}"
        died = "" if self.current is None else self.current.cause_of_death
        return died or ("" if self.failure is None else self.failure.message)

    def install(self, version: Version) -> Version | None:
        """Has a version take the requests from now on; returns the one that did so before."""
        before, self.current = self.current, version
        self.models = version.under(self.name)
        self.manifests = version.manifests
        self.failure = None
        version.names.add(self.name)
        if before is not None and before is not version:
            before.names.discard(self.name)
        return before

    def withdraw(self) -> Version | None:
        """Has the version take no more requests; returns it."""
        before, self.current, self.models = self.current, None, ()
        if before is not None:
            before.names.discard(self.name)
        return before

    def lease(self) -> Lease:
        """A hold on the current version, which there must be."""
        assert self.current is not None, "a name without a version has no leases"
        return Lease(self, self.current)

    async def wait(self) -> Lease:
        """Waits for the load under way, and returns a hold on what it loads.

        Raises:
            UnavailableError: it fails, or is given up.
        """
        waiter: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # it was granted too late to be taken
            raise

    def settle(self, error: Exception | None = None) -> None:
        """Gives each waiter its lease, or the error."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(self.lease())
            else:
                waiter.set_exception(error)
