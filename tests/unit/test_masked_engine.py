"""The masked engine on a scripted session: batching, isolation, cancellation, draining."""

import asyncio
import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.errors import (
    InferenceError,
    OverloadedError,
    UnavailableError,
    ValidationError,
)
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.metrics import NullMetrics

FILL_MASK_INPUTS = frozenset({"input_ids", "lengths", "token_type_ids", "rows"})
CLASSIFY_INPUTS = frozenset({"input_ids", "lengths"})
PAD = 9
WAIT = 30.0  # seconds until a test gives up; nothing passes by waiting


class ScriptedSession:
    """Answers each row with what it was fed, so that a row in the wrong place shows.

    A row of logits is [the token at the row, its text's length, the sum of its text's ids, the sum
    of its text's type ids]. With ``gated``, each pass waits for a ``release``. ``failures`` maps a
    token id to what a pass that meets it raises.
    """

    def __init__(
        self,
        input_names: frozenset[str] = FILL_MASK_INPUTS,
        *,
        gated: bool = False,
        failures: Mapping[int, BaseException] | None = None,
    ) -> None:
        self.input_names = input_names
        self.passes: list[dict[str, NDArray[Any]]] = []
        self._gated = gated
        self._failures = failures or {}
        self._started = threading.Semaphore(0)
        self._gate = threading.Semaphore(0)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        self.passes.append(dict(feeds))
        self._started.release()
        if self._gated:
            assert self._gate.acquire(timeout=WAIT)
        ids, lengths = feeds["input_ids"], feeds["lengths"]
        for token_id, error in self._failures.items():
            if (ids == token_id).any():
                raise error
        valid = np.arange(ids.shape[1]) < lengths[:, None]
        types = feeds.get("token_type_ids", np.zeros_like(ids))
        rows = feeds.get("rows", np.arange(len(ids)) * ids.shape[1])
        texts = rows // ids.shape[1]
        columns = [
            ids.reshape(-1)[rows],
            lengths[texts],
            (ids * valid).sum(1)[texts],
            (types * valid).sum(1)[texts],
        ]
        return np.stack(columns, axis=1).astype(np.float32)

    async def pass_started(self) -> None:
        assert await asyncio.to_thread(self._started.acquire, timeout=WAIT)

    def release(self, num_passes: int = 1) -> None:
        self._gate.release(num_passes)

    def lengths(self) -> list[list[int]]:
        return [feeds["lengths"].tolist() for feeds in self.passes]


class RecordingMetrics(NullMetrics):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def engine_up(self, up: bool) -> None:
        self.calls.append(("engine_up", up))

    def queue_size(self, n: int) -> None:
        self.calls.append(("queue_size", n))

    def queued(self, seconds: float) -> None:
        self.calls.append(("queued",))

    def inference(self, seconds: float) -> None:
        self.calls.append(("inference",))

    def batch(self, size: int, tokens: int, padded_tokens: int) -> None:
        self.calls.append(("batch", size, tokens, padded_tokens))

    def prompt_tokens(self, n: int) -> None:
        self.calls.append(("prompt_tokens", n))

    def cancelled(self, reason: str) -> None:
        self.calls.append(("cancelled", reason))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] == name]


@contextlib.contextmanager
def running(
    session: ScriptedSession,
    *,
    max_batch_tokens: int = 256,
    max_queue: int = 64,
    pad_multiple: int = 1,
    metrics: NullMetrics | None = None,
) -> Iterator[MaskedEngine]:
    engine = MaskedEngine(
        session,
        max_batch_tokens=max_batch_tokens,
        max_queue=max_queue,
        pad_token_id=PAD,
        pad_multiple=pad_multiple,
        max_length=20,
        metrics=metrics or NullMetrics(),
        name="tiny",
    )
    engine.start()
    try:
        yield engine
    finally:
        session.release(1000)
        engine.stop(0)


def text(length: int, first: int = 1, rows: tuple[int, ...] = (0,)) -> MaskedInput:
    return MaskedInput((first, *[2] * (length - 1)), rows)


