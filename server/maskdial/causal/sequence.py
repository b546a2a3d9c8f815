"""Sequence: one text being generated."""

import enum
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.block_text import BlockText
from maskdial.causal.events import BlockEvent, Finish, FinishReason, PromptLogprob, TokenEvent
from maskdial.causal.sampling.mirostat import Mirostat
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.stop import Reasoning, ReasoningGate, StopMatcher
from maskdial.engine.fairness import ClientUsage
from maskdial.engine.philox import draw_seed
from maskdial.engine.trace import Timeline
from maskdial.runtime.adapter import Adapter

# What was read from disk for a sequence may be evicted before it starts, or be another's.
_MAX_FETCHES = 3


class Decoder(Protocol):
    """Turns a sequence's tokens into text piece by piece."""

    def push(self, token_id: int) -> str: ...
    def flush(self) -> str: ...


class Detokenizer(Protocol):
    """What a sequence needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def decoder(self, prompt_ids: SequenceOf[int]) -> Decoder: ...


class Constraint(Protocol):
    """What bounds a sequence's tokens; `maskdial.grammar.compiler` describes the methods."""

    @property
    def finished(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def forced(self) -> tuple[int, ...]: ...
    def prepare(self, drafts: tuple[int, ...] = ()) -> None: ...
    def num_allowed(self, token_ids: SequenceOf[int]) -> int: ...
    def wait(self, seconds: float) -> None: ...
    def allowed(self) -> NDArray[np.bool_]: ...
    def accept(self, token_id: int) -> None: ...


class State(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    RESERVED = enum.auto()
    """It has a slot, and waits for a text from its beam search."""
    HOLDING = enum.auto()
    """All its tokens are in the KV cache; the next one is sampled from its ``held_logits``."""
    ENDED = enum.auto()


@dataclass(frozen=True, slots=True)
class BeamFork:
    """One beam goes on from another one's text; ``start`` tokens are in the slots of both.

    With 0 its slot does not have the source text either.
    """

    source: "Sequence"
    target: "Sequence"
    start: int


class Fetch(Protocol):
    """What a sequence waits for; `maskdial.causal.prefix_disk.tier` describes it."""

    @property
    def is_read(self) -> bool: ...
    @property
    def is_over(self) -> bool: ...


class Search(Protocol):
    """What a beam search is to its sequences; `maskdial.causal.beam_search` describes it."""

    @property
    def readers(self) -> tuple["Sequence", ...]: ...
    @property
    def beams(self) -> tuple["Sequence", ...]: ...
    @property
    def running(self) -> tuple["Sequence", ...]: ...
    @property
    def ended(self) -> bool: ...
    def take_forks(self) -> list[BeamFork]: ...


class SharedPrompt:
    """What sequences with the same prompt share, so that it is prefilled once.

    Once it was, ``logits`` are those of its last token, float32 (vocab_size,), and ``logprobs``
    those of its own tokens, if they were requested. ``states`` are those of recurrent layers, if
    the model has some: the sequence that read the prompt goes on, and its slot's states with it.
    ``block_keys`` are `Sequence.block_keys` of all of them, once one has found them.
    """

    def __init__(self) -> None:
        self.logits: NDArray[np.float32] | None = None
        self.states: NDArray[np.float32] | None = None
        self.logprobs: tuple[PromptLogprob, ...] = ()
        self.block_keys: tuple[bytes, ...] = ()

    def fill(self, logits: NDArray[np.float32], logprobs: tuple[PromptLogprob, ...]) -> None:
        """Keeps what the prefill gave for the other sequences."""
        self.logits, self.logprobs = logits, logprobs


class Sequence:
    """One request to generate: prompt, parameters, and progress.

    Everyone reads its attributes; the scheduler and the engine change them, each by the methods of
    its own section below. All times are in `time.perf_counter` seconds.

    Args:
        prompt_ids: at least one token id; of a sequence with a source text, the one token that its
            decoder starts from.
        params: how to generate.
        seed: of its random numbers, below 2**64; None draws one.
        source_ids: the source text's token ids, for an encoder-decoder model.
        priority: lower starts earlier.
        cache_salt: sequences share prefixes in the cache with those of the same salt only, and of
            the same key (see `maskdial.causal.prefix_cache`).
        grammar: what the text has to match.
        shared_prompt: the same object for sequences with the same prompt.
        spelled_tokens: pairs of a special token's id and its spelling in the text, where other
            special tokens leave nothing.
        reasoning: what the text may begin with, and where no stop string is looked for.
        prediction: token ids of a text that its client expects.
        adapter: what the model has added to its weights for this text.
        full_prompt: whether the prompt's tokens see each other in both directions. It is read in
            one pass then, and shares no prefix with others.
        block_text: what is written, of a sequence that is written block by block. Its logits are
            those of masks.
        borders: where the next prompt may part from this one, as numbers of tokens.
    """

    def __init__(
        self,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        seed: int | None = None,
        source_ids: SequenceOf[int] = (),
        priority: int = 0,
        cache_salt: str = "",
        grammar: Constraint | None = None,
        shared_prompt: SharedPrompt | None = None,
        spelled_tokens: SequenceOf[tuple[int, str]] = (),
        reasoning: Reasoning | None = None,
        prediction: SequenceOf[int] = (),
        adapter: Adapter | None = None,
        full_prompt: bool = False,
        block_text: BlockText | None = None,
        borders: SequenceOf[int] = (),
    ) -> None:
        self.params = params
        self.borders = tuple(borders)
        self.full_prompt = full_prompt
        self.block_text = block_text
        self.adapter = adapter
        self.priority = priority
        self.cache_salt = cache_salt
        self.grammar = grammar
        self.shared_prompt = shared_prompt
        self.search: Search | None = None
        self.seed = draw_seed() if seed is None else seed
        self.source_ids = np.array(source_ids, np.int64)
        self.prediction = np.array(prediction, np.int64)
        self.num_prompt = len(prompt_ids)
        self.num_generated = 0
        self._token_ids = np.array(prompt_ids, np.int64)  # with room to grow at the end

        self.usage = ClientUsage()
        """Whose it is; the engine sets that when it is queued."""

        # The scheduler's.
        self.state = State.WAITING
        self.cancelled = False
        self.arrival = 0
        """Its number in the order of arrival."""
        self.last_turn = 0
        """The step of its last pass, of a sequence that is written block by block."""
        self.slot = -1
        self.num_computed = 0
        """Tokens in the KV cache, or in ``saved``."""
        self.saved: NDArray[np.generic] | None = None
        """What the KV cache had of it, in main memory, while it has no slot; see `KVCache.read`."""
        self._num_noted = 0
        self._states_read: tuple[int, int] | None = None
        self._rewound_to: int | None = None
        self.num_reused = 0
        """Prompt tokens that came from the prefix cache."""
        self.block_keys: tuple[bytes, ...] = ()
        """The prefix cache's keys of the prompt's whole blocks."""
        self.snapshots: frozenset[int] = frozenset()
        """After how many of these blocks the states of recurrent layers are kept."""
        self.fetch: Fetch | None = None
        """The blocks of its prompt that are being read from disk."""
        self.fetches_left = _MAX_FETCHES
        self.num_restored = 0
        """Of the tokens that came from the prefix cache, those that came from disk for it."""

        # The engine's.
        self.arrived_at = time.perf_counter()
        self.started_at = 0.0
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: tuple[PromptLogprob, ...] = ()
        self.held_logits: NDArray[np.float32] | None = None
        """The logits of the next token, float32 (vocab_size,), while it is not sampled."""
        self.mirostat: Mirostat | None = None
        """What the sampler keeps from token to token, if it draws by Mirostat."""
        if params.mirostat and not params.greedy:
            self.mirostat = Mirostat(params.mirostat_tau, params.mirostat_eta)
        self._decoder: Decoder | None = None
        self._spellings = dict(spelled_tokens)
        self._gate = ReasoningGate(reasoning)
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
    def beams(self) -> tuple["Sequence", ...]:
        """The sequences that take slots for it: itself, or those of its beam search."""
        return (self,) if self.search is None else self.search.beams

    @property
    def num_cached(self) -> int:
        """Prompt tokens that its prefill took from the prefix cache.

        Of those that share a prompt, the first one is prefilled, and the others start from its
        slot; or from the prefix cache, if it has ended meanwhile.
        """
        return self.beams[0].num_reused

    @property
    def num_source(self) -> int:
        """Tokens of the source text; 0 if the model has no encoder."""
        return len(self.source_ids)

    @property
    def num_to_prefill(self) -> int:
        """Prompt tokens that are not in the KV cache yet."""
        return max(self.num_prompt - self.num_computed, 0)

    @property
    def forces_next(self) -> bool:
        """Whether the next token is a given one, which is no part of what a grammar describes."""
        return self.params.forced_first is not None and self.num_generated == 0

    @property
    def closing_token(self) -> int | None:
        """The next token of the mark that closes the reasoning, if the budget of that is spent."""
        return self._gate.closing

    @property
    def can_sample(self) -> bool:
        """Whether the next token can be sampled without waiting for the grammar's mask."""
        return self.grammar is None or self.forces_next or self.grammar.ready

    def wait_for_grammar(self, seconds: float) -> None:
        """Waits for the grammar's mask, at most so long."""
        if self.grammar is not None:
            self.grammar.wait(seconds)

    # For the scheduler.

    def enqueue(self, arrival: int) -> None:
        """Waits for a slot, as number ``arrival`` in the order of arrival."""
        self.arrival = arrival

    @property
    def snapshot_keys(self) -> tuple[bytes, ...]:
        """The keys of the blocks after which the states are kept."""
        return tuple(self.block_keys[number - 1] for number in self.snapshots)

    def find_blocks(self, keys: tuple[bytes, ...], snapshots: frozenset[int]) -> None:
        """Keeps the prefix cache's keys of the prompt, and after which blocks it keeps states."""
        self.block_keys, self.snapshots = keys, snapshots
        if self.shared_prompt is not None:
            self.shared_prompt.block_keys = keys

    def keep_states(self, num_blocks: int) -> None:
        """Has the states kept after so many blocks of the prompt, too."""
        self.snapshots |= {num_blocks}

    def await_fetch(self, fetch: Fetch | None) -> None:
        """Waits for blocks of its prompt; with None, for none any more."""
        self.fetch = fetch
        self.fetches_left = 0 if fetch is None else self.fetches_left - 1

    def start(self, slot: int, num_reused: int, num_restored: int = 0) -> None:
        """Takes a slot, to which the prefix cache's first ``num_reused`` tokens are loaded.

        Of these, ``num_restored`` were read from disk, for it before others.
        """
        self.slot = slot
        self.state = State.PREFILLING
        self.num_restored = num_restored
        self.num_reused = self.num_computed = num_reused

    def fork(self, slot: int, shared: SharedPrompt) -> None:
        """Takes a slot that has the whole prompt, or the source text, or is about to."""
        self.slot = slot
        if self.num_source:
            self.proceed()
            return
        self.state = State.HOLDING
        self.num_computed = self.num_prompt
        self.held_logits = shared.logits
        self.prompt_logprobs = shared.logprobs

    def reserve(self, slot: int) -> None:
        """Takes a slot for a beam search, which has no text for it yet."""
        self.slot = slot
        self.state = State.RESERVED

    def move(self, slot: int) -> None:
        """Continues in another slot, into which the executor copies the tokens' keys and values."""
        self.slot = slot

    @property
    def is_set_aside(self) -> bool:
        """Whether it had begun, and waits for a slot to go on in."""
        return self.state is State.WAITING and self.num_computed > 0

    def set_aside(self) -> None:
        """Gives its slot up for now; the executor keeps what is in it in ``saved``."""
        self.slot = -1
        self.state = State.WAITING

    def resume(self, slot: int) -> None:
        """Goes on in a slot, to which the executor copies what was saved."""
        self.slot, self.saved = slot, None
        self.state = State.DECODING if self.held_logits is None else State.HOLDING

    def take_turn(self, step: int) -> None:
        """Counts a pass over its block at work."""
        self.last_turn = step

    def prefill(self, num_tokens: int) -> None:
        """Counts prompt tokens that a pass has written to the KV cache."""
        self.num_computed += num_tokens

    @property
    def num_new(self) -> int:
        """Tokens that were generated since it last went on."""
        return self.num_generated - self._num_noted

    def proceed(self) -> None:
        """Goes on after a step: all tokens but one that was just sampled are in the KV cache."""
        self._num_noted = self.num_generated
        if self.held_logits is None:
            self.state = State.DECODING
            self.num_computed = self.num_tokens - 1
        else:
            self.state = State.HOLDING
            self.num_computed = self.num_tokens
        if self._states_read is not None:
            start, end = self._states_read
            if end > self.num_computed:
                self._rewound_to = start
            self._states_read = None
        if self._rewound_to is not None:
            self.num_computed = self._rewound_to
        if self.block_text is not None:
            self.num_computed = self.block_text.num_final

    @property
    def rewound(self) -> bool:
        """Whether its recurrent layers have read draft tokens that were wrong.

        Then ``num_computed`` is what they had read before, and the next pass reads the tokens from
        there on once more, from the states of that time.
        """
        return self._rewound_to is not None

    def read_states(self, start: int, end: int) -> None:
        """Notes that a pass takes its states from ``start`` tokens to ``end``, drafts included."""
        self._states_read, self._rewound_to = (start, end), None

    def cancel(self) -> None:
        """Marks the sequence as one that nobody reads any more."""
        self.cancelled = True

    def end(self) -> None:
        """Gives the slot up for good, if it has one."""
        self.slot, self.saved = -1, None
        self.state = State.ENDED

    # For the engine.

    def begin(self, now: float) -> bool:
        """Ends the time in the queue; False when it had ended before."""
        if self.started_at:
            return False
        self.started_at = now
        return True

    @property
    def timeline(self) -> Timeline:
        """For the span of its request."""
        return Timeline(
            prompt=self.shared_prompt or self.search or self,
            input_tokens=self.num_prompt,
            arrived_at=self.arrived_at,
            started_at=self.started_at,
            ended_at=self.last_token_at,
            first_token_at=self.first_token_at,
            output_tokens=self.num_generated,
            cached_tokens=self.num_cached,
            finish_reason=self.finish_reason or "",
        )

    def hold(self, logits: NDArray[np.float32]) -> None:
        """Keeps the logits of the next token, float32 (vocab_size,), to sample it later."""
        self.held_logits = logits

    def add_prompt_logprobs(self, logprobs: tuple[PromptLogprob, ...]) -> None:
        """Takes the log-probabilities of the next prompt tokens."""
        self.prompt_logprobs += logprobs

    def join(self, search: Search) -> None:
        """Becomes one of a beam search's sequences."""
        self.search = search

    def rewrite(self, token_ids: NDArray[np.int64]) -> None:
        """Takes another text, int64 (num_tokens,), which has the same prompt."""
        self._token_ids = token_ids
        self.num_generated = len(token_ids) - self.num_prompt

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
        """Appends a sampled token and returns what the reader receives of it.

        A token that ends the sequence in several ways counts as the end-of-sequence token first (as
        does one that completes the grammar), then as a stop token or the end of a stop string, then
        as the last that fits.

        Raises:
            MaskdialError: the grammar cannot go on.
        """
        now = time.perf_counter()
        self.held_logits = None
        forced = self.forces_next
        self._append(token_id)
        text = self._decode(token_id, detokenizer)
        reason = self._finish_reason(token_id, eos_token_ids, max_length, forced=forced)
        if reason is not None:
            text += self._flush()
        self._texts.append(text)
        self.first_token_at = self.first_token_at or now
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

    def unmask(self, logits: NDArray[np.float32]) -> BlockEvent:
        """Fills masks by their logits, float32 (num_logits, vocab_size); what its reader receives.

        Raises:
            InferenceError: the logits are not finite.
        """
        assert self.block_text is not None, "it is written block by block"
        now = time.perf_counter()
        text = self.block_text.advance(logits)
        new = text.tokens[self.num_generated :]
        for token in new:
            self._append(token.token)
        if new:
            self.first_token_at = self.first_token_at or now
            self.last_token_at = now
        reason: FinishReason = "eos_token" if text.ended else "length"
        return BlockEvent(text, len(new), self._finish(reason, now) if text.finished else None)

    def _finish_reason(
        self, token_id: int, eos_token_ids: frozenset[int], max_length: int, *, forced: bool
    ) -> FinishReason | None:
        params = self.params
        if token_id in eos_token_ids and (self.grammar is not None or not params.ignore_eos):
            return "eos_token"
        if self.grammar is not None and not forced:
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
            goes_on_from = [] if self.num_source else self.prompt_ids.tolist()
            self._decoder = detokenizer.decoder(goes_on_from)
        if token_id in self._spellings:
            # No character goes on after it.
            text = self._decoder.flush() + self._spellings[token_id]
        else:
            text = self._decoder.push(token_id)
        reasoning, text = self._gate.push_token(text)
        if self.num_generated < self.params.min_new_tokens:
            return reasoning + text  # no stop string begins before the text may end
        return reasoning + self._stops.push(text)

    def _flush(self) -> str:
        if self._decoder is None or self._stops.matched:
            return ""
        reasoning, text = self._gate.push(self._decoder.flush())
        return reasoning + self._stops.push(text + self._gate.flush()) + self._stops.flush()

    def _finish(self, reason: FinishReason, now: float) -> Finish:
        self.finish_reason = reason
        return Finish(
            reason=reason,
            generated_text="".join(self._texts),
            generated_tokens=self.num_generated,
            seed=None if self.params.greedy else self.seed,
            input_length=self.num_source or self.num_prompt,
            queue_seconds=self.started_at - self.arrived_at,
            inference_seconds=now - self.started_at,
            prefill_seconds=(self.first_token_at or now) - self.started_at,
            prompt_logprobs=self.prompt_logprobs,
            stop=self._stops.found if reason == "stop_sequence" else None,
        )
