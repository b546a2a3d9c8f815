"""What the reader of a sequence receives."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from maskdial.causal.tools.events import ReplyDelta
from maskdial.errors import MaskdialError
from maskdial.unmasking.text import TextSoFar

FinishReason = Literal["length", "eos_token", "stop_sequence", "content_filter"]
"""``content_filter``: by a policy (`maskdial.policy`)."""


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """The natural log-probability of one token of a prompt, under the model's own distribution.

    ``top`` holds the most likely tokens in its place as `TokenEvent.top` does.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule of a policy found in a request or in its reply.

    Attributes:
        policy: the name of the policy.
        rule: that of the rule.
        action: what the rule says to do.
        label: what was found.
        score: of the label.
        part: the role of the message that it was in, or the part of the reply.
        index: which message, prompt or call it was.
        start: its first character there.
        end: the character behind it.
    """

    policy: str
    rule: str
    action: str
    label: str
    score: float
    part: str
    index: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended. Times are in seconds, lengths in tokens.

    ``generated_text`` is the joined text of all its events. ``seed`` is None for a greedy sequence.
    ``prefill_seconds`` of ``inference_seconds`` passed before the first token.
    ``prompt_logprobs``, if requested, has one for each token of the prompt but the first.
    ``stop`` is the stop string that ended it, if one did. ``verdicts`` are those of policies on the
    request and on the text.
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
    verdicts: tuple[Verdict, ...] = ()

    @property
    def policy(self) -> dict[str, Any]:
        """The verdicts as a field of a reply; nothing where no rule found anything."""
        return {"policy": list(map(dataclasses.asdict, self.verdicts))} if self.verdicts else {}


@dataclass(frozen=True, slots=True)
class ReadToken:
    """What a token adds to a reply, where that was read before the token was passed on.

    Attributes:
        deltas: parts of the reply.
        num_reasoning: tokens of the reasoning so far.
        called: whether the reply has ended, with complete calls.
    """

    deltas: tuple[ReplyDelta, ...]
    num_reasoning: int
    called: bool = False


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token. The last one of a sequence carries its ``finish``.

    ``index`` counts from 1. ``text`` is what the token adds to the generated text: empty for a
    special token that is not spelled out, while a character is incomplete, and while text is held
    back because it may become a stop string. ``logprob`` is natural, under the model's own
    distribution. ``top`` holds the most likely tokens under it as pairs of id and log-probability,
    as many as were requested, or the ``scored_tokens`` of the parameters in their order. ``step``
    is the pass that unmasked it, from 0, in a text that is written so. ``read`` is what it adds to
    a reply, if a policy has read that.
    """

    index: int
    token_id: int
    text: str
    logprob: float
    special: bool
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None
    step: int | None = None
    read: ReadToken | None = None


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