def expected(given: MaskedInput) -> list[list[float]]:
    types = given.token_type_ids or ()
    return [
        [given.input_ids[row], len(given.input_ids), sum(given.input_ids), sum(types)]
        for row in given.rows
    ]


def submit(engine: MaskedEngine, *inputs: MaskedInput) -> "asyncio.Task[list[MaskedResult]]":
    return asyncio.create_task(engine.submit_many(inputs))


async def until(condition: Callable[[], bool]) -> None:
    """Lets other tasks and threads work until the condition is true."""
    async with asyncio.timeout(WAIT):
        for _ in itertools.takewhile(lambda _: not condition(), itertools.count()):
            await asyncio.sleep(0)


def test_an_idle_engine_runs_a_lone_text_at_once() -> None:
    async def main() -> None:
        with running(ScriptedSession()) as engine:
            given = text(5, rows=(0, 3))
            (result,) = await engine.submit_many([given])
        assert result.logits.dtype == np.float32
        assert result.logits.tolist() == expected(given)
        assert (result.batch_size, result.batch_tokens) == (1, 5)
        assert result.queue_seconds >= 0
        assert result.inference_seconds > 0

    asyncio.run(main())


def test_the_feeds_are_those_of_the_bundle() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with running(session) as engine:
            first = submit(engine, text(1))
            await session.pass_started()
            pair = MaskedInput((5, 6, 7), rows=(1, 2), token_type_ids=(0, 1, 1))
            both = submit(engine, pair, MaskedInput((8, 4), rows=(1,)))
            await until(lambda: engine.num_queued == 2)
            session.release(2)
            await asyncio.gather(first, both)
        feeds = session.passes[1]
        assert {name: array.dtype for name, array in feeds.items()} == {
            "input_ids": np.int64,
            "lengths": np.int32,
            "token_type_ids": np.int64,
            "rows": np.int64,
        }
        assert feeds["input_ids"].tolist() == [[5, 6, 7], [8, 4, PAD]]
        assert feeds["lengths"].tolist() == [3, 2]
        assert feeds["token_type_ids"].tolist() == [[0, 1, 1], [0, 0, 0]]
        assert feeds["rows"].tolist() == [1, 2, 4]

    asyncio.run(main())


def test_a_classifier_is_fed_no_rows_and_gives_a_row_per_text() -> None:
    async def main() -> None:
        session = ScriptedSession(CLASSIFY_INPUTS)
        inputs = [MaskedInput((3, 4)), MaskedInput((5, 6))]
        with running(session) as engine:
            results = await engine.submit_many(inputs)
        assert [result.logits.tolist() for result in results] == [[3, 2, 7, 0], [5, 2, 11, 0]]
        assert set(session.passes[0]) == CLASSIFY_INPUTS

    asyncio.run(main())


def test_what_arrives_during_a_pass_is_batched_by_length() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with running(session) as engine:
            first = submit(engine, text(4))
            await session.pass_started()
            inputs = [text(100), text(10, 3), text(101), text(11, 5)]
            many = submit(engine, *inputs)
            await until(lambda: engine.num_queued == 4)
            session.release(3)
            await first
            results = await many
        assert session.lengths() == [[4], [100, 101], [10, 11]]
        assert [result.logits.tolist() for result in results] == [expected(i) for i in inputs]

    asyncio.run(main())


def test_many_requests_at_once_each_get_their_own_answer() -> None:
    rng = random.Random(3)

    def made() -> MaskedInput:
        length = rng.randint(1, 60)
        ids = tuple(rng.randint(10, 99) for _ in range(length))
        types = tuple(rng.randint(0, 1) for _ in ids) if rng.random() < 0.5 else None
        rows = tuple(sorted(rng.sample(range(length), rng.randint(0, min(3, length)))))
        return MaskedInput(ids, rows, types)

    async def main() -> None:
        session = ScriptedSession()
        requests = [[made() for _ in range(rng.randint(0, 4))] for _ in range(150)]
        with running(session, max_queue=600) as engine:
            answers = await asyncio.gather(*(engine.submit_many(each) for each in requests))
        assert [[a.logits.tolist() for a in answer] for answer in answers] == [
            [expected(given) for given in request] for request in requests
        ]
        assert all(feeds["input_ids"].size <= 256 for feeds in session.passes)
        assert len(session.passes) < sum(len(request) for request in requests)

    asyncio.run(main())


