"""`Models`: which model a request means, and how models are loaded, replaced and unloaded."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from maskdial.bundle.bundle import Bundle, read_manifests, write_manifest
from maskdial.bundle.manifest import FULL_MANIFEST, MANIFEST, Manifest
from maskdial.config import Config
from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.errors import (
    BundleError,
    CheckError,
    InferenceError,
    MaskdialError,
    NotFoundError,
    UnavailableError,
    ValidationError,
)
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.model import MaskedModel
from maskdial.masked.request import MaskedInput
from maskdial.metrics import Metrics
from maskdial.registry import registry, versions
from maskdial.registry.catalog import STARTER_FOLDER, Catalog
from maskdial.registry.choice import ModelChoice
from maskdial.registry.entry import Lease
from maskdial.registry.registry import Models
from maskdial.registry.served import Task
from tests.unit.scripted_session import WAIT, ScriptedSession, until

SIZE = 1000  # bytes of a bundle's weights
CAUSAL, FULL = read_manifests("hybrid", STARTER_FOLDER / "hybrid")
(CLASSIFIER,) = read_manifests("sentiment", STARTER_FOLDER / "sentiment")


def head(name: str) -> Task:
    """A task that models with its head do."""
    return Task(name, lambda manifest: manifest.task == name)


CLASSIFY, FILL, GENERATE = map(head, ("classify", "fill-mask", "generate"))
SCORE = Task("score", lambda manifest: manifest.task in ("generate", "fill-mask"))
"""What both masks of a language model do."""


class Shelf:
    """A folder of bundles without graphs, and what loads them: engines over scripted sessions.

    While ``gate`` is cleared, loads wait in their thread.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.metrics = Metrics()
        self.starts: list[str] = []
        self.engines: list[MaskedEngine] = []
        self.broken: set[str] = set()
        self.drifting: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        config = Config(model_dir=folder, **settings)
        self.models = Models([CLASSIFY, FILL, GENERATE, SCORE], config, self.metrics, self._start)

    def put(self, name: str, *manifests: Manifest, content: str = "1") -> Path:
        """Makes a bundle, of a classifier unless other manifests are given."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.onnx").write_bytes(bytes(SIZE))
        files = {"model.onnx": content}
        for manifest, file in zip(
            manifests or (CLASSIFIER,), (MANIFEST, FULL_MANIFEST), strict=False
        ):
            write_manifest(folder, manifest.model_copy(update={"files": files}), file)
        return folder

    def _start(self, name: str, folder: Path) -> tuple[MaskedModel, ...]:
        self.starts.append(folder.name)
        assert self.gate.wait(WAIT)
        if folder.name in self.broken:
            raise BundleError(f"model {name!r}: the weights are damaged")
        if folder.name in self.drifting:
            raise CheckError(f"model {name!r}: its logits differ")
        return tuple(self._model(name, folder, each) for each in read_manifests(name, folder))

    def _model(self, name: str, folder: Path, manifest: Manifest) -> MaskedModel:
        metrics = self.metrics.declare_masked(name)
        engine = MaskedEngine(
            ScriptedSession(),
            max_batch_tokens=64,
            max_queue=8,
            pad_token_id=0,
            free_padding=16,
            max_length=16,
            metrics=metrics,
            name=name,
        )
        self.engines.append(engine)
        engine.start()
        bundle = Bundle(name, folder, manifest)
        return MaskedModel(bundle, cast(Any, None), metrics, "cpu", engine)

    @property
    def num_up(self) -> int:
        return sum(engine.ready for engine in self.engines)

    def state(self, name: str) -> str:
        """The model's state, which its metric has to tell as well."""
        state = self.models.entry(name).state
        value = self.metrics.registry.get_sample_value
        labels = {"model": name, "state": state}
        assert value("maskdial_model_state", labels) == 1, state
        return state

    def unloads(self, name: str, reason: str) -> int:
        labels = {"model": name, "reason": reason}
        value = self.metrics.registry.get_sample_value("maskdial_model_unloads_total", labels)
        return int(value or 0)

    async def lease(self, name: str | None, task: Any = CLASSIFY) -> Lease:
        choice = ModelChoice.of(name)
        return self.models.try_lease(choice, task) or await self.models.lease(choice, task)


