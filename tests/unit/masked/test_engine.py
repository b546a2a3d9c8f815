"""The masked engine on a scripted session: batching, isolation, cancellation."""

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.errors import (
    DeadlineError,
    DeviceLostError,
    InferenceError,
    OverloadedError,
    ValidationError,
)
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.request import CanvasInput, MaskedInput
from maskdial.metrics import Metrics
from maskdial.runtime.session import PassStop
from tests.unit.scripted_session import (
    CLASSIFY_INPUTS,
    FILL_MASK_INPUTS,
    PAD,
    Bench,
    ScriptedSession,
    serving,
    until,
)


def text(length: int, first: int = 1, rows: tuple[int, ...] = (0,)) -> MaskedInput:
    return MaskedInput((first, *[2] * (length - 1)), rows)


def expected(given: MaskedInput) -> list[list[float]]:
    types = given.token_type_ids or ()
    return [
        [given.input_ids[row], len(given.input_ids), sum(given.input_ids), sum(types)]
        for row in given.rows
    ]


def test_an_idle_engine_runs_a_lone_text_at_once() -> None:
    async def main() -> None:
        with serving(ScriptedSession()) as bench:
            given = text(5, rows=(0, 3))
            (result,) = await bench.engine.submit_many([given])
        assert result.logits.dtype == np.float32
        assert result.logits.tolist() == expected(given)
        assert (result.batch_size, result.batch_tokens) == (1, 5)
        assert result.queue_seconds >= 0
        assert result.inference_seconds > 0

    asyncio.run(main())


def test_the_feeds_are_those_of_the_bundle() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session) as bench:
            first = bench.submit(text(1))
            await session.pass_started()
            pair = MaskedInput((5, 6, 7), rows=(1, 2), token_type_ids=(0, 1, 1))
            both = bench.submit(pair, MaskedInput((8, 4), rows=(1,)))
            await until(lambda: bench.num_waiting == 2)
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


def test_a_canvas_is_fed_with_what_the_pass_before_made_of_it() -> None:
    async def main() -> None:
        session = ScriptedSession(FILL_MASK_INPUTS | {"canvas", "soft", "temperatures"}, gated=True)
        with serving(session, soft_columns=2) as bench:
            first = bench.submit(text(1))
            await session.pass_started()
            soft = np.array([[1, 2], [3, 4]], np.float32)
            later = MaskedInput((5, 6, 7), rows=(1, 2), canvas=CanvasInput(soft, 0.5))
            both = bench.submit(later, MaskedInput((8, 4), rows=(1,)))
            await until(lambda: bench.num_waiting == 2)
            session.release(2)
            await asyncio.gather(first, both)
        feeds = session.passes[1]
        assert feeds["canvas"].tolist() == [2, 1]
        assert feeds["canvas"].dtype == np.int32
        assert feeds["soft"].tolist() == [[1, 2], [3, 4], [0, 0]]
        assert feeds["temperatures"].tolist() == [0.5, 0.5, 1]
        assert {feeds["soft"].dtype, feeds["temperatures"].dtype} == {np.dtype(np.float32)}

    asyncio.run(main())


def test_a_classifier_is_fed_no_rows_and_gives_a_row_per_text() -> None:
    async def main() -> None:
        session = ScriptedSession(CLASSIFY_INPUTS)
        inputs = [MaskedInput((3, 4)), MaskedInput((5, 6))]
        with serving(session) as bench:
            results = await bench.engine.submit_many(inputs)
        assert [result.logits.tolist() for result in results] == [[3, 2, 7, 0], [5, 2, 11, 0]]
        assert set(session.passes[0]) == CLASSIFY_INPUTS

    asyncio.run(main())


class PairSession:
    """Returns the places of each pair."""

    input_names = FILL_MASK_INPUTS | {"pairs"}

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        assert feeds["pairs"].dtype == np.int64
        return feeds["pairs"].astype(np.float32)

    def run_until(
        self, feeds: Mapping[str, NDArray[Any]], stop: PassStop
    ) -> NDArray[np.float32] | None:
        return self.run(feeds)