def test_a_batch_wakes_its_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with running(session) as engine:
            first = submit(engine, text(1))
            await session.pass_started()
            rest = [submit(engine, text(4)) for _ in range(20)]
            await until(lambda: engine.num_queued == 20)
            loop = asyncio.get_running_loop()
            callers: list[str] = []
            wake = loop.call_soon_threadsafe

            def counted(callback: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Handle:
                callers.append(threading.current_thread().name)
                return wake(callback, *args, **kwargs)

            monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
            session.release(2)
            await asyncio.gather(first, *rest)
        assert callers.count("maskdial-tiny") == len(session.passes) == 2

    asyncio.run(main())


def test_a_request_is_admitted_whole_or_not_at_all() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with running(session, max_queue=4) as engine:
            accepted = [submit(engine, text(1))]
            await session.pass_started()
            accepted.append(submit(engine, text(2), text(2), text(2)))
            await until(lambda: engine.num_queued == 3)
            with pytest.raises(OverloadedError, match=r"room for 1 of this request's 2 texts"):
                await engine.submit_many([text(3), text(3)])
            assert engine.num_queued == 3
            accepted.append(submit(engine, text(4)))
            await until(lambda: engine.num_queued == 4)
            session.release(3)
            await asyncio.gather(*accepted)
        assert [3] not in session.lengths()

    asyncio.run(main())


def test_more_texts_than_the_queue_holds_are_not_worth_a_retry() -> None:
    async def main() -> None:
        with running(ScriptedSession(), max_queue=2) as engine:
            with pytest.raises(ValidationError, match="3 texts in one request"):
                await engine.submit_many([text(1)] * 3)
            assert await engine.submit_many([]) == []

    asyncio.run(main())


def test_a_cancelled_text_is_dropped_before_its_pass() -> None:
    async def main() -> None:
        session, metrics = ScriptedSession(gated=True), RecordingMetrics()
        with running(session, metrics=metrics) as engine:
            first = submit(engine, text(1))
            await session.pass_started()
            leaving, staying = submit(engine, text(6), text(7)), submit(engine, text(8))
            await until(lambda: engine.num_queued == 3)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert engine.num_queued == 1
            assert metrics.named("queue_size")[-1] == ("queue_size", 1)
            session.release(2)
            await asyncio.gather(first, staying)
        assert session.lengths() == [[1], [8]]
        assert metrics.named("cancelled") == [("cancelled", "disconnect")] * 2

    asyncio.run(main())


def test_a_cancelled_running_text_disturbs_no_other() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        unhandled: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        with running(session) as engine:
            leaving = submit(engine, text(5))
            await session.pass_started()
            staying = submit(engine, text(6))
            await until(lambda: engine.num_queued == 1)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            session.release(2)
            (result,) = await staying
            assert result.logits.tolist() == expected(text(6))
            assert engine.healthy
        assert unhandled == []

    asyncio.run(main())


def test_a_failed_pass_fails_its_own_batch_only() -> None:
    async def main() -> None:
        bad = {66: RuntimeError("bad_alloc\n  in node MatMul_7")}
        session = ScriptedSession(gated=True, failures=bad)
        with running(session) as engine:
            first = submit(engine, text(1))
            await session.pass_started()
            together = [submit(engine, text(10, 66)), submit(engine, text(10))]
            apart = submit(engine, text(200))
            await until(lambda: engine.num_queued == 3)
            session.release(3)
            await first
            for task in together:
                with pytest.raises(InferenceError, match=r"\(RuntimeError: bad_alloc\)$"):
                    await task
            (result,) = await apart
            assert result.logits.tolist() == expected(text(200))
            assert engine.healthy

    asyncio.run(main())


def test_a_request_with_a_failed_text_drops_its_others() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True, failures={66: RuntimeError("no")})
        with running(session) as engine:
            many = submit(engine, text(10, 66), text(100), text(200))
            await session.pass_started()
            session.release()
            with pytest.raises(InferenceError):
                await many
            after = submit(engine, text(50))
            session.release(2)
            await after
            assert engine.num_queued == 0
        assert [200] not in session.lengths()

    asyncio.run(main())


