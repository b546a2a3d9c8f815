"""What a reply reports of its times: those of its slowest part."""

from dataclasses import replace

from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.generate import Completion, Text, timings
from maskdial.causal.prompts import Prompt
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.engine.timing import Timings
from maskdial.http.replies import timing_headers


def completion(num_prompt: int, num_truncated: int, *times: tuple[float, float]) -> Completion:
    """A prompt with a text for each pair of queue and inference seconds, of three tokens each."""
    ids = [1] * num_prompt
    sequences = tuple(Sequence(ids, SamplingParams()) for _ in times)
    texts = []
    for queue_seconds, inference_seconds in times:
        finish = Finish(
            reason="length",
            generated_text="abc",
            generated_tokens=3,
            seed=None,
            input_length=num_prompt,
            queue_seconds=queue_seconds,
            inference_seconds=inference_seconds,
        )
        event = TokenEvent(index=1, token_id=7, text="a", logprob=-1.0, special=False)
        texts.append(Text([event, replace(event, index=3, finish=finish)]))
    return Completion(Prompt(None, ids, num_truncated, sequences), texts)


def test_a_generation_takes_as_long_as_its_slowest_text() -> None:
    """The longest wait may be another text's than the longest generation."""
    found = timings([completion(5, 2, (0.25, 8.0), (0.5, 4.0)), completion(7, 1, (0.125, 2.0))])
    assert found == Timings(
        queue_seconds=0.5, inference_seconds=8.0, compute_tokens=5 + 7 + 9, truncated_tokens=3
    )
    assert timing_headers(found) == {
        "x-queue-time": "500.000",
        "x-inference-time": "8000.000",
        "x-compute-tokens": "21",
        "x-truncated-tokens": "3",
    }


def test_pieces_one_after_the_other_take_as_long_as_all_of_them() -> None:
    assert Timings(0.25, 1.0, 10, 1) + Timings(0.5, 2.0, 20) == Timings(0.75, 3.0, 30, 1)


def test_a_sequence_waits_until_it_begins_and_is_generated_from_then_on() -> None:
    sequence = Sequence([1], SamplingParams(max_new_tokens=1))
    sequence.begin(sequence.arrived_at + 100)
    finish = sequence._finish("length", sequence.arrived_at + 107)
    assert round(finish.queue_seconds) == 100
    assert round(finish.inference_seconds) == 7
