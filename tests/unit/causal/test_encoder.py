"""Source texts and beam searches in the engine, over a scripted encoder-decoder model."""

import asyncio
from collections.abc import Sequence

import pytest

from maskdial.causal.beam_search import BeamParams, BeamSearch
from maskdial.causal.forced_tokens import ForcedTokens
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence as Generated
from maskdial.causal.sequence import SharedPrompt, State
from maskdial.errors import DeadlineError, GenerationError
from tests.held import HOUR, HeldTimers
from tests.unit.scripted_model import EOS, VOCAB, Bench, Reader, SourceRunner, settle

START = 1


def make(
    source: Sequence[int], max_new_tokens: int = 6, shared: SharedPrompt | None = None
) -> Generated:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return Generated([START], params, source_ids=source, shared_prompt=shared)


def search(source: Sequence[int], num_beams: int = 3, max_new_tokens: int = 6) -> Generated:
    """The reader of a beam search."""
    reader = make(source, max_new_tokens)
    beams = [make(source, max_new_tokens) for _ in range(num_beams)]
    BeamSearch([reader], beams, BeamParams(num_beams))
    return reader


def bench_of(slots: int, chunk: int = 8) -> Bench:
    runner = SourceRunner(slots)
    return Bench(runner, overlaps=False, chunk=chunk, encoder=runner)


async def alone(sequence: Generated) -> list[int]:
    bench = bench_of(slots=4)
    reader = bench.read(sequence)
    await bench.run_dry()
    return reader.token_ids


def encodings(bench: Bench) -> list[str]:
    return [kind for kind in bench.runner.passes if kind.startswith("encode")]


def test_short_sources_are_read_together_and_long_ones_alone() -> None:
    async def main() -> None:
        bench = bench_of(slots=5)
        sources = [[5, 6], [7], [8, 9, 10], [11] * 20, [12, 13]]
        readers = [bench.read(make(source)) for source in sources]
        await bench.step()
        assert encodings(bench) == ["encode 2"]  # a third would be padded to more than the chunk
        assert not any(reader.events for reader in readers)
        await bench.step()
        assert [len(reader.events) for reader in readers] == [1, 1, 0, 0, 0]
        await bench.run_dry()
        assert encodings(bench) == ["encode 2", "encode 1", "encode 1", "encode 1"]
        for source, reader in zip(sources, readers, strict=True):
            assert reader.token_ids == await alone(make(source))
            assert reader.finish.input_length == len(source)

    asyncio.run(main())


def test_copies_of_a_source_are_read_once() -> None:
    async def main() -> None:
        bench = bench_of(slots=2)
        shared = SharedPrompt()
        readers = [bench.read(make([3, 4], 4 + copy, shared)) for copy in range(4)]
        await bench.run_dry()
        assert encodings(bench) == ["encode 1"]
        expected = await alone(make([3, 4], 7))
        assert [reader.token_ids for reader in readers] == [expected[: 4 + i] for i in range(4)]

    asyncio.run(main())


def test_a_search_among_others_finds_what_it_finds_alone() -> None:
    async def main() -> None:
        bench = bench_of(slots=5)
        plain = [bench.read(make([i, 2], 3 + 4 * i)) for i in range(3)]
        await bench.step(2)
        first, second = bench.read(search([9, 9])), bench.read(search([4], max_new_tokens=12))
        await bench.step(3)
        assert not first.events  # no three slots are free
        await bench.run_dry()
        assert first.token_ids == await alone(search([9, 9]))
        assert second.token_ids == await alone(search([4], max_new_tokens=12))
        for i, reader in enumerate(plain):
            assert reader.token_ids == await alone(make([i, 2], 3 + 4 * i))

    asyncio.run(main())


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_leaving_a_search_frees_all_its_slots(steps_before: int) -> None:
    async def main() -> None:
        bench = bench_of(slots=4)
        other = bench.read(make([5], 30))
        await bench.step(2)
        sequence = search([6, 7], max_new_tokens=50)
        reader = bench.read(sequence)
        await settle()
        await bench.step(steps_before)
        reader.task.cancel()
        await settle()
        await bench.step()
        assert (bench.num_running, bench.num_waiting) == (1, 0)
        assert sequence.search is not None
        assert {beam.state for beam in sequence.search.beams} == {State.ENDED}
        await bench.run_dry()
        assert other.token_ids == await alone(make([5], 30))
        assert bench.cancelled == {"disconnect": 1}

    asyncio.run(main())


def fail_on(bench: Bench, kind: str, times: int = 1) -> None:
    left = [times]

    def on_pass(found: str) -> None:
        if found.startswith(kind) and left[0]:
            left[0] -= 1
            raise RuntimeError("broken")

    bench.runner.on_pass = on_pass


def failure(reader: Reader) -> BaseException | None:
    return reader.task.exception() if reader.task.done() else None


def test_a_source_that_cannot_be_read_fails_its_own_sequences() -> None:
    async def main() -> None:
        bench = bench_of(slots=5)
        running = bench.read(make([1, 2], 9))
        await bench.step(2)
        fail_on(bench, "encode")
        failing = [bench.read(make([3])), bench.read(search([4]))]
        await bench.run_dry()
        assert all(isinstance(failure(reader), GenerationError) for reader in failing)
        assert running.token_ids == await alone(make([1, 2], 9))

    asyncio.run(main())


def test_a_failing_step_fails_the_readers_of_a_search() -> None:
    async def main() -> None:
        bench = bench_of(slots=4)
        reader = bench.read(search([4]))
        await bench.step(3)
        fail_on(bench, "decode")
        await bench.run_dry()
        assert isinstance(failure(reader), GenerationError)
        fresh = bench.read(search([4]))
        await bench.run_dry()
        assert fresh.token_ids == await alone(search([4]))

    asyncio.run(main())


def test_a_search_has_a_timeout() -> None:
    async def main() -> None:
        bench = bench_of(slots=4)
        with HeldTimers(asyncio.get_running_loop()) as timers:
            reader = bench.read(search([4], max_new_tokens=150), timeout=HOUR)
            await bench.step(3)
            timers.go_off()
            await settle()
        await bench.step()
        assert isinstance(failure(reader), DeadlineError)
        assert (bench.num_running, bench.num_waiting) == (0, 0)
        assert bench.cancelled == {"timeout": 1}

    asyncio.run(main())


def test_forced_tokens_stand_outside_of_a_grammar() -> None:
    """A language's token comes first, and what the grammar allows follows it."""

    async def main() -> None:
        bench = bench_of(slots=1)
        params = SamplingParams(max_new_tokens=4, forced_first=30, forced_last=(EOS,))
        grammar = ForcedTokens([7, 8, 9], VOCAB)
        constrained = Generated([START], params, source_ids=[5], grammar=grammar)
        reader = bench.read(constrained)
        await bench.run_dry()
        assert reader.token_ids == [30, 7, 8, 9]
        plain = bench.read(Generated([START], params, source_ids=[5]))
        await bench.run_dry()
        assert (plain.token_ids[0], plain.token_ids[-1], len(plain.token_ids)) == (30, EOS, 4)
        assert plain.finish.reason == "eos_token"

    asyncio.run(main())