@pytest.mark.parametrize("input_names", [FILL_MASK_INPUTS, CLASSIFY_INPUTS])
def test_logits_that_do_not_match_the_batch_are_an_error(input_names: frozenset[str]) -> None:
    class ShortSession(ScriptedSession):
        def run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
            return super().run(feeds)[:-1]

    async def main() -> None:
        with running(ShortSession(input_names)) as engine:
            with pytest.raises(InferenceError, match="0 rows of logits for 1"):
                await engine.submit_many([text(4)])
            assert engine.healthy
            assert not engine.ready

    asyncio.run(main())


def test_a_dead_engine_fails_all_who_wait_at_once() -> None:
    async def main() -> None:
        session, metrics = (
            ScriptedSession(gated=True, failures={66: SystemExit(3)}),
            RecordingMetrics(),
        )
        with running(session, metrics=metrics) as engine:
            in_pass = submit(engine, text(3, 66))
            await session.pass_started()
            waiting = submit(engine, text(4), text(100))
            await until(lambda: engine.num_queued == 2)
            session.release()
            for task in (in_pass, waiting):
                with pytest.raises(InferenceError, match=r"engine of model 'tiny' died \(System"):
                    await task
            assert not engine.healthy
            assert not engine.ready
            assert engine.num_queued == 0
            assert metrics.named("engine_up")[-1] == ("engine_up", False)
            with pytest.raises(UnavailableError, match="died"):
                await engine.submit_many([text(1)])
        with pytest.raises(UnavailableError, match="died"):
            await engine.submit_many([text(1)])

    asyncio.run(main())


def test_stop_lets_the_queue_finish_and_refuses_new_texts() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with running(session) as engine:
            first = submit(engine, text(1))
            await session.pass_started()
            queued = submit(engine, text(5), text(100))
            await until(lambda: engine.num_queued == 2)
            stopping = asyncio.create_task(asyncio.to_thread(engine.stop, WAIT))
            await until(lambda: not engine.healthy)
            with pytest.raises(UnavailableError, match="shutting down"):
                await engine.submit_many([text(1)])
            assert not stopping.done()
            session.release(3)
            assert len(await first) == 1
            assert [r.logits.tolist() for r in await queued] == [
                expected(text(5)),
                expected(text(100)),
            ]
            await stopping
        assert "maskdial-tiny" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(main())


def test_stop_fails_what_is_left_after_the_grace() -> None:
    async def main() -> None:
        session, metrics = ScriptedSession(gated=True), RecordingMetrics()
        with running(session, metrics=metrics) as engine:
            in_pass = submit(engine, text(1))
            await session.pass_started()
            waiting = submit(engine, text(100))
            await until(lambda: engine.num_queued == 1)
            stopping = asyncio.create_task(asyncio.to_thread(engine.stop, 0))
            for task in (in_pass, waiting):
                with pytest.raises(UnavailableError, match="shut down before"):
                    await task
            session.release()
            await stopping
        assert session.lengths() == [[1]]
        assert metrics.named("cancelled") == [("cancelled", "shutdown")] * 2
        assert "maskdial-tiny" not in {thread.name for thread in threading.enumerate()}

    asyncio.run(main())


