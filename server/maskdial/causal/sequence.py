"""Sequence: one text being generated, and what its reader receives."""

import enum
import secrets
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.params import SamplingParams
from maskdial.causal.stop import StopMatcher

if TYPE_CHECKING:  # the scheduler imports this module, and must not need asyncio
    from maskdial.causal.stream import ReplyChannel

_SEED_BITS = 53

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class Decoder(Protocol):
    """Turns a sequence's tokens into text piece by piece; `maskdial.tokenizer` implements it."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Detokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def decoder(self, prompt_ids: SequenceOf[int]) -> Decoder: ...


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended. Times are in seconds, lengths in tokens.

    ``generated_text`` is the joined text of all its events; ``seed`` is None for greedy sequences.
    """

    reason: FinishReason
    generated_text: str
    generated_tokens: int
    seed: int | None
    input_length: int
    queue_seconds: float
    inference_seconds: float


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token. The last of a sequence carries its ``finish``.

    ``index`` counts from 1. ``text`` is what the token adds to the generated text: empty for a
    special token, while a character is incomplete, and while text is held back because it may
    become a stop string. ``logprob`` is natural, under the model's own distribution.
    """

    index: int
    token_id: int
    text: str
    logprob: float
    special: bool
    finish: Finish | None = None


class Sequence:
    """One request to generate: prompt, parameters, and progress.

    The scheduler owns ``state``, ``slot`` and ``num_computed``; the engine owns the rest. All times
    are `time.perf_counter` seconds.
    """

    def __init__(self, prompt_ids: SequenceOf[int], params: SamplingParams) -> None:
        self.params = params
        self.seed = draw_seed() if params.seed is None else params.seed
        self.num_prompt = len(prompt_ids)
        self.num_generated = 0
        self._token_ids = np.array(prompt_ids, np.int64)  # with room to grow at the end

        self.state = State.WAITING
        self.cancelled = False
        self.slot = -1
        self.num_computed = 0
        """Tokens in the KV cache."""

        self.reply: ReplyChannel | None = None
        self.arrived_at = time.perf_counter()
        self.started_at = 0.0
        self.last_token_at = 0.0
        self._decoder: Decoder | None = None
        self._stops = StopMatcher(params.stop, include=params.include_stop)
        self._texts: list[str] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens together."""
        return self.num_prompt + self.num_generated

    @property
    def token_ids(self) -> NDArray[np.int64]:
        """Prompt and generated ids, int64 (num_tokens,), as a view."""
        return self._token_ids[: self.num_tokens]

    @property
    def prompt_ids(self) -> NDArray[np.int64]:
        """The prompt's ids, int64 (num_prompt,), as a view."""
        return self._token_ids[: self.num_prompt]

    @property
    def last_token_id(self) -> int:
        """The newest token's id."""
        return int(self._token_ids[self.num_tokens - 1])

    @property
    def num_to_prefill(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return max(self.num_prompt - self.num_computed, 0)

    def accept(
        self,
        token_id: int,
        logprob: float,
        *,
        detokenizer: Detokenizer,
        eos_token_ids: frozenset[int],
        max_length: int,
    ) -> TokenEvent:
        """Appends a sampled token and says what it means to the reader.

        A token that ends the sequence in several ways at once counts as the end-of-sequence token
        first, then as completing a stop string, then as the last that fits.
        """
        now = time.perf_counter()
        self._append(token_id)
        text, reason = self._decode(token_id, detokenizer)
        if token_id in eos_token_ids:
            reason = "eos_token"
        elif reason is None and (
            self.num_generated >= self.params.max_new_tokens or self.num_tokens >= max_length
        ):
            reason = "length"
        if reason is not None:
            text += self._flush()
        self._texts.append(text)
        self.last_token_at = now
        return TokenEvent(
            index=self.num_generated,
            token_id=token_id,
            text=text,
            logprob=logprob,
            special=token_id in detokenizer.special_ids,
            finish=None if reason is None else self._finish(reason, now),
        )

    def _append(self, token_id: int) -> None:
        if self.num_tokens == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
        self._token_ids[self.num_tokens] = token_id
        self.num_generated += 1

    def _decode(self, token_id: int, detokenizer: Detokenizer) -> tuple[str, FinishReason | None]:
        if self._decoder is None:
            self._decoder = detokenizer.decoder(self.prompt_ids.tolist())
        text = self._stops.push(self._decoder.push(token_id))
        return text, "stop_sequence" if self._stops.matched else None

    def _flush(self) -> str:
        if self._decoder is None or self._stops.matched:
            return ""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()

    def _finish(self, reason: FinishReason, now: float) -> Finish:
        return Finish(
            reason=reason,
            generated_text="".join(self._texts),
            generated_tokens=self.num_generated,
            seed=None if self.params.greedy else self.seed,
            input_length=self.num_prompt,
            queue_seconds=self.started_at - self.arrived_at,
            inference_seconds=now - self.started_at,
        )


def draw_seed() -> int:
    """A fresh seed, of 53 bits so that JSON readers with double numbers can give it back."""
    return secrets.randbits(_SEED_BITS)
