"""The models that a server serves: which of them a request means, and how they come and go.

`Models` has an `Entry` for each name. Requests lease the version that the entry serves; a version
that is replaced or unloaded finishes the requests that lease it. Everything here is used on the
event loop only.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import chain
from pathlib import Path

from maskdial.bundle.adapter import ADAPTER_MANIFEST, read_adapter_manifest
from maskdial.bundle.bundle import num_bytes, read_manifests
from maskdial.bundle.manifest import Manifest
from maskdial.config import Config, model_name_fault
from maskdial.engine.fairness import current_usage
from maskdial.engine.thread import in_thread
from maskdial.errors import (
    BundleError,
    CheckError,
    ConfigError,
    ForbiddenError,
    MaskdialError,
    NotFoundError,
    UnavailableError,
    ValidationError,
)
from maskdial.exporting import Progress
from maskdial.metrics import Metrics, UnloadReason
from maskdial.model_cache import HubSource, is_source, source_bundle
from maskdial.registry.adapters import Adapters
from maskdial.registry.catalog import Catalog
from maskdial.registry.choice import LATEST, Chooser, ModelChoice
from maskdial.registry.entry import Entry, Lease, LoadedAdapter, Loading, Version
from maskdial.registry.pulls import Pulls
from maskdial.registry.served import ServedModel, Task
from maskdial.registry.versions import Start, Versions

_log = logging.getLogger("maskdial.models")

_RETRY_SECONDS = 30.0
_SCAN_SECONDS = 1.0
_SWEEP_SECONDS = 1.0
_RECENT_SECONDS = 60.0


class Models:
    """The served models by name; one name may stand for two graphs, one for each attention mask.

    Args:
        tasks: everything that a model can be asked for, in the order of listings.
        config: limits, and whether requests may have models loaded.
        metrics: where states, loads and unloads are counted.
        start: loads a bundle.
    """

    def __init__(
        self, tasks: Sequence[Task], config: Config, metrics: Metrics, start: Start
    ) -> None:
        self._chooser = Chooser(tasks)
        self._metrics = metrics
        self._keep_alive = config.models_keep_alive
        self._autoloads = config.models_autoload == "on"
        self._catalog = Catalog({})
        self._entries: dict[str, Entry] = {}
        self._versions = Versions(config, metrics, start, self._evict)
        self._adapters = Adapters(config)
        self.pulls, self._pulls_none = Pulls(config), not config.allow_pull
        self._configured_adapters = config.adapters
        self._scanned_at = -_SCAN_SECONDS
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

    def __iter__(self) -> Iterator[ServedModel]:
        """The models that are loaded."""
        return chain.from_iterable(entry.models for entry in self._entries.values())

    @property
    def entries(self) -> Sequence[Entry]:
        """All names that there are, loaded or not."""
        return tuple(self._entries.values())

    @property
    def adapters(self) -> frozenset[str]:
        """The names under which adapters are served."""
        return frozenset(name for name, entry in self._entries.items() if entry.base is not None)

    @property
    def num_bases(self) -> int:
        """The number of names that are no adapters'."""
        return sum(entry.base is None for entry in self._entries.values())

    @property
    def autoloads(self) -> bool:
        """Whether a request has the model loaded that it needs."""
        return self._autoloads

    def entry(self, name: str) -> Entry:
        """The entry of a name.

        Raises:
            NotFoundError: there is none; the message lists those that exist.
        """
        return self._chooser.named(self._entries, name)

    def named(self, name: str) -> Sequence[ServedModel]:
        """All loaded models of a name.

        Raises:
            NotFoundError: there is no such name.
        """
        return self.entry(name).models

    def tasks_of(self, manifest: Manifest) -> tuple[str, ...]:
        """The names of the tasks that a model can do."""
        return self._chooser.tasks_of(manifest)

    def does(self, task: Task) -> bool:
        """Whether there is a model for a task, loaded or not."""
        manifests = chain.from_iterable(entry.manifests for entry in self._entries.values())
        return any(map(task.serves, manifests))

    # Which model a request means, and a hold on it.

    def try_lease(self, choice: ModelChoice, task: Task | None = None) -> Lease | None:
        """A lease on a model that is loaded; None if `lease` has to load or to find it first.

        Raises:
            NotFoundError: no such model, or none for the task.
            ValidationError: the model cannot do the task, or several can.
        """
        if self._may_have_come(choice.name):
            return None
        entry = self._chooser.find(self._entries, choice, task)
        if entry.base is not None:
            if entry.adapter is None or not entry.adapter.fits(entry.base.models):
                return None
            lease = entry.base.lease()
            lease.adapt(entry.name, entry.adapter)
            return lease
        return None if entry.current is None else entry.lease()

    async def lease(self, choice: ModelChoice, task: Task | None = None) -> Lease:
        """A lease on a model, which is loaded first if necessary; without a task, the named one.

        A caller that is cancelled leaves the load to the others. One in the background has no model
        unloaded that was used a moment ago.

        Raises:
            NotFoundError, ValidationError: as `try_lease`.
            UnavailableError: the model could not be loaded, or requests may not have it loaded.
        """
        if self._may_have_come(choice.name):
            await self.refresh()
        entry = self._chooser.find(self._entries, choice, task)
        if entry.base is not None:
            return await self._lease_adapted(entry, entry.base)
        return await self._lease(entry)

    async def _lease(self, entry: Entry) -> Lease:
        if entry.current is not None:
            return entry.lease()
        if entry.loading is None:
            if not self._autoloads:
                raise UnavailableError(
                    f"model {entry.name!r} is not loaded; have it loaded with POST /models/load"
                )
            if entry.failure and time.monotonic() - entry.failed_at < _RETRY_SECONDS:
                raise _not_loaded(entry, entry.failure)
            if current_usage().background and not self._has_room(entry):
                raise UnavailableError(
                    f"model {entry.name!r} is not loaded, and others that were used in the last "
                    f"{_RECENT_SECONDS:g} seconds make no room for a batch"
                )
            self._begin(entry, entry.folder)
        return await entry.wait()

    def _has_room(self, entry: Entry) -> bool:
        size = sum(num_bytes(entry.folder, manifest) for manifest in entry.manifests)
        return self._versions.has_room(entry.name, size, _RECENT_SECONDS)

    async def _lease_adapted(self, entry: Entry, base: Entry) -> Lease:
        """A lease on the base of an adapter, with the adapter."""
        lease = await self._lease(base)
        try:
            lease.adapt(entry.name, await self._open_adapter(entry, entry.folder, lease))
        except (BundleError, ConfigError) as error:
            lease.release()
            raise self._fail(entry, error) from error
        except BaseException:
            lease.release()
            raise
        return lease

    async def _open_adapter(
        self, entry: Entry, folder: Path, lease: Lease, *, anew: bool = False
    ) -> LoadedAdapter:
        loaded = await self._adapters.open(entry, folder, lease.models, anew=anew)
        entry.manifests, entry.failure = loaded.adapted, None
        self._note(entry)
        return loaded

    def pick(self, lease: Lease, choice: ModelChoice, task: Task) -> ServedModel:
        """The model of a lease that does the task; if it does so under both masks, the causal one.

        Raises:
            ValidationError: it cannot do the task.
        """
        return self._chooser.pick(lease.name, lease.models, choice, task)

    def _may_have_come(self, name: str | None) -> bool:
        """Whether a bundle of that name may have been added or repaired since the last scan."""
        if name is None or self._catalog.folder is None or not self._autoloads:
            return False
        known = name in self._entries and self._entries[name].manifests
        return not known and self._is_stale

    @property
    def _is_stale(self) -> bool:
        return time.monotonic() - self._scanned_at >= _SCAN_SECONDS

    # How they come and go.

    async def open(self, catalog: Catalog) -> None:
        """Takes up the bundles of a catalog, and loads those that are configured by name.

        One that computes something else than at export is left out with its adapters, unless there
        is no other; requests for them get the reason.

        Raises:
            BundleError, ConfigError: one of these cannot be served, or the folder not be read.
        """
        self._catalog = catalog
        await self.scan()
        for name in catalog.configured:
            entry = self._entries[name]
            try:
                await self._begin(entry, entry.folder)
            except CheckError:
                if len(catalog.configured) == 1:
                    raise
        if catalog.configured and not any(self):
            failures = (self._entries[name].failure for name in catalog.configured)
            raise next(each for each in failures if each is not None)
        for name, (folder, base) in self._configured_adapters.items():
            if base not in self._entries:
                raise ConfigError(f"adapter {name!r}: no model {base!r} is served")
            await self._load_configured_adapter(name, folder, base)
        self._sweep()

    async def refresh(self) -> None:
        """`scan` on behalf of anybody: not more than once a second, and without an error."""
        if self._catalog.folder is not None and self._is_stale:
            await self._scan_quietly()

    async def scan(self) -> None:
        """Looks for bundles that have come or gone.

        Raises:
            ConfigError: the folder of bundles cannot be read.
        """
        self._scanned_at = time.monotonic()
        known = {name for name, entry in self._entries.items() if entry.manifests}
        found, read = await in_thread(partial(_scan, self._catalog, self.pulls, known))
        for name, folder in found.items():
            entry = self._entries.get(name) or self._add(name, folder)
            if entry.base is not None:
                continue
            outcome = read.get(name)
            if isinstance(outcome, MaskdialError):
                entry.failure = outcome
            elif outcome is not None and not entry.manifests:
                entry.manifests, entry.failure = outcome, None
            self._note(entry)
        for entry in self.entries:
            if entry.name not in found and entry.is_at_rest and entry.base is None:
                self._remove(entry)

    async def _scan_quietly(self) -> None:
        try:
            await self.scan()
        except ConfigError as error:
            _log.warning("%s", error.message)

    async def load(
        self,
        name: str,
        path: str | None = None,
        keep_alive: float | None = None,
        *,
        base: str | None = None,
    ) -> Entry:
        """Loads a model or a new version of it, and returns when that takes the requests.

        The version before finishes the requests that it has. If the bundle is loaded already and
        has not changed, nothing happens.

        Args:
            name: what requests call it.
            path: its bundle, in the folder of bundles. Default: where it is known to be.
            keep_alive: seconds after which it is unloaded when nobody uses it. Default: as before.
            base: of an adapter, as of `load_adapter`.

        Raises:
            NotFoundError: there is no such bundle.
            ValidationError: it cannot be loaded; the message says why.
            UnavailableError: it was unloaded meanwhile, or the server shuts down.
        """
        if name not in self._entries:
            await self.scan()
        known = self._entries.get(name)
        is_adapter = base is not None or (known is not None and known.base is not None)
        if path is None:
            folder = self.entry(name).folder
        else:
            folder = await in_thread(partial(self._catalog.within, path))
        if is_adapter or (path is not None and (folder / ADAPTER_MANIFEST).is_file()):
            if keep_alive is not None:
                raise ValidationError("an adapter has none; its base has", field="keep_alive")
            return await self.load_adapter(name, path, base)
        while True:
            entry = self._entries.get(name) or self._add(name, folder)
            if entry.loading is None or entry.loading.folder == folder:
                break
            await asyncio.wait({entry.loading.task})
        if keep_alive is not None:
            entry.keep_alive = keep_alive
        if entry.loading is None:
            self._begin(entry, folder)
        try:
            (await entry.wait()).release()
        except UnavailableError as error:
            if entry.failure is None:
                raise
            raise ValidationError(error.message) from error
        return entry

    async def load_adapter(
        self, name: str, path: str | None = None, base: str | None = None
    ) -> Entry:
        """Loads an adapter, or a new version of it; no request waits for that.

        Args:
            name: what requests call it.
            path: its bundle, in the folder of bundles. Default: where it is known to be.
            base: the name of its base. Default: as before, or the model that it was made for.

        Raises:
            NotFoundError: there is no such base, or no such adapter.
            ValidationError: it cannot be loaded; the message says why.
            UnavailableError: its base could not be loaded, or the adapters in use leave no room.
        """
        known = self._entries.get(name)
        if path is not None:
            folder = await in_thread(partial(self._catalog.within, path))
        else:
            folder = self.entry(name).folder
        if base is None:
            before = None if known is None else known.base
            base = await self._find_base(name, folder) if before is None else before.name
        try:
            return await self._load_adapter(name, folder, self.entry(base).name)
        except (BundleError, ConfigError) as error:
            raise ValidationError(error.message) from error

    async def _find_base(self, name: str, folder: Path) -> str:
        """The only model that an adapter was made for.

        Raises:
            ValidationError: there is none, or several.
        """
        try:
            manifest = await in_thread(partial(read_adapter_manifest, name, folder))
        except BundleError as error:
            raise ValidationError(error.message, field="path") from error
        found = [
            entry.name
            for entry in self.entries
            if entry.base is None
            and any(each.source_sha256 == manifest.base_sha256 for each in entry.manifests)
        ]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValidationError(f"several models are its base; name one: {', '.join(found)}")
        raise ValidationError(f"no model here is its base, which is {manifest.base}")

    async def _load_configured_adapter(self, name: str, folder: Path, base: str) -> None:
        """Loads an adapter, or leaves it out as its base, if that failed its golden check.

        Raises:
            BundleError, ConfigError, UnavailableError: it, or its base, cannot be served.
        """
        owner = self._base_of(name, base)
        if not isinstance(owner.failure, CheckError):
            try:
                await self._load_adapter(name, folder, base)
                return
            except UnavailableError:  # of a base that is loaded for its adapter only
                if not isinstance(owner.failure, CheckError):
                    raise
        entry = self._add(name, folder)
        entry.base, entry.manifests = owner, owner.manifests
        self._metrics.count_load(name, "failed")
        _log.error("adapter %s is not served: %s", name, entry.reason)
        self._note(entry)

    def _base_of(self, name: str, base: str) -> Entry:
        """Raises: BundleError: an adapter of this name cannot have that base."""
        known, owner = self._entries.get(name), self._entries[base]
        if owner.base is not None:
            raise BundleError(f"adapter {name!r}: {base!r} is an adapter itself; name its base")
        if known is not None and known.base is None:
            raise BundleError(f"adapter {name!r}: a model has this name")
        return owner

    async def _load_adapter(self, name: str, folder: Path, base: str) -> Entry:
        """Raises: BundleError, ConfigError: it cannot be served."""
        known, owner = self._entries.get(name), self._base_of(name, base)
        lease = await self._lease(owner)
        try:
            entry = known or self._add(name, folder)
            if entry.base is not owner:  # else it serves what it has until the new version is there
                entry.base, entry.manifests = owner, owner.manifests
            try:
                await self._open_adapter(entry, folder, lease, anew=True)
            except BaseException:
                if known is None:
                    self._remove(entry)
                raise
        finally:
            lease.release()
        self._metrics.count_load(name, "ok")
        return entry

    async def _unload_adapter(self, entry: Entry) -> Entry:
        """Drops an adapter; one that is not configured is forgotten."""
        loaded = self._adapters.drop(entry)
        if loaded is not None:
            self._metrics.count_unload(entry.name, "request")
        self._note(entry)
        if entry.name not in self._configured_adapters:
            self._remove(entry)
        if loaded is not None:
            await loaded.idle.wait()
        return entry

    def _remove(self, entry: Entry) -> None:
        if self._entries.get(entry.name) is entry:
            del self._entries[entry.name]
            self._metrics.forget_name(entry.name)

    async def unload(self, name: str) -> Entry:
        """Unloads a model or an adapter, and returns when its last request is finished.

        A load under way is given up, and requests that wait for it are refused.

        Raises:
            NotFoundError: there is no such name.
        """
        entry = self.entry(name)
        if entry.base is not None:
            return await self._unload_adapter(entry)
        if entry.loading is not None:
            entry.loading.task.cancel()
            await asyncio.wait({entry.loading.task})
        self._retire(entry, "request")
        if entry.draining:
            await asyncio.wait(set(entry.draining))
        entry.failure = None
        self._note(entry)
        await self._scan_quietly()
        return entry

    def to_pull(self, name: str) -> HubSource | None:
        """What has to be pulled so that a name is served; None if it is.

        Raises:
            NotFoundError: nothing of that name is served, and the server pulls none.
            ValidationError, ForbiddenError: as `Pulls.source`.
        """
        try:
            self.entry(ModelChoice.of(name).name or "")
        except NotFoundError as error:
            if self._pulls_none:
                raise NotFoundError(
                    f"{error.message}; it pulls none without --allow-pull: export a checkpoint "
                    "with 'maskdial export' and serve it with --model NAME=FOLDER"
                ) from error
            return self.pulls.source(name)
        return None

    async def pull(self, source: HubSource | None) -> AsyncGenerator[Progress, None]:
        """Takes a model of the Hub in, and serves it from then on; of None, nothing happens.

        Raises:
            ValidationError: that failed.
        """
        if source is not None:
            async with aclosing(self.pulls.pull(source)) as steps:
                async for progress in steps:
                    yield progress
            await self.scan()

    async def remove(self, name: str) -> None:
        """Unloads a model that was pulled, and removes its files.

        Raises:
            NotFoundError: there is no such name.
            ForbiddenError: it is another one's, such as the operator's.
            ValidationError: it cannot be removed.
        """
        entry = self.entry(name.removesuffix(LATEST))
        bundles = await in_thread(self.pulls.bundles)
        if entry.folder not in bundles.values() or entry.name in self._catalog.configured:
            raise ForbiddenError(f"model {entry.name!r} was not pulled, and its files stay")
        await self.unload(entry.name)
        await self.pulls.remove(entry.folder)
        await self.scan()

    async def close(self) -> None:
        """Stops everything at once, and what is being loaded as soon as it is."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        loads = {entry.loading.task for entry in self.entries if entry.loading is not None}
        for task in loads:
            task.cancel()
        if loads:
            await asyncio.wait(loads)
        await self._versions.close()

    def _add(self, name: str, folder: Path) -> Entry:
        fault = model_name_fault(name)
        if fault is not None:
            raise ValidationError(fault, field="model")
        entry = self._entries[name] = Entry(name, folder, keep_alive=self._keep_alive)
        self._metrics.declare_name(name)
        return entry

    def _begin(self, entry: Entry, folder: Path) -> "asyncio.Task[None]":
        """Starts loading a folder; requests that wait for the entry learn its outcome."""
        install = partial(self._install, entry, folder)
        task = asyncio.create_task(self._versions.open(entry.name, folder, install))
        entry.loading = Loading(folder, task)
        # A callback, because a task that is cancelled before its first step runs no code.
        task.add_done_callback(partial(self._finish, entry))
        self._note(entry)
        return task

    def _finish(self, entry: Entry, task: "asyncio.Task[None]") -> None:
        """Ends a load. A failure is the entry's, and its waiters'."""
        error: MaskdialError | None = None
        if task.cancelled():
            error = UnavailableError(f"model {entry.name!r} was unloaded while it was loading")
            if self._closed:
                error = UnavailableError("the server is shutting down; try another instance")
        elif isinstance(cause := task.exception(), MaskdialError):
            _log.error("%s", cause.message)
            error = self._fail(entry, cause)
        elif cause is not None:
            _log.error("loading model %s failed", entry.name, exc_info=cause)
            error = self._fail(entry, BundleError(f"loading failed: {cause!r}"))
        entry.loading = None
        self._note(entry)
        entry.settle(error)

    def _install(self, entry: Entry, folder: Path, version: Version) -> None:
        before, entry.folder = entry.install(version), folder
        self._metrics.count_load(entry.name, "ok")
        if before is not None and before is not version:
            self._let_go(entry, before, "replaced")

    def _fail(self, entry: Entry, cause: MaskdialError) -> UnavailableError:
        entry.failure, entry.failed_at = cause, time.monotonic()
        self._metrics.count_load(entry.name, "failed")
        return _not_loaded(entry, cause)

    def _retire(self, entry: Entry, reason: UnloadReason) -> None:
        """Has an entry take no more requests; those that run finish."""
        version = entry.withdraw()
        if version is not None:
            self._let_go(entry, version, reason)

    def _let_go(self, entry: Entry, version: Version, reason: UnloadReason) -> None:
        self._metrics.count_unload(entry.name, reason)
        _log.info("model %s: a version is unloaded (%s)", entry.name, reason)
        if version.names:
            return
        drain = self._versions.drain(version)
        entry.draining.add(drain)

        def drained(_: object) -> None:
            entry.draining.discard(drain)
            self._note(entry)

        drain.add_done_callback(drained)
        self._note(entry)

    def _evict(self, version: Version) -> None:
        for name in sorted(version.names):
            self._retire(self._entries[name], "room")

    def _sweep(self) -> None:
        """Unloads what was unused for too long."""
        now = time.monotonic()
        for entry in self.entries:
            version, keep_alive = entry.current, entry.keep_alive
            if version is None or keep_alive is None or version.num_leases or entry.loading:
                continue
            if now - version.used_at >= keep_alive:
                self._retire(entry, "keep_alive")
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)

    def _note(self, entry: Entry) -> None:
        """Tells the metrics of a state, on which those of its adapters depend."""
        for each in self.entries:
            if each is entry or each.base is entry:
                self._metrics.set_state(each.name, each.state)


def _not_loaded(entry: Entry, cause: MaskdialError) -> UnavailableError:
    reason = cause.message.removeprefix(f"model {entry.name!r}: ")
    return UnavailableError(f"model {entry.name!r} could not be loaded: {reason}")


def _scan(
    catalog: Catalog, pulls: Pulls, known: set[str]
) -> tuple[Mapping[str, Path], Mapping[str, tuple[Manifest, ...] | MaskdialError]]:
    """The bundles that there are, and what the manifests of those not ``known`` say; of what is no
    bundle yet, nothing.
    """
    found = pulls.bundles() | catalog.scan()
    read: dict[str, tuple[Manifest, ...] | MaskdialError] = {}
    for name, folder in found.items():
        if name in known:
            continue
        try:
            bundle = source_bundle(folder) if is_source(folder) else folder
            is_there = bundle == folder or bundle.exists()
            read[name] = tuple(read_manifests(name, bundle)) if is_there else ()
        except (BundleError, ConfigError) as error:
            read[name] = error
    return found, read