def test_pairs_are_those_of_each_text_s_rows_and_labels() -> None:
    one = MaskedInput((5, 6, 7), rows=(0, 1, 2), num_labels=1)
    other = MaskedInput((8, 4, 9, 1), rows=(0, 1, 2, 3), num_labels=2)
    engine = MaskedEngine(
        PairSession(),
        max_batch_tokens=64,
        max_queue=4,
        pad_token_id=0,
        free_padding=16,
        metrics=Metrics().declare_masked("m"),
        name="m",
    )
    engine.start()

    async def main() -> None:
        results = await engine.submit_many([other, one])
        pairs = {each.logits.size: each.logits.tolist() for each in results}
        assert pairs == {8: [[2, 0], [2, 1], [3, 0], [3, 1]], 4: [[5, 4], [6, 4]]}

    try:
        asyncio.run(main())
    finally:
        engine.stop(0)


def test_rows_are_reduced_and_an_error_is_that_text_s_only() -> None:
    def refuse(_: NDArray[np.float32]) -> NDArray[np.float32]:
        raise InferenceError("not finite")

    async def main() -> None:
        given = MaskedInput((5, 6, 7), rows=(1, 2), reduce=lambda rows: rows[:, 0] * 2)
        with serving(ScriptedSession()) as bench:
            results = await asyncio.gather(
                bench.engine.submit_many([given, text(3)]),
                bench.engine.submit_many([MaskedInput((5, 6), rows=(1,), reduce=refuse)]),
                return_exceptions=True,
            )
        kept: Any = results[0]
        assert [each.logits.tolist() for each in kept] == [[12, 14], expected(text(3))]
        assert isinstance(results[1], InferenceError)

    asyncio.run(main())


@pytest.mark.parametrize("error", [ValueError("shapes (3,) (4,)"), MemoryError("12.0 GiB")])
def test_whatever_reducing_raises_is_that_text_s_only(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def stumble(_: NDArray[np.float32]) -> NDArray[np.float32]:
        raise error

    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session) as bench:
            first = bench.submit(text(2))  # the others are in one pass
            await session.pass_started()
            unlucky = bench.submit(MaskedInput((5, 6), rows=(1,), reduce=stumble))
            lucky = bench.submit(text(3))
            await until(lambda: bench.num_waiting == 2)
            session.release(2)
            with pytest.raises(InferenceError, match=f"{type(error).__name__}: "):
                await unlucky
            assert [each.logits.tolist() for each in await lucky] == [expected(text(3))]
            await first
            assert bench.engine.ready

    with caplog.at_level(logging.CRITICAL):
        asyncio.run(main())


def test_a_device_lost_while_reducing_ends_the_engine() -> None:
    def lose(_: NDArray[np.float32]) -> NDArray[np.float32]:
        raise DeviceLostError("the GPU is lost; restart the server")

    async def main() -> None:
        with serving(ScriptedSession()) as bench:
            with pytest.raises(InferenceError, match="died"):
                await bench.submit(MaskedInput((5, 6), rows=(1,), reduce=lose))
            assert not bench.engine.ready

    asyncio.run(main())


def test_what_arrives_during_a_pass_is_batched_by_length() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session) as bench:
            first = bench.submit(text(4))
            await session.pass_started()
            inputs = [text(100), text(10, 3), text(101), text(11, 5)]
            many = bench.submit(*inputs)
            await until(lambda: bench.num_waiting == 4)
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
        with serving(session, max_queue=600) as bench:
            answers = await asyncio.gather(*(bench.engine.submit_many(each) for each in requests))
        assert [[a.logits.tolist() for a in answer] for answer in answers] == [
            [expected(given) for given in request] for request in requests
        ]
        assert all(feeds["input_ids"].size <= 256 for feeds in session.passes)
        assert len(session.passes) < sum(len(request) for request in requests)

    asyncio.run(main())


def test_a_batch_wakes_its_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session) as bench:
            first = bench.submit(text(1))
            await session.pass_started()
            rest = [bench.submit(text(4, 10 + number)) for number in range(20)]
            await until(lambda: bench.num_waiting == 20)
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
        with serving(session, max_queue=4) as bench:
            accepted = [bench.submit(text(1))]
            await session.pass_started()
            accepted.append(bench.submit(text(2), text(2), text(2)))
            await until(lambda: bench.num_waiting == 3)
            with pytest.raises(OverloadedError, match=r"room for 1 of this request's 2 texts"):
                await bench.engine.submit_many([text(3), text(3)])
            assert bench.num_waiting == 3
            accepted.append(bench.submit(text(4)))
            await until(lambda: bench.num_waiting == 4)
            session.release(3)
            await asyncio.gather(*accepted)
        assert [3] not in session.lengths()

    asyncio.run(main())


