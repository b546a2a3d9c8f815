"""Sequence: what its reader receives, and what it tells of itself."""

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import pytest

from maskdial.causal.events import PromptLogprob, TokenEvent
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence, SharedPrompt, State
from tests.unit.causal.test_engine_grammar import ScriptedGrammar

EOS = 9
VOCAB = 10


class HoldingDetokenizer:
    """Token n is one letter, which comes with the next token; notes what it goes on from."""

    special_ids = frozenset({EOS})

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self._held = ""

    def decoder(self, prompt_ids: SequenceOf[int]) -> "HoldingDetokenizer":
        self.prompts.append(list(prompt_ids))
        return self

    def push(self, token_id: int) -> str:
        text, self._held = self._held, chr(ord("A") + token_id)
        return text

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


def make(prompt: SequenceOf[int] = (1, 2, 3), **params: Any) -> Sequence:
    return Sequence(prompt, SamplingParams(**{"max_new_tokens": 5, **params}))


def accept(sequence: Sequence, *token_ids: int, **more: Any) -> list[TokenEvent]:
    settings: dict[str, Any] = {
        "detokenizer": HoldingDetokenizer(),
        "eos_token_ids": frozenset({EOS}),
        "max_length": 50,
    }
    return [sequence.accept(token_id, -0.5, **settings | more) for token_id in token_ids]


def test_a_slot_is_held_from_the_start_to_the_end() -> None:
    sequence = make()
    assert (sequence.slot, sequence.state) == (-1, State.WAITING)
    sequence.start(3, 2)
    assert (sequence.slot, sequence.state, sequence.num_to_prefill) == (3, State.PREFILLING, 1)
    sequence.end()
    assert (sequence.slot, sequence.state) == (-1, State.ENDED)


def test_times_are_of_its_queue_and_of_its_work() -> None:
    sequence = make(max_new_tokens=2)
    now = sequence.arrived_at + 3.0
    assert sequence.begin(now)
    assert not sequence.begin(now + 1)
    accept(sequence, 1)
    first = sequence.first_token_at
    assert first == sequence.last_token_at > 0
    finish = accept(sequence, 2)[-1].finish
    assert finish is not None
    assert finish.queue_seconds == pytest.approx(3.0)
    assert finish.inference_seconds == pytest.approx(sequence.last_token_at - now)
    assert sequence.first_token_at == first < sequence.last_token_at
    timeline = sequence.timeline
    assert (timeline.started_at, timeline.first_token_at) == (now, first)
    assert (timeline.finish_reason, timeline.output_tokens) == ("length", 2)


@pytest.mark.parametrize(
    ("token_ids", "reason", "stop"),
    [((1, 2), "stop_sequence", "C"), ((1, EOS), "eos_token", None), ((1, 7), "stop_sequence", 7)],
)
def test_what_ended_it(token_ids: tuple[int, ...], reason: str, stop: str | int | None) -> None:
    sequence = make(stop=("absent", "C"), stop_token_ids=(7,))
    finish = accept(sequence, *token_ids, detokenizer=LetterDetokenizer())[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop) == (reason, stop if isinstance(stop, str) else None)
    assert sequence.finish_reason == reason


class LetterDetokenizer(HoldingDetokenizer):
    """Letters come at once."""

    def push(self, token_id: int) -> str:
        return super().push(token_id) + self.flush()


def test_the_end_of_sequence_ends_what_a_grammar_describes() -> None:
    """Even if it is to be ignored: a grammar allows it where its text is complete."""
    ignoring = make(ignore_eos=True)
    assert accept(ignoring, EOS)[-1].finish is None
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    constrained = Sequence([1], params, grammar=ScriptedGrammar([EOS, 4]))
    finish = accept(constrained, EOS)[-1].finish
    assert finish is not None
    assert finish.reason == "eos_token"


def test_an_event_has_the_likeliest_tokens_as_they_were_sampled() -> None:
    (event,) = accept(make(), 4, top=((4, -0.5), (5, -1.5)))
    assert event.top == ((4, -0.5), (5, -1.5))
    assert (event.index, event.token_id, event.logprob) == (1, 4, -0.5)


def test_a_copy_has_what_the_prompt_gave() -> None:
    shared, logits = SharedPrompt(), np.zeros(VOCAB, np.float32)
    assert shared.logprobs == make().prompt_logprobs == ()
    logprobs = (PromptLogprob(-1.0), PromptLogprob(-2.0))
    shared.fill(logits, logprobs)
    copy = make()
    copy.fork(2, shared)
    assert (copy.slot, copy.state, copy.num_computed) == (2, State.HOLDING, 3)
    assert copy.held_logits is logits
    assert copy.prompt_logprobs == logprobs


@pytest.mark.parametrize(("source_ids", "goes_on_from"), [((), [1, 2]), ((5, 6), [])])
def test_a_text_goes_on_from_its_prompt_but_not_from_a_source(
    source_ids: tuple[int, ...], goes_on_from: list[int]
) -> None:
    """The prompt of a decoder is no text."""
    sequence = Sequence([1, 2], SamplingParams(), source_ids=source_ids)
    detokenizer = HoldingDetokenizer()
    accept(sequence, 3, 4, detokenizer=detokenizer)
    assert detokenizer.prompts == [goes_on_from]


def test_a_spelled_token_ends_the_characters_before_it() -> None:
    params = SamplingParams(max_new_tokens=5)
    sequence = Sequence([1, 2, 3], params, spelled_tokens=[(7, "<call>")])
    events = accept(sequence, 1, 7, 2, 3, detokenizer=HoldingDetokenizer())
    assert [event.text for event in events] == ["", "B<call>", "", "C"]