@contextlib.asynccontextmanager
async def opened(shelf: Shelf, **configured: Path) -> AsyncIterator[Models]:
    await shelf.models.open(Catalog(configured, shelf.folder))
    try:
        yield shelf.models
    finally:
        shelf.gate.set()
        await shelf.models.close()
        assert shelf.num_up == 0
        assert not [thread for thread in threading.enumerate() if thread.name == "maskdial-a"]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * WAIT):
            await scenario

    asyncio.run(bounded())


def task(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    return asyncio.create_task(work)


async def started(shelf: Shelf, count: int) -> None:
    await until(lambda: len(shelf.starts) == count)


def test_the_first_request_loads_and_the_others_wait_for_it(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("a")

    async def scenario() -> None:
        async with opened(shelf) as models:
            assert shelf.state("a") == "unloaded"
            shelf.gate.clear()
            waiting = [task(shelf.lease("a")) for _ in range(5)]
            await started(shelf, 1)
            assert shelf.state("a") == "loading"
            shelf.gate.set()
            leases = await asyncio.gather(*waiting)
            assert shelf.starts == ["a"]
            assert shelf.state("a") == "ready"
            assert models.try_lease(ModelChoice(), CLASSIFY) is not None, (
                "the only one that does it"
            )
            for lease in leases:
                assert models.pick(lease, ModelChoice("a"), CLASSIFY).engine.ready
                lease.release()
                lease.release()
            current = models.entry("a").current
            assert current is not None
            assert current.num_leases == 1

    run(scenario())


def test_a_load_and_an_unload_are_accounted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load's time is that of the load, and the memory is given back when the model is gone."""
    shelf = Shelf(tmp_path)
    shelf.put("a")
    num_up: list[int] = []
    monkeypatch.setattr(versions, "return_free_memory", lambda: num_up.append(shelf.num_up))
    value = shelf.metrics.registry.get_sample_value

    async def scenario() -> None:
        async with opened(shelf) as models:
            before = time.perf_counter()
            await models.load("a")
            elapsed = time.perf_counter() - before
            assert value("maskdial_model_load_duration_seconds_count") == 1
            assert 0 < (value("maskdial_model_load_duration_seconds_sum") or 0) <= elapsed
            assert num_up == []
            await models.unload("a")
            assert num_up == [0]

    run(scenario())


class TakenThreads(ThreadPoolExecutor):
    """The event loop's threads while requests need all of them."""

    def submit(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("requests wait for these threads")


def test_the_life_of_models_takes_no_thread_that_requests_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders, hashes, first passes and the ends of engines may take minutes."""
    monkeypatch.setattr(versions, "_WATCH_SECONDS", 0.001)
    watched, find = threading.Event(), Bundle.find_overwritten

    def find_overwritten(bundle: Bundle) -> str | None:
        watched.set()
        return find(bundle)

    monkeypatch.setattr(Bundle, "find_overwritten", find_overwritten)
    shelf = Shelf(tmp_path)
    for name in ("a", "b"):
        shelf.put(name, content=name)

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(TakenThreads(1))
        async with opened(shelf) as models:
            for name in ("a", "b"):
                (await shelf.lease(name)).release()
            await until(watched.is_set)
            await models.scan()
            await models.unload("a")
            await models.load("a", str(shelf.put("a", content="c")))

    run(scenario())


def test_models_are_loaded_one_after_the_other(tmp_path: Path) -> None:
    """Each takes memory and cores while it is loaded."""
    shelf = Shelf(tmp_path)
    for name in ("a", "b"):
        shelf.put(name, content=name)

    async def scenario() -> None:
        async with opened(shelf) as models:
            shelf.gate.clear()
            loading = [task(models.load(name)) for name in ("a", "b")]
            await started(shelf, 1)
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert shelf.starts == ["a"]
            shelf.gate.set()
            await asyncio.gather(*loading)
            assert shelf.starts == ["a", "b"]

    run(scenario())


def test_a_model_whose_first_pass_fails_leaves_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("both", CAUSAL, FULL)
    warm_up = MaskedEngine.warm_up

    async def fail_the_second(engine: MaskedEngine) -> None:
        await warm_up(engine)
        if engine is shelf.engines[1]:
            raise InferenceError("scripted")

    monkeypatch.setattr(MaskedEngine, "warm_up", fail_the_second)

    async def scenario() -> None:
        async with opened(shelf) as models:
            with pytest.raises(MaskdialError, match="scripted"):
                await models.load("both")
            assert len(shelf.engines) == 2
            assert shelf.num_up == 0

    run(scenario())


def test_without_autoload_requests_load_nothing(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, models_autoload="off", admin_key="k")
    shelf.put("a")

    async def scenario() -> None:
        async with opened(shelf) as models:
            with pytest.raises(UnavailableError, match="not loaded; have it loaded"):
                await shelf.lease("a")
            await models.load("a")
            (await shelf.lease("a")).release()

    run(scenario())


def test_a_waiter_that_leaves_leaves_the_load_and_no_lease(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("a")

    async def scenario() -> None:
        async with opened(shelf) as models:
            shelf.gate.clear()
            early, late = task(shelf.lease("a")), task(shelf.lease("a"))
            await started(shelf, 1)
            early.cancel()
            shelf.gate.set()
            entry = models.entry("a")
            await until(lambda: entry.loading is None)
            late.cancel()  # its lease was granted in this step, and it has not run since
            await asyncio.gather(early, late, return_exceptions=True)
            assert shelf.state("a") == "ready"
            assert entry.current is not None
            assert entry.current.num_leases == 0

    run(scenario())


def test_a_load_that_fails_says_why_and_a_later_one_may_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("a")
    shelf.broken.add("a")
    reason = "^model 'a' could not be loaded: the weights are damaged$"

    async def scenario() -> None:
        async with opened(shelf) as models:
            outcomes = await asyncio.gather(
                *(shelf.lease("a") for _ in range(3)), return_exceptions=True
            )
            assert [type(each) for each in outcomes] == [UnavailableError] * 3
            with pytest.raises(UnavailableError, match=reason):
                await shelf.lease("a")
            assert len(shelf.starts) == 1, "it is not tried again at once"
            assert shelf.state("a") == "failed"
            assert "damaged" in models.entry("a").reason
            with pytest.raises(ValidationError, match=reason):
                await models.load("a")
            shelf.broken.clear()
            await models.load("a")
            assert shelf.state("a") == "ready"
            assert models.entry("a").reason == ""
            await models.unload("a")
            shelf.broken.add("a")
            with pytest.raises(UnavailableError):
                await shelf.lease("a")
            shelf.broken.clear()
            monkeypatch.setattr(registry, "_RETRY_SECONDS", 0)
            (await shelf.lease("a")).release()

    run(scenario())


def test_an_unload_lets_requests_finish(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("a")

    async def scenario() -> None:
        async with opened(shelf) as models:
            running = await shelf.lease("a")
            unloading = task(models.unload("a"))
            await until(lambda: models.entry("a").state == "draining")
            assert shelf.state("a") == "draining"
            assert shelf.engines[0].ready
            again = await shelf.lease("a")  # a new request has it loaded again beside the old one
            assert shelf.starts == ["a", "a"]
            assert not unloading.done()
            running.release()
            await unloading
            assert [engine.ready for engine in shelf.engines] == [False, True]
            assert shelf.state("a") == "ready"
            again.release()
            await models.unload("a")
            assert shelf.state("a") == "unloaded"
            assert shelf.unloads("a", "request") == 2
            await models.unload("a")

    run(scenario())


@pytest.mark.parametrize("begun", [True, False])
def test_an_unload_gives_a_load_up(tmp_path: Path, begun: bool) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("a")

    async def scenario() -> None:
        async with opened(shelf) as models:
            shelf.gate.clear()
            waiting = task(shelf.lease("a"))
            await (started(shelf, 1) if begun else until(lambda: shelf.state("a") == "loading"))
            unloading = task(models.unload("a"))
            await asyncio.sleep(0)
            shelf.gate.set()
            await unloading
            with pytest.raises(UnavailableError, match="unloaded while it was loading"):
                await waiting
            assert shelf.state("a") == "unloaded"
            assert shelf.num_up == 0
            (await shelf.lease("a")).release()

    run(scenario())


def test_a_new_version_takes_new_requests_and_the_old_one_finishes_its_own(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("a")
    shelf.put("next", content="2")
    shelf.put("bad", content="3")
    shelf.broken.add("bad")

    async def scenario() -> None:
        async with opened(shelf) as models:
            old = await shelf.lease("a")
            await models.load("a")
            assert shelf.starts == ["a"], "the same content is left alone"
            await models.load("a", "next")
            assert shelf.state("a") == "ready"
            new = await shelf.lease("a")
            assert [lease.models[0].bundle.path.name for lease in (old, new)] == ["a", "next"]
            assert [engine.ready for engine in shelf.engines] == [True, True]
            old.release()
            await until(lambda: not models.entry("a").draining)
            assert [engine.ready for engine in shelf.engines] == [False, True]
            assert shelf.unloads("a", "replaced") == 1
            with pytest.raises(ValidationError, match="damaged"):
                await models.load("a", "bad")
            assert shelf.state("a") == "ready"
            assert "damaged" in models.entry("a").reason
            assert (await shelf.lease("a")).models[0].engine is shelf.engines[1]

    run(scenario())


def test_content_that_changed_in_its_folder_is_a_new_version(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("a")

    async def scenario() -> None:
        async with opened(shelf) as models:
            await models.load("a")
            shelf.put("a", content="2")
            await models.load("a")
            assert shelf.starts == ["a", "a"]
            assert models.entry("a").manifests[0].files == {"model.onnx": "2"}

    run(scenario())


def test_loads_of_two_folders_for_one_name_happen_in_order(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("a")
    shelf.put("b", content="2")

    async def scenario() -> None:
        async with opened(shelf) as models:
            shelf.gate.clear()
            first = task(models.load("m", "a"))
            await started(shelf, 1)
            second = task(models.load("m", "b"))
            shelf.gate.set()
            await asyncio.gather(first, second)
            assert models.named("m")[0].bundle.path.name == "b"
            await until(lambda: not models.entry("m").draining)
            assert shelf.num_up == 1
            await models.unload("m")
            with pytest.raises(NotFoundError):
                models.entry("m")

    run(scenario())


def test_two_names_of_one_folder_share_an_engine(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    folder = shelf.put("a")
    (tmp_path / "link").symlink_to(folder)

    async def scenario() -> None:
        async with opened(shelf) as models:
            first, second = await shelf.lease("a"), await shelf.lease("link")
            assert shelf.starts == ["a"]
            assert first.models[0].engine is second.models[0].engine
            assert [lease.models[0].name for lease in (first, second)] == ["a", "link"]
            first.release()
            second.release()
            await models.unload("a")
            assert shelf.state("a") == "unloaded"
            assert shelf.engines[0].ready, "the other name has it still"
            await models.unload("link")
            assert not shelf.engines[0].ready

    run(scenario())


def test_beyond_the_limit_the_one_unused_for_longest_goes(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, models_max=2)
    for name in ("a", "b", "c"):
        shelf.put(name, content=name)

    async def scenario() -> None:
        async with opened(shelf):
            for name in ("a", "b", "a", "c"):
                (await shelf.lease(name)).release()
                await asyncio.sleep(0.001)
            assert [shelf.state(name) for name in ("a", "b", "c")] == ["ready", "unloaded", "ready"]
            assert shelf.unloads("b", "room") == 1
            busy = await shelf.lease("a")
            (await shelf.lease("c")).release()
            (await shelf.lease("b")).release()
            assert shelf.state("c") == "unloaded", "idle ones go before those in use"
            busy.release()

    run(scenario())


def test_a_model_in_use_finishes_before_it_makes_room(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, models_max=1)
    shelf.put("a")
    shelf.put("b", content="2")

    async def scenario() -> None:
        async with opened(shelf):
            running = await shelf.lease("a")
            other = task(shelf.lease("b"))
            await until(lambda: shelf.models.entry("a").state == "draining")
            late = task(shelf.lease("a"))  # it queues behind the other, which is not kept out
            for _ in range(20):
                await asyncio.sleep(0.001)
            assert shelf.engines[0].ready
            assert shelf.starts == ["a"]
            running.release()
            (await other).release()
            (await late).release()
            assert shelf.starts == ["a", "b", "a"]
            assert shelf.num_up == 1

    run(scenario())


def test_a_batch_unloads_no_model_that_others_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path, models_max=1)
    shelf.put("a")
    shelf.put("b", content="2")

    async def scenario() -> None:
        async with opened(shelf):
            (await shelf.lease("a")).release()
            token = usage_of_request.set(ClientUsage("batch", background=True))
            (await shelf.lease("a")).release()
            with pytest.raises(UnavailableError, match="make no room for a batch"):
                await shelf.lease("b")
            assert shelf.starts == ["a"]
            monkeypatch.setattr(registry, "_RECENT_SECONDS", 0.0)
            (await shelf.lease("b")).release()
            usage_of_request.reset(token)
            assert shelf.starts == ["a", "b"]

    run(scenario())


def test_the_limit_on_memory_counts_weights(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, models_memory=2 * SIZE)
    for name in ("a", "b", "c"):
        shelf.put(name, content=name)
    shelf.put("both", CAUSAL, FULL)
    (tmp_path / "both" / "model.onnx").write_bytes(bytes(2 * SIZE))

    async def scenario() -> None:
        async with opened(shelf) as models:
            for name in ("a", "b", "c"):
                await models.load(name)
            assert [shelf.state(name) for name in "abc"] == ["unloaded", "ready", "ready"]
            with pytest.raises(ValidationError, match=r"4,000 bytes.*2,000 \(--models-memory\)"):
                await models.load("both")
            assert [shelf.state(name) for name in "abc"] == ["unloaded", "ready", "ready"]

    run(scenario())


def test_an_unused_model_is_unloaded_after_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_SWEEP_SECONDS", 0.001)
    shelf = Shelf(tmp_path, models_keep_alive=0)
    shelf.put("a")
    shelf.put("b", content="2")

    async def scenario() -> None:
        async with opened(shelf) as models:
            await models.load("b", keep_alive=3600)
            lease = await shelf.lease("a")
            for _ in range(10):
                await asyncio.sleep(0.002)
            assert shelf.state("a") == "ready"
            lease.release()
            await until(lambda: shelf.models.entry("a").state == "unloaded")
            assert shelf.unloads("a", "keep_alive") == 1
            assert shelf.state("b") == "ready"

    run(scenario())


def test_an_engine_that_died_is_a_failure_that_a_load_mends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("a")

    def fault() -> None:
        raise MemoryError("scripted")

    async def scenario() -> None:
        async with opened(shelf) as models:
            await models.load("a")
            monkeypatch.setattr(shelf.engines[0], "step", fault)
            with caplog.at_level(100), pytest.raises(InferenceError):
                await shelf.engines[0].submit_many([MaskedInput((1,), rows=(0,))])
            assert models.entry("a").state == "failed"
            assert "scripted" in models.entry("a").reason
            await models.load("a")
            assert shelf.state("a") == "ready"
            assert shelf.engines[1].ready

    run(scenario())


def test_closing_ends_what_is_loading_and_what_drains(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("a")
    shelf.put("b", content="2")

    async def scenario() -> None:
        async with opened(shelf) as models:
            await shelf.lease("b")
            unloading = task(models.unload("b"))
            await until(lambda: models.entry("b").state == "draining")
            shelf.gate.clear()
            waiting = task(shelf.lease("a"))
            await started(shelf, 2)
            closing = task(models.close())
            await asyncio.sleep(0)
            shelf.gate.set()
            await closing
            with pytest.raises(UnavailableError, match="the server is shutting down"):
                await waiting
            await unloading
            assert shelf.num_up == 0

    run(scenario())


def test_a_mask_picks_the_graph(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("both", CAUSAL, FULL)
    shelf.put("one", CLASSIFIER)

    async def scenario() -> None:
        async with opened(shelf) as models:

            async def picked(choice: ModelChoice, wanted: Any) -> str:
                lease = await models.lease(choice, wanted)
                return models.pick(lease, choice, wanted).manifest.mask

            assert await picked(ModelChoice.of(None), SCORE) == "causal"
            assert await picked(ModelChoice.of("both"), SCORE) == "causal"
            assert await picked(ModelChoice.of("both:full"), SCORE) == "full"
            assert await picked(ModelChoice.of(None, "full"), SCORE) == "full"
            assert await picked(ModelChoice.of("both", "causal"), GENERATE) == "causal"
            assert await picked(ModelChoice.of("one:full"), CLASSIFY) == "full"
            with pytest.raises(ValidationError, match="'both:full' cannot do generate; it does fi"):
                await picked(ModelChoice.of("both:full"), GENERATE)
            with pytest.raises(ValidationError, match="under the causal mask; it has the full"):
                await picked(ModelChoice.of("one", "causal"), CLASSIFY)
            with pytest.raises(ValidationError, match="contradicts"):
                ModelChoice.of("both:full", "causal")
            with pytest.raises(NotFoundError, match="'both:half'"):
                await picked(ModelChoice.of("both:half"), SCORE)

    run(scenario())


def test_bundles_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SCAN_SECONDS", 0)
    shelf = Shelf(tmp_path)
    shelf.put("org/a")
    shelf.put(".partial")
    shelf.put("load")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x.txt").write_text("x")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / MANIFEST).write_text("{")

    def names() -> list[str]:
        return [entry.name for entry in shelf.models.entries]

    async def scenario() -> None:
        async with opened(shelf) as models:
            assert names() == ["org/a", "torn"]
            assert shelf.state("torn") == "failed"
            assert "not readable JSON" in models.entry("torn").reason
            with pytest.raises(UnavailableError, match="not readable JSON"):
                await shelf.lease("torn")
            shelf.put("torn")
            shelf.put("b")
            (await shelf.lease("b")).release()
            (await shelf.lease("org/a")).release()
            await models.load("torn")
            (tmp_path / "b" / MANIFEST).unlink()
            await models.scan()
            assert "b" in names(), "it is loaded"
            await models.unload("b")
            assert names() == ["org/a", "torn"]
            with pytest.raises(NotFoundError, match="served models: org/a, torn"):
                await shelf.lease("b")

    run(scenario())


def test_a_path_from_outside_stays_inside(tmp_path: Path) -> None:
    root = tmp_path / "bundles"
    (root / "v2").mkdir(parents=True)
    outside = tmp_path / "secret"
    outside.mkdir()
    (root / "link").symlink_to(outside)
    catalog = Catalog({}, root)
    assert catalog.within("v2") == catalog.within(str(root / "v2")) == root / "v2"
    for path in ("..", ".", "../secret", str(outside), "link", "v2/../../secret", "/"):
        with pytest.raises(ValidationError, match="inside"):
            catalog.within(path)
    for path in ("v3", "x" * 5000, "a\0b"):
        with pytest.raises(ValidationError, match="no such folder"):
            catalog.within(path)
    with pytest.raises(ValidationError, match="--model-dir"):
        Catalog({}).within("v2")


def test_what_is_configured_by_name_is_loaded_at_the_start(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    folder = shelf.put("a")

    async def scenario() -> None:
        async with opened(shelf, mine=folder):
            assert [(each.name, each.state) for each in shelf.models.entries] == [
                ("mine", "ready"),
                ("a", "unloaded"),
            ]

    async def failing() -> None:
        shelf.broken.add("a")
        with pytest.raises(BundleError, match="damaged"):
            await shelf.models.open(Catalog({"mine": folder}))
        await shelf.models.close()

    run(scenario())
    shelf = Shelf(tmp_path)
    run(failing())


def test_a_model_that_fails_its_check_stops_itself_alone(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    good, bad = shelf.put("a"), shelf.put("b", content="2")
    shelf.drifting.add("b")

    async def scenario() -> None:
        async with opened(shelf, mine=good, other=bad):
            assert shelf.state("mine") == "ready"
            assert shelf.state("other") == "failed"
            with pytest.raises(UnavailableError, match="logits differ"):
                await shelf.lease("other")
            (await shelf.lease("mine")).release()

    async def alone() -> None:
        with pytest.raises(CheckError, match="logits differ"):
            await shelf.models.open(Catalog({"other": bad}))
        await shelf.models.close()

    async def all_of_them() -> None:
        shelf.drifting.add("a")
        with pytest.raises(CheckError, match="logits differ"):
            await shelf.models.open(Catalog({"mine": good, "other": bad}))
        await shelf.models.close()

    run(scenario())
    for each in (alone, all_of_them):
        shelf = Shelf(tmp_path)
        shelf.drifting.add("b")
        run(each())


@pytest.mark.parametrize("is_configured", [True, False], ids=["by-name", "for-its-adapter"])
def test_an_adapter_of_a_model_that_fails_its_check_stops_with_it_alone(
    tmp_path: Path, is_configured: bool
) -> None:
    shelf = Shelf(tmp_path, adapters={"tuned": (tmp_path / "tuned", "b")})
    good, bad = shelf.put("a"), shelf.put("b", content="2")
    shelf.drifting.add("b")
    configured = {"mine": good} | ({"b": bad} if is_configured else {})

    async def scenario() -> None:
        async with opened(shelf, **configured) as models:
            assert shelf.state("mine") == "ready"
            assert shelf.state("b") == shelf.state("tuned") == "failed"
            assert shelf.starts == ["a", "b"], "its base is not tried again for it"
            tuned = models.entry("tuned")
            assert tuned.reason == "its base failed: model 'b': its logits differ"
            labels = {"model": "tuned", "outcome": "failed"}
            value = shelf.metrics.registry.get_sample_value
            assert value("maskdial_model_loads_total", labels) == 1
            with pytest.raises(UnavailableError, match="model 'b' could not be loaded: its logits"):
                await shelf.lease("tuned")
            (await shelf.lease("mine")).release()
            shelf.drifting.clear()
            await models.load("b")
            assert shelf.state("tuned") == "unloaded"
            assert tuned.reason == ""

    run(scenario())


def test_an_adapter_whose_base_is_damaged_ends_the_start(tmp_path: Path) -> None:
    """Only a failed check is the machine's, not the configuration's."""
    shelf = Shelf(tmp_path, adapters={"tuned": (tmp_path / "tuned", "b")})
    good = shelf.put("a")
    shelf.put("b", content="2")
    shelf.broken.add("b")

    async def scenario() -> None:
        with pytest.raises(UnavailableError, match="the weights are damaged"):
            await shelf.models.open(Catalog({"mine": good}, tmp_path))
        await shelf.models.close()

    run(scenario())


def test_fifty_bundles_are_listed_without_loading_one(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for number in range(50):
        shelf.put(f"m{number}", content=str(number))

    async def scenario() -> None:
        async with opened(shelf) as models:
            assert len(models.entries) == 50
            assert shelf.starts == []
            (await shelf.lease("m7")).release()
            assert shelf.starts == ["m7"]

    run(scenario())