def test_further_passes_of_a_request_find_room_in_a_full_queue() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session, max_queue=2) as bench:
            accepted = [bench.submit(text(1))]
            await session.pass_started()
            accepted += [bench.submit(text(4)), bench.submit(text(4))]
            await until(lambda: bench.num_waiting == 2)
            with pytest.raises(OverloadedError):
                await bench.engine.submit_many([text(3)])
            token = usage_of_request.set(ClientUsage("a", tokens=1))  # an earlier pass's
            further = bench.submit(text(3))
            usage_of_request.reset(token)
            await until(lambda: bench.num_waiting == 3)
            session.release(9)
            (result,) = await further
            assert result.logits.tolist() == expected(text(3))
            await asyncio.gather(*accepted)

    asyncio.run(main())


def test_more_texts_than_the_queue_holds_are_not_worth_a_retry() -> None:
    async def main() -> None:
        with serving(ScriptedSession(), max_queue=2) as bench:
            with pytest.raises(ValidationError, match="3 texts in one request"):
                await bench.engine.submit_many([text(1)] * 3)
            assert await bench.engine.submit_many([]) == []

    asyncio.run(main())


def test_a_cancelled_text_is_dropped_before_its_pass() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session) as bench:
            first = bench.submit(text(1))
            await session.pass_started()
            leaving, staying = bench.submit(text(6), text(7)), bench.submit(text(8))
            await until(lambda: bench.num_waiting == 3)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert bench.num_waiting == 1
            session.release(2)
            await asyncio.gather(first, staying)
        assert session.lengths() == [[1], [8]]
        assert bench.cancelled == {"disconnect": 2}

    asyncio.run(main())


def test_a_cancelled_running_text_disturbs_no_other() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        unhandled: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: unhandled.append(context))
        with serving(session) as bench:
            leaving = bench.submit(text(5))
            await session.pass_started()
            staying = bench.submit(text(6))
            await until(lambda: bench.num_waiting == 1)
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            session.release(2)
            (result,) = await staying
            assert result.logits.tolist() == expected(text(6))
        assert unhandled == []

    asyncio.run(main())


def test_a_failed_pass_fails_its_own_batch_only() -> None:
    async def main() -> None:
        bad = {66: RuntimeError("bad_alloc\n  in node MatMul_7")}
        session = ScriptedSession(gated=True, failures=bad)
        with serving(session) as bench:
            first = bench.submit(text(1))
            await session.pass_started()
            together = [bench.submit(text(10, 66)), bench.submit(text(10))]
            apart = bench.submit(text(200))
            await until(lambda: bench.num_waiting == 3)
            session.release(3)
            await first
            for task in together:
                with pytest.raises(InferenceError, match=r"\(RuntimeError: bad_alloc\)$"):
                    await task
            (result,) = await apart
            assert result.logits.tolist() == expected(text(200))

    asyncio.run(main())


def test_a_request_with_a_failed_text_drops_its_others() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True, failures={66: RuntimeError("no")})
        with serving(session) as bench:
            many = bench.submit(text(10, 66), text(100), text(200))
            await session.pass_started()
            session.release()
            with pytest.raises(InferenceError):
                await many
            after = bench.submit(text(50))
            session.release(2)
            await after
            assert bench.num_waiting == 0
        assert [200] not in session.lengths()

    asyncio.run(main())


@pytest.mark.parametrize("input_names", [FILL_MASK_INPUTS, CLASSIFY_INPUTS])
def test_logits_that_do_not_match_the_batch_are_an_error(input_names: frozenset[str]) -> None:
    class ShortSession(ScriptedSession):
        def run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
            logits = super().run(feeds)
            return logits[:-1] if self.passes else logits

    async def main() -> None:
        with serving(ShortSession(input_names)) as bench:
            with pytest.raises(InferenceError, match="0 rows of logits for 1"):
                await bench.engine.submit_many([text(4)])
            assert bench.engine.ready

    asyncio.run(main())


@pytest.mark.parametrize(("length", "padded"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 17)])
def test_passes_are_multiples_long_where_kernels_want_it(length: int, padded: int) -> None:
    """Up to the model's 20 tokens."""

    async def main() -> None:
        session = ScriptedSession()
        with serving(session, pad_multiple=8) as bench:
            (result,) = await bench.engine.submit_many([text(length, rows=(length - 1,))])
        (feeds,) = session.passes
        assert feeds["input_ids"].shape == (1, padded)
        assert feeds["input_ids"][0, length:].tolist() == [PAD] * (padded - length)
        assert feeds["lengths"].tolist() == [length]
        assert feeds["rows"].tolist() == [length - 1]
        assert result.batch_tokens == padded

    asyncio.run(main())


