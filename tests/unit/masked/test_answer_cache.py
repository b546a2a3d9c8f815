"""What is kept of answers, for whom, and what is computed once."""

import asyncio
import random
import threading
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.errors import InferenceError, OverloadedError, ValidationError
from maskdial.masked.answer_cache import AnswerCache
from maskdial.masked.request import CanvasInput, MaskedInput
from maskdial.runtime.adapter import Adapter
from tests.unit.scripted_session import ScriptedSession, serving, until

TEXT = MaskedInput((5, 6, 7), rows=(1, 2), token_type_ids=(0, 1, 1))


def soft(*numbers: float) -> NDArray[np.float32]:
    return np.array([numbers], np.float32)


DIFFERENT = [
    TEXT,
    replace(TEXT, input_ids=(5, 6, 8)),
    replace(TEXT, input_ids=(5, 6, 7, 1), token_type_ids=(0, 1, 1, 0)),
    replace(TEXT, rows=(1,)),
    replace(TEXT, rows=(2, 1)),
    replace(TEXT, rows=()),
    replace(TEXT, token_type_ids=(0, 0, 1)),
    replace(TEXT, token_type_ids=None),
    replace(TEXT, num_unattended=1),
    replace(TEXT, num_labels=1),
    MaskedInput((5, 6, 7, 1, 2), rows=(), token_type_ids=(0, 1, 1, 0, 0)),
    MaskedInput((5, 6), rows=(), token_type_ids=None),
    MaskedInput((5,), rows=(), token_type_ids=None),
    replace(TEXT, canvas=CanvasInput(soft(1, 2), 0.5)),
    replace(TEXT, canvas=CanvasInput(soft(1, 3), 0.5)),
    replace(TEXT, canvas=CanvasInput(soft(1, 2), 0.25)),
]


def test_inputs_have_one_digest_if_a_pass_is_fed_the_same() -> None:
    """And adapters and keys apart, whatever their names are joined to."""
    named = [("", ""), ("a", ""), ("", "a"), ("ab", ""), ("a", "b"), ("", "ab")]
    digests = {each.digest(*names) for each in DIFFERENT for names in named}
    assert len(digests) == len(DIFFERENT) * len(named)
    assert {len(each) for each in digests} == {32}
    assert replace(TEXT, reduce=np.sum).digest() == TEXT.digest(), "a pass is fed the same"