@pytest.mark.parametrize(("length", "padded"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 17)])
def test_passes_are_multiples_long_where_kernels_want_it(length: int, padded: int) -> None:
    """Up to the model's 20 tokens."""

    async def main() -> None:
        session = ScriptedSession()
        with running(session, pad_multiple=8) as engine:
            (result,) = await engine.submit_many([text(length, rows=(length - 1,))])
        (feeds,) = session.passes
        assert feeds["input_ids"].shape == (1, padded)
        assert feeds["input_ids"][0, length:].tolist() == [PAD] * (padded - length)
        assert feeds["lengths"].tolist() == [length]
        assert feeds["rows"].tolist() == [length - 1]
        assert result.batch_tokens == padded

    asyncio.run(main())


def test_an_idle_engine_stops_at_once_and_for_good() -> None:
    with running(ScriptedSession()) as engine:
        engine.stop(WAIT)
        engine.stop(WAIT)
        assert not engine.healthy
        with pytest.raises(RuntimeError, match="stopped"):
            engine.start()


def test_an_engine_that_has_not_started_is_unavailable() -> None:
    engine = MaskedEngine(
        ScriptedSession(),
        max_batch_tokens=8,
        max_queue=1,
        pad_token_id=PAD,
        metrics=NullMetrics(),
        name="tiny",
    )
    with pytest.raises(UnavailableError, match="starting"):
        asyncio.run(engine.submit_many([text(1)]))
    assert not engine.healthy
    engine.stop(0)


def test_a_closed_event_loop_costs_others_nothing() -> None:
    session = ScriptedSession(gated=True)
    with running(session) as engine:
        closing = asyncio.new_event_loop()
        orphan = closing.create_task(engine.submit_many([text(4), text(5)]))
        closing.run_until_complete(session.pass_started())
        closing.run_until_complete(closing.shutdown_default_executor())
        closing.close()

        async def main() -> None:
            mine = submit(engine, text(5))
            await until(lambda: engine.num_queued >= 1)
            session.release(3)
            assert (await mine)[0].logits.tolist() == expected(text(5))
            assert engine.healthy

        asyncio.run(main())
        assert not orphan.done()
        # Nobody can finish a task of a closed loop: end it here, not in the garbage collector.
        orphan.get_coro().close()
        orphan._log_destroy_pending = False  # type: ignore[attr-defined]


def test_ready_after_the_warm_up_which_no_metric_counts() -> None:
    async def main() -> None:
        session, metrics = ScriptedSession(), RecordingMetrics()
        with running(session, metrics=metrics) as engine:
            assert engine.healthy
            assert not engine.ready
            await engine.warm_up()
            assert engine.ready
            assert session.passes[0]["input_ids"].tolist() == [[PAD]]
            names = ("queued", "inference", "batch", "prompt_tokens")
            assert not any(metrics.named(name) for name in names)
            await engine.submit_many([text(3), text(4)])
        assert metrics.named("batch") == [("batch", 2, 7, 8)]
        assert len(metrics.named("queued")) == 2
        assert len(metrics.named("inference")) == 1
        assert metrics.named("prompt_tokens") == [("prompt_tokens", 7)]
        assert metrics.named("engine_up") == [("engine_up", True), ("engine_up", False)]
        assert not engine.ready

    asyncio.run(main())


def test_a_failed_warm_up_leaves_the_engine_not_ready() -> None:
    async def main() -> None:
        with running(ScriptedSession(failures={PAD: RuntimeError("no kernel")})) as engine:
            with pytest.raises(InferenceError, match="no kernel"):
                await engine.warm_up()
            assert engine.healthy
            assert not engine.ready

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": ()}, "at least one token"),
        ({"input_ids": (1, 2), "token_type_ids": (0,)}, "1 token type ids for 2 tokens"),
        ({"input_ids": (1, 2), "rows": (2,)}, "rows"),
        ({"input_ids": (1, 2), "rows": (-1,)}, "rows"),
    ],
)
def test_an_input_that_no_pass_could_run_is_refused(
    arguments: dict[str, tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedInput(**arguments)


def test_a_queue_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_queue"):
        MaskedEngine(
            ScriptedSession(),
            max_batch_tokens=8,
            max_queue=0,
            pad_token_id=PAD,
            metrics=NullMetrics(),
            name="tiny",
        )
