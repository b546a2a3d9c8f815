"""Sequence: one text being generated, and what its reader receives."""

import enum
import secrets
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.prompt_lookup import PromptLookup
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.stop import StopMatcher

if TYPE_CHECKING:  # the scheduler imports this module, and must not need asyncio
    from maskdial.causal.stream import ReplyChannel

_SEED_BITS = 53

FinishReason = Literal["length", "eos_token", "stop_sequence"]


class Decoder(Protocol):
    """Turns a sequence's tokens into text piece by piece."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Detokenizer(Protocol):
    """What the engine needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def decoder(self, prompt_ids: SequenceOf[int]) -> Decoder: ...


class GrammarMatcher(Protocol):
    """What a constrained sequence needs of its grammar."""

    @property
    def finished(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    def prepare(self) -> None: ...
    def allowed(self) -> NDArray[np.bool_]: ...
    def accept(self, token_id: int) -> None: ...


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    DRAWING = enum.auto()
    """All its tokens are in the cache, and the next one is to be drawn from its ``held_logits``."""
    ENDED = enum.auto()


class SharedPrompt:
    """What sequences with the same prompt share, so that it is read once.

    ``logits`` are those of the prompt's last token, float32 (vocab_size,), and ``logprobs`` those
    of its own tokens, if they were asked for: once it was read.
    """

    def __init__(self) -> None:
        self.logits: NDArray[np.float32] | None = None
        self.logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended. Times are in seconds, lengths in tokens.

    ``generated_text`` is the joined text of all its events; ``seed`` is None for greedy sequences.
    ``prompt_logprobs``, if they were asked for, has one for each token of the prompt but the first.
    """

    reason: FinishReason
    generated_text: str
    generated_tokens: int
    seed: int | None
    input_length: int
    queue_seconds: float
    inference_seconds: float
    prompt_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token. The last of a sequence carries its ``finish``.

    ``index`` counts from 1. ``text`` is what the token adds to the generated text: empty for a
    special token, while a character is incomplete, and while text is held back because it may
    become a stop string. ``logprob`` is natural, under the model's own distribution. ``top`` has
    the likeliest tokens under it, as pairs of id and log-probability, as many as were asked for.
    """

    index: int
    token_id: int
    text: str
    logprob: float
    special: bool
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None


class Sequence:
    """One request to generate: prompt, parameters, and progress.

    The scheduler owns ``state``, ``slot``, ``num_computed`` and what else is said to be its own;
    the engine owns the rest. All times are `time.perf_counter` seconds.

    Args:
        prompt_ids: at least one token id.
        params: how to generate.
        priority: lower starts earlier.
        cache_salt: sequences share prefixes in the cache with those of the same salt only.
        grammar: what the text has to match.
        shared_prompt: the same object for sequences with the same prompt.
    """

    def __init__(
        self,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        grammar: GrammarMatcher | None = None,
        shared_prompt: SharedPrompt | None = None,
    ) -> None:
        self.params = params
        self.priority = priority
        self.cache_salt = cache_salt
        self.grammar = grammar
        self.shared_prompt = shared_prompt
        self.seed = draw_seed() if params.seed is None else params.seed
        self.num_prompt = len(prompt_ids)
        self.num_generated = 0
        self.prompt_logprobs: tuple[float, ...] = ()
        self._token_ids = np.array(prompt_ids, np.int64)  # with room to grow at the end

        self.state = State.WAITING
        self.cancelled = False
        self.slot = -1
        self.num_computed = 0
        """Tokens in the KV cache."""
        self.held_logits: NDArray[np.float32] | None = None
        """What a pass gave for the next token, float32 (vocab_size,), while it is not drawn."""
        self.num_reused = 0
        """Tokens of the prompt that came from the prefix cache. The scheduler's."""
        self.block_keys: tuple[bytes, ...] = ()
        """What the whole blocks of the prompt are called in the prefix cache. The scheduler's."""
        self.arrival = 0
        """The sequence's number in the order of arrival. The scheduler's."""

        self.reply: ReplyChannel | None = None
        self.arrived_at = time.perf_counter()
        self.started_at = 0.0
        self.last_token_at = 0.0
        self._lookup = PromptLookup()
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
    def generated_ids(self) -> NDArray[np.int64]:
        """The generated ids, int64 (num_generated,), as a view."""
        return self._token_ids[self.num_prompt : self.num_tokens]

    @property
    def last_token_id(self) -> int:
        """The newest token's id."""
        return int(self._token_ids[self.num_tokens - 1])

    @property
    def num_to_prefill(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return max(self.num_prompt - self.num_computed, 0)

    @property
    def may_draw(self) -> bool:
        """Whether the next token can be drawn without waiting for its grammar."""
        return self.grammar is None or self.grammar.ready

    def guess(self, most: int) -> tuple[int, ...]:
        """Tokens that may follow, found in the text so far; at most as many as are still wanted.

        A sequence with a grammar has none: each of its tokens needs the mask after the last.
        """
        most = min(most, self.params.max_new_tokens - self.num_generated - 1)
        if self.grammar is not None or most < 1:
            return ()
        return self._lookup.guess(self.token_ids, most)

    def note_guess(self, num_drafts: int, num_accepted: int) -> None:
        """Tells how a guess turned out."""
        self._lookup.note(num_drafts, num_accepted)

    def accept(
        self,
        token_id: int,
        logprob: float,
        top: tuple[tuple[int, float], ...] = (),
        *,
        detokenizer: Detokenizer,
        eos_token_ids: frozenset[int],
        max_length: int,
    ) -> TokenEvent:
        """Appends a sampled token and says what it means to the reader.

        A token that ends the sequence in several ways at once counts as the end-of-sequence token
        first (so does one that completes the grammar), then as a stop token or completing a stop
        string, then as the last that fits.

        Raises:
            MaskdialError: the grammar cannot go on.
        """
        now = time.perf_counter()
        self._append(token_id)
        text = self._decode(token_id, detokenizer)
        reason = self._finish_reason(token_id, eos_token_ids, max_length)
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
            top=top,
            finish=None if reason is None else self._finish(reason, now),
        )

    def _finish_reason(
        self, token_id: int, eos_token_ids: frozenset[int], max_length: int
    ) -> FinishReason | None:
        params = self.params
        if token_id in eos_token_ids and (self.grammar is not None or not params.ignore_eos):
            return "eos_token"
        if self.grammar is not None:
            self.grammar.accept(token_id)
            if self.grammar.finished:
                return "eos_token"
        if self._stops.matched or token_id in params.stop_token_ids:
            return "stop_sequence"
        if self.num_generated >= params.max_new_tokens or self.num_tokens >= max_length:
            return "length"
        return None

    def _append(self, token_id: int) -> None:
        if self.num_tokens == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
        self._token_ids[self.num_tokens] = token_id
        self.num_generated += 1

    def _decode(self, token_id: int, detokenizer: Detokenizer) -> str:
        if self._decoder is None:
            self._decoder = detokenizer.decoder(self.prompt_ids.tolist())
        text = self._decoder.push(token_id)
        if self.num_generated < self.params.min_new_tokens:
            return text  # no stop string begins before the text may end
        return self._stops.push(text)

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
            prompt_logprobs=self.prompt_logprobs,
        )


def draw_seed() -> int:
    """A fresh seed, of 53 bits so that JSON readers with double numbers can give it back."""
    return secrets.randbits(_SEED_BITS)