def test_digests_of_long_texts_do_not_hold_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made in another thread; those of short ones are queued at once."""
    digest, threads = MaskedInput.digest, list[threading.Thread]()

    def noted(given: MaskedInput, *beside: str) -> bytes:
        threads.append(threading.current_thread())
        return digest(given, *beside)

    async def main() -> None:
        long = MaskedInput((1,) * 200_000, rows=(0,))
        with serving(ScriptedSession()) as bench:
            monkeypatch.setattr(MaskedInput, "digest", noted)
            await bench.engine.submit_many([TEXT, TEXT])
            assert set(threads) == {threading.current_thread()}
            threads.clear()
            await bench.engine.submit_many([TEXT, long])
            assert threading.current_thread() not in threads
            assert len(threads) == 2

    asyncio.run(main())


def test_the_least_recently_used_goes_first() -> None:
    """Against a plain list of what was used when; and the bytes are never more than allowed."""
    rng, cache, limit = random.Random(1), AnswerCache(20_000), 20_000
    kept: OrderedDict[bytes, int] = OrderedDict()
    for _ in range(3000):
        key = rng.randrange(60).to_bytes(1)
        found = cache.get(key)
        assert (found is not None) == (key in kept)
        if found is not None:
            assert found.tolist() == [key[0]] * kept[key]
            kept.move_to_end(key)
        elif rng.random() < 0.7:
            size = rng.choice((0, 1, 100, 1000, 4000, 6000))
            cache.put(key, np.full(size, key[0], np.float32))
            if size * 4 + 448 <= limit:
                kept[key] = size
                while sum(each * 4 + 448 for each in kept.values()) > limit:
                    kept.popitem(last=False)
        assert cache.num_bytes == sum(each * 4 + 448 for each in kept.values()) <= limit


def test_a_full_cache_takes_no_more_memory_than_it_says() -> None:
    limit = 2_000_000
    for size in (1, 300):
        answers = [np.zeros(size, np.float32)] * 6000
        tracemalloc.start()
        try:
            cache = AnswerCache(limit)
            for number, answer in enumerate(answers):
                cache.put(TEXT.digest(str(number)), answer)
            taken, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert limit * 0.6 < taken <= limit
        assert limit - size * 4 - 448 < cache.num_bytes <= limit


def test_an_answer_keeps_nothing_else_of_its_pass_and_nobody_changes_it() -> None:
    cache, logits = AnswerCache(10_000), np.zeros((1000, 2), np.float32)
    cache.put(b"key", logits[3])
    logits[3] = 1
    kept = cache.get(b"key")
    assert kept is not None
    assert kept.tolist() == [0, 0]
    assert kept.base is None
    with pytest.raises(ValueError, match="read-only"):
        kept += 1


@contextmanager
def as_key(name: str) -> Iterator[ClientUsage]:
    token = usage_of_request.set(usage := ClientUsage(client=name, key=name))
    try:
        yield usage
    finally:
        usage_of_request.reset(token)


def run(case: Callable[..., Any], **settings: Any) -> None:
    async def main() -> None:
        session = ScriptedSession()
        with serving(session, **settings) as bench:
            await case(bench, session)

    asyncio.run(main())


def test_an_equal_text_is_not_computed_again() -> None:
    async def case(bench: Any, session: ScriptedSession) -> None:
        other = MaskedInput((8, 4), rows=(1,))
        (first,) = await bench.engine.submit_many([TEXT])
        results = await bench.engine.submit_many([other, TEXT])
        assert [each.is_cached for each in (first, *results)] == [False, False, True]
        assert results[1].logits.tobytes() == first.logits.tobytes()
        assert (results[1].inference_seconds, results[1].batch_size) == (0, 0)
        assert session.lengths() == [[3], [2]]
        assert bench.value("answer_cache_queries_total") == 8
        assert bench.value("answer_cache_hits_total") == 3
        assert bench.value("prompt_tokens_total") == 5
        assert bench.value("answer_cache_bytes") == (2 + 1) * 4 * 4 + 2 * 448

    run(case, answers=AnswerCache(10_000))


def test_a_key_has_its_own_answers_unless_they_are_shared() -> None:
    for shared in (False, True):

        async def case(bench: Any, session: ScriptedSession, shared: bool = shared) -> None:
            for name, is_cached in (("one", False), ("two", shared), ("", shared), ("one", True)):
                with as_key(name) as usage:
                    (result,) = await bench.engine.submit_many([TEXT])
                assert result.is_cached == is_cached
                assert usage.tokens == (0 if is_cached else 3), "what was computed for it"
                assert not usage.takes_room, "its next pass is not refused"

        run(case, answers=AnswerCache(10_000, shared=shared))


def test_a_kept_answer_makes_no_room_for_other_texts() -> None:
    """Those of the same request are refused as without it, and nothing of them is counted."""

    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session, answers=AnswerCache(10_000), max_queue=2) as bench:
            session.release()
            await bench.engine.submit_many([TEXT])
            others = [MaskedInput((8, number), rows=(1,)) for number in range(4)]
            await session.pass_started()
            first = bench.submit(others[0])
            await session.pass_started()
            waiting = bench.submit(others[1])
            await until(lambda: bench.num_waiting == 1)
            for num_others, error in ((2, OverloadedError), (3, ValidationError)):
                with as_key("") as usage, pytest.raises(error, match=f"{num_others} texts"):
                    await bench.engine.submit_many([TEXT, *others[:num_others]])
                assert usage.takes_room
            assert bench.value("answer_cache_hits_total") == 0
            session.release(3)
            (kept, last) = await bench.engine.submit_many([TEXT, others[2]])
            assert (kept.is_cached, last.is_cached) == (True, False)
            await asyncio.gather(first, waiting)

    asyncio.run(main())


def test_an_adapter_has_its_own_answers() -> None:
    async def case(bench: Any, session: ScriptedSession) -> None:
        adapters = [None, *(Adapter(name, name, None) for name in ("one", "two"))]
        for is_cached in (False, True):
            for adapter in adapters:
                (result,) = await bench.engine.submit_many([TEXT], adapter=adapter)
                assert result.is_cached == is_cached

    run(case, answers=AnswerCache(10_000))


def test_what_a_request_makes_of_its_rows_is_its_own() -> None:
    async def case(bench: Any, session: ScriptedSession) -> None:
        reduced = replace(TEXT, reduce=lambda rows: rows[:1])
        for _ in range(2):
            results = await bench.engine.submit_many([TEXT, reduced])
            assert [len(each.logits) for each in results] == [2, 1]
            assert not results[1].is_cached

    run(case, answers=AnswerCache(10_000))


def test_equal_texts_of_a_request_are_reduced_once() -> None:
    """Others would wait as long as all of that takes, which no pass would end."""
    calls = list[int]()

    def reduce(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        calls.append(len(rows))
        if len(rows) == 1:
            raise InferenceError("one row")
        return rows + 1

    async def case(bench: Any, session: ScriptedSession) -> None:
        results = await bench.engine.submit_many([replace(TEXT, reduce=reduce)] * 50 + [TEXT])
        assert calls == [2]
        assert {each.logits.tobytes() for each in results[:50]} == {
            (results[50].logits + 1).tobytes()
        }
        assert not any(each.logits.flags.writeable for each in results)
        with pytest.raises(InferenceError, match="one row"):
            await bench.engine.submit_many([replace(TEXT, rows=(1,), reduce=reduce)] * 3)
        assert calls == [2, 1]

    run(case)


def test_a_pass_that_fails_leaves_nothing() -> None:
    async def main() -> None:
        session = ScriptedSession(failures={6: ValueError("six")})
        with serving(session, answers=AnswerCache(10_000)) as bench:
            for _ in range(2):
                with pytest.raises(InferenceError, match="six"):
                    await bench.engine.submit_many([TEXT])
            assert bench.value("answer_cache_bytes") == 0
        assert len(session.passes) == 2

    asyncio.run(main())


def test_equal_texts_that_wait_together_are_computed_once() -> None:
    """Without a cache too, and each key's by themselves; nobody's leaving takes another's."""

    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session) as bench:
            first = bench.submit(MaskedInput((1,), rows=(0,)))
            await session.pass_started()
            reduced = replace(TEXT, reduce=lambda rows: rows[:1])
            leaving = bench.submit(TEXT)
            both = bench.submit(TEXT, MaskedInput((8, 4), rows=(1,)), TEXT, reduced)
            with as_key("other"):
                others = bench.submit(TEXT)
                await asyncio.sleep(0)
            await until(lambda: bench.num_waiting == 6)
            leaving.cancel()
            session.release(9)
            results = [*await both, *await others]
            await first
        assert sorted(session.lengths()[1]) == [2, 3, 3]
        assert [each.logits.tolist() for each in results] == [
            [[6, 3, 18, 2], [7, 3, 18, 2]],
            [[4, 2, 12, 0]],
            [[6, 3, 18, 2], [7, 3, 18, 2]],
            [[6, 3, 18, 2]],
            [[6, 3, 18, 2], [7, 3, 18, 2]],
        ]
        assert {each.batch_size for each in results} == {3}
        assert not any(each.is_cached for each in results)

    asyncio.run(main())


def test_the_text_that_had_its_turn_pays_for_those_equal_to_it() -> None:
    """Which are those of other addresses, where nobody needs a key."""

    async def main() -> None:
        session = ScriptedSession(gated=True)
        with serving(session) as bench:
            first = bench.submit(MaskedInput((1,), rows=(0,)))
            await session.pass_started()
            tasks, usages = [], [ClientUsage(client=name) for name in ("one", "two", "three")]
            for usage in usages:
                token = usage_of_request.set(usage)
                tasks.append(bench.submit(TEXT))
                usage_of_request.reset(token)
                await asyncio.sleep(0)
            await until(lambda: bench.num_waiting == 3)
            session.release(2)
            await asyncio.gather(first, *tasks)
        assert [usage.tokens for usage in usages] == [3, 0, 0]

    asyncio.run(main())


def test_a_stopped_engine_keeps_nothing() -> None:
    cache = AnswerCache(10_000)

    async def case(bench: Any, session: ScriptedSession) -> None:
        await bench.engine.submit_many([TEXT])
        assert cache.num_bytes
        bench.engine.stop(0)
        assert bench.value("answer_cache_bytes") == cache.num_bytes == 0

    run(case, answers=cache)
