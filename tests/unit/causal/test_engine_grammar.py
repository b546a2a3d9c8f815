"""Sequences under a scripted grammar, whose masks may be late."""

import asyncio
from collections.abc import Sequence as SequenceOf

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.errors import MaskdialError, ValidationError
from tests.unit.scripted_model import VOCAB, Bench, FakeRunner, expected_tokens, make_sequence


class ScriptedGrammar:
    """Allows one token after another, and fails where the script says so."""

    def __init__(self, script: SequenceOf[int | MaskdialError]) -> None:
        self.script = list(script)
        self.num_prepared = 0
        self.num_drafts = 0
        self.ready = True
        self.forced: tuple[int, ...] = ()

    @property
    def finished(self) -> bool:
        return not self.script

    def prepare(self, drafts: tuple[int, ...] = ()) -> None:
        self.num_prepared += 1
        self.num_drafts += len(drafts)
        assert list(drafts) == self.script[: len(drafts)]

    def num_allowed(self, token_ids: SequenceOf[int]) -> int:
        pairs = zip(token_ids, self.script, strict=False)
        return next((i for i, (one, other) in enumerate(pairs) if one != other), len(self.script))

    def wait(self, seconds: float) -> None:
        self.ready = True

    def allowed(self) -> NDArray[np.bool_]:
        if isinstance(self.script[0], MaskdialError):
            raise self.script[0]
        return np.equal(np.arange(VOCAB), self.script[0]).astype(np.bool_)

    def accept(self, token_id: int) -> None:
        assert token_id == self.script.pop(0)


def test_a_grammar_chooses_and_ends_the_text(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=2), max_drafts=8, overlaps=overlaps)
        script = [*[7, 8, 9, 4, 5] * 4, 6]
        grammar = ScriptedGrammar(script)
        params = SamplingParams(max_new_tokens=30)
        constrained = bench.read(Sequence([1, 2, 3], params, grammar=grammar))
        await bench.run_dry()
        assert constrained.token_ids == script
        assert constrained.finish.reason == "eos_token"
        num_accepted = bench.value("speculative_accepted_tokens_total", kind="prompt")
        assert grammar.num_drafts >= num_accepted > 5
        assert grammar.num_prepared == len(script) - num_accepted

    asyncio.run(main())


def test_a_grammar_that_fails_ends_its_own_text_only(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=2), overlaps=overlaps)
        grammar = ScriptedGrammar([7, ValidationError("too deep")])
        params = SamplingParams(max_new_tokens=20)
        constrained = bench.read(Sequence([1, 2, 3], params, grammar=grammar))
        free = bench.read(make_sequence([4, 5, 6], 9))
        await bench.run_dry()
        with pytest.raises(ValidationError, match="too deep"):
            await constrained.task
        assert constrained.token_ids == [7]
        assert free.token_ids == expected_tokens([4, 5, 6], 9)

    asyncio.run(main())


@pytest.mark.parametrize("late_from", [0, 1, 3])
def test_a_late_grammar_holds_up_nobody_else(late_from: int, overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=3), overlaps=overlaps)
        script = [7, 8, 9, 10, 11]
        grammar = ScriptedGrammar(script)
        params = SamplingParams(max_new_tokens=20)
        first = bench.read(make_sequence([4, 5, 6], 30))
        constrained = bench.read(Sequence([1, 2, 3], params, grammar=grammar))
        last = bench.read(make_sequence([7, 8, 9], 30))
        for num_tokens in range(30):
            grammar.ready = num_tokens > 12 or len(constrained.events) != late_from
            await bench.step()
            assert len(first.events) == num_tokens + 1
            if 5 < num_tokens < 12:
                assert constrained.token_ids == script[:late_from]
        await bench.run_dry()
        assert constrained.token_ids == script
        assert first.token_ids == expected_tokens([4, 5, 6], 30)
        assert last.token_ids == expected_tokens([7, 8, 9], 30)

    asyncio.run(main())


def test_a_late_grammar_alone_is_waited_for(overlaps: bool) -> None:
    async def main() -> None:
        bench = Bench(FakeRunner(slots=3), overlaps=overlaps)
        grammar = ScriptedGrammar([7, 8])
        grammar.ready = False
        constrained = bench.read(Sequence([1, 2, 3], SamplingParams(), grammar=grammar))
        await bench.run_dry()
        assert constrained.token_ids == [7, 8]

    asyncio.run(main())
