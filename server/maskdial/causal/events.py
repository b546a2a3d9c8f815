"""What the reader of a sequence receives."""

from dataclasses import dataclass
from typing import Literal

from maskdial.errors import MaskdialError
from maskdial.unmasking.text import TextSoFar

FinishReason = Literal["length", "eos_token", "stop_sequence"]


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """The natural log-probability of one token of a prompt, under the model's own distribution.

    ``top`` holds the most likely tokens in its place as `TokenEvent.top` does.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended. Times are in seconds, lengths in tokens.

    ``generated_text`` is the joined text of all its events. ``seed`` is None for a greedy sequence.
    ``prefill_seconds`` of ``inference_seconds`` passed before the first token.
    ``prompt_logprobs``, if requested, has one for each token of the prompt but the first.
    ``stop`` is the stop string that ended it, if one did.
    """

    reason: FinishReason
    generated_text: str
    generated_tokens: int
    seed: int | None
    input_length: int
    queue_seconds: float
    inference_seconds: float
    prefill_seconds: float = 0.0
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. The last one of a sequence carries its ``finish``.

    ``index`` counts from 1. ``text`` is what the token adds to the generated text: empty for a
    special token that is not spelled out, while a character is incomplete, and while text is held
    back because it may become a stop string. ``logprob`` is natural, under the model's own
    distribution. ``top`` holds the most likely tokens under it as pairs of id and log-probability,
    as many as were requested, or the ``scored_tokens`` of the parameters in their order. ``step``
    is the pass that unmasked it, from 0, in a text that is written so.
    """

    index: int
    token_id: int
    text: str
    logprob: float
    special: bool
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A pass over a text that is written block by block, with ``num_new`` tokens of blocks that it
    has finished. The last one of a sequence carries its ``finish``, which has no text.
    """

    text: TextSoFar
    num_new: int
    finish: Finish | None = None


Event = TokenEvent | BlockEvent

Reply = Event | MaskdialError