def test_a_closed_event_loop_costs_others_nothing() -> None:
    session = ScriptedSession(gated=True)
    with serving(session) as bench:
        closing = asyncio.new_event_loop()
        orphan = closing.create_task(bench.engine.submit_many([text(4), text(5)]))
        closing.run_until_complete(session.pass_started())
        closing.run_until_complete(closing.shutdown_default_executor())
        closing.close()

        async def main() -> None:
            mine = bench.submit(text(5))
            await until(lambda: bench.num_waiting >= 1)
            session.release(3)
            assert (await mine)[0].logits.tolist() == expected(text(5))

        asyncio.run(main())
        assert not orphan.done()
        # Nobody can finish a task of a closed loop: end it here, not in the garbage collector.
        orphan.get_coro().close()
        orphan._log_destroy_pending = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": ()}, "at least one token"),
        ({"input_ids": (1, 2), "token_type_ids": (0,)}, "1 token type ids for 2 tokens"),
        ({"input_ids": (1, 2), "rows": (2,)}, "rows"),
        ({"input_ids": (1, 2), "rows": (-1,)}, "rows"),
        ({"input_ids": (1, 2), "num_unattended": 2}, "2 of 2 tokens are not attended to"),
    ],
)
def test_an_input_that_no_pass_could_run_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MaskedInput(**arguments)


def test_a_queue_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_queue"):
        Bench(ScriptedSession(), max_queue=0)


def test_a_timeout_drops_what_no_pass_has_begun() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session) as bench:
            first = bench.submit(text(1))
            await session.pass_started()
            with pytest.raises(DeadlineError, match=r"not finished within 0\.01 seconds"):
                await bench.engine.submit_many([text(6), text(7)], timeout=0.01)
            assert bench.num_waiting == 0
            assert bench.cancelled == {"timeout": 2}
            session.release()
            await first
        assert session.lengths() == [[1]]

    asyncio.run(main())


def test_passes_are_counted() -> None:
    async def main() -> None:
        with serving(ScriptedSession()) as bench:
            await bench.engine.submit_many([text(3), text(4)])
            assert bench.value("batch_size_sum") == 2
            assert bench.value("batch_tokens_sum") == 7
            assert bench.value("padding_ratio_count") == 1
            assert bench.value("prompt_tokens_total") == 7
            assert bench.value("queue_duration_seconds_count") == 2
            assert bench.value("inference_duration_seconds_count") == 1

    asyncio.run(main())


def test_what_arrives_stops_a_pass_of_the_background() -> None:
    """Its texts run again, in passes half as large, when no other text waits."""

    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session, max_batch_tokens=16, max_queue=1) as bench:
            before = bench.submit(text(5))
            await session.pass_started()
            token = usage_of_request.set(ClientUsage("batch", background=True))
            batch = [bench.submit(text(4, first)) for first in range(1, 5)]
            usage_of_request.reset(token)
            await until(lambda: len(bench.engine._background) == 4)
            assert bench.num_waiting == 0  # those are not what a queue is limited for
            session.release()
            await session.pass_started()
            online = bench.submit(text(3, 7))
            await until(lambda: bench.num_waiting == 1)
            session.release(2)
            await before
            (result,) = await online
            assert result.logits.tolist() == expected(text(3, 7))
            assert not any(task.done() for task in batch)
            session.release(9)
            for first, task in enumerate(batch, 1):
                assert (await task)[0].logits.tolist() == expected(text(4, first))
        assert session.lengths() == [[5], [4] * 4, [3], [4] * 2, [4] * 2]

    asyncio.run(main())


def test_what_arrives_before_the_background_runs_first() -> None:
    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session) as bench:
            first = bench.submit(text(5))
            await session.pass_started()
            token = usage_of_request.set(ClientUsage("batch", background=True))
            batch = bench.submit(text(2))
            usage_of_request.reset(token)
            await until(lambda: len(bench.engine._background) == 1)
            others = [bench.submit(text(3)), bench.submit(text(3, 4))]
            await until(lambda: bench.num_waiting == 2)
            session.release(9)
            await asyncio.gather(first, batch, *others)
        assert session.lengths() == [[5], [3, 3], [2]]

    asyncio.run(main())
