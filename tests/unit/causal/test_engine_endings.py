"""How texts end: tokens, stop strings, and a full context."""

import asyncio

import pytest

from tests.unit.scripted_model import (
    EOS,
    MAX_LENGTH,
    Bench,
    FakeRunner,
    expected_tokens,
    letters,
    make_sequence,
)


def test_end_of_sequence_token(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=1, eos_after=6), overlaps=overlaps)
        reader = bench.read(make_sequence([1, 2, 3], 50))
        await bench.run_dry()
        assert reader.token_ids == [*expected_tokens([1, 2, 3], 3), EOS]
        assert reader.finish.reason == "eos_token"
        assert reader.finish.generated_tokens == 4
        assert reader.finish.generated_text == letters(expected_tokens([1, 2, 3], 3))
        assert [event.special for event in reader.events] == [False, False, False, True]

    asyncio.run(main())


@pytest.mark.parametrize("include", [True, False])
def test_stop_string(include: bool, overlaps: bool) -> None:
    async def main() -> None:
        text = letters(expected_tokens([4], 12))
        stop = text[3:6]
        assert text.find(stop) == 3
        bench = Bench(FakeRunner(slots=1), overlaps=overlaps)
        sequence = make_sequence([4], 12, stop=("absent", stop), include_stop=include)
        reader = bench.read(sequence)
        await bench.run_dry()
        assert reader.finish.reason == "stop_sequence"
        assert reader.finish.generated_tokens == 6
        assert reader.finish.generated_text == text[: 6 if include else 3]
        assert "".join(event.text for event in reader.events) == reader.finish.generated_text

    asyncio.run(main())


def test_text_held_back_for_a_stop_string_comes_with_the_last_token(overlaps: bool) -> None:
    async def main() -> None:
        text = letters(expected_tokens([4], 5))
        bench = Bench(FakeRunner(slots=1), overlaps=overlaps)
        sequence = make_sequence([4], 5, stop=(text[3:] + "?",), include_stop=False)
        reader = bench.read(sequence)
        await bench.run_dry()
        assert [event.text for event in reader.events] == [*text[:3], "", text[3:]]
        assert reader.finish.reason == "length"

    asyncio.run(main())


@pytest.mark.parametrize(("num_prompt", "count"), [(MAX_LENGTH - 3, 3), (MAX_LENGTH - 1, 1)])
def test_a_full_context_ends_the_text(num_prompt: int, count: int, overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=2), overlaps=overlaps)
        prompt = [n % 50 for n in range(num_prompt)]
        reader = bench.read(make_sequence(prompt, 100))
        other = bench.read(make_sequence([3], 40))
        await bench.run_dry()
        assert reader.token_ids == expected_tokens(prompt, count)
        assert reader.finish.reason == "length"
        assert other.token_ids == expected_tokens([3], 40)

    asyncio.run(main())
