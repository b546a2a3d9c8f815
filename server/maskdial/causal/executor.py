"""Executor: runs the scheduler's plans on the model and its caches."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.events import PromptLogprob
from maskdial.causal.plan import Load, Plan, Prefill, Save
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.prefix_disk.tier import DiskTier
from maskdial.causal.sampling.sampler import prompt_logprobs
from maskdial.causal.sequence import Sequence
from maskdial.engine.life import failure_of
from maskdial.errors import DeviceLostError, GenerationError, MaskdialError
from maskdial.metrics import ModelMetrics
from maskdial.runtime.adapter import address_of
from maskdial.runtime.logits import Logits
from maskdial.runtime.piece import Piece

_log = logging.getLogger(__name__)


class DecodeAndPrefill(Protocol):
    """One pass for a decode step and for prompts; `maskdial.runtime.runner` describes it."""

    def __call__(
        self,
        token_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        pieces: list[Piece],
        /,
    ) -> Logits: ...


class Cache(Protocol):
    """What the engine needs of the KV cache; `maskdial.runtime.kv_cache` describes the methods."""

    @property
    def bytes_per_token(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    def copy(self, source: int, target: int, num_tokens: int) -> None: ...
    def copy_tokens(self, source: int, target: int, start: int, num_tokens: int) -> None: ...
    def read(self, slot: int, start: int, num_tokens: int) -> NDArray[np.generic]: ...
    def write(self, slot: int, start: int, block: NDArray[np.generic]) -> None: ...
    def read_states(self, slot: int) -> NDArray[np.float32]: ...
    def write_states(self, slot: int, snapshot: NDArray[np.float32]) -> None: ...
    def forget(self, slot: int, num_tokens: int) -> None: ...
    def release_pages(self, slot: int) -> None: ...


class SourceEncoder(Protocol):
    """What the engine needs of an encoder; `maskdial.runtime.encoder` describes the method."""

    def encode(self, slots: list[int], sources: list[NDArray[np.int64]]) -> None: ...


class ModelRunner(Protocol):
    """What the engine needs of a model; `maskdial.runtime.runner` describes the methods."""

    @property
    def cache(self) -> Cache: ...
    @property
    def adapters(self) -> NDArray[np.int64] | None: ...
    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> Logits: ...
    def prefill_together(self, slot: int, prompts: list[NDArray[np.int64]]) -> Logits: ...
    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Logits: ...
    @property
    def decode_and_prefill(self) -> DecodeAndPrefill | None:
        """Computes both in one pass; None where they need one each."""

    def warm_up(self) -> None: ...


_NO_LOGITS: NDArray[np.float32] = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class Output:
    """What a pass computed.

    ``sequences`` get a token each: from ``logits``, float32 (num_sequences, vocab_size), or, with
    ``drafts``, the only one gets one or more, from the logits after its newest token and after each
    draft token, (1 + num_drafts, vocab_size). If the pass ``unmasks``, the only one fills masks,
    from a row for each. With an ``error`` there are no logits, and the sequences fail.

    ``prefills`` are the chunks of prompts that the pass read; a chunk that does not complete its
    prompt gives its sequence no token. ``prompt_logprobs`` are those of a single chunk's tokens, if
    they were requested.
    """

    sequences: tuple[Sequence, ...]
    logits: Logits
    drafts: tuple[int, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    unmasks: bool = False
    error: MaskdialError | None = None

    @classmethod
    def failed(cls, sequences: tuple[Sequence, ...], error: MaskdialError) -> "Output":
        """Of sequences that fail."""
        return cls(sequences, _NO_LOGITS, error=error)

    def only(self, indices: list[int]) -> "Output":
        """The part for some of the sequences, by their indices."""
        sequences = tuple(self.sequences[i] for i in indices)
        logits = self.logits if self.error is not None else self.logits[indices]
        return Output(sequences, logits, error=self.error)


@dataclass(frozen=True, slots=True)
class _Size:
    """A pass's rows, their valid tokens, and these with the padding."""

    num_rows: int
    num_tokens: int
    padded_tokens: int


_FORGET_EVERY = 256  # decode steps: the system takes a microsecond for each layer


class Executor:
    """Runs the copies, the passes and the cache traffic of a step.

    A pass that fails fails its own sequences only, and so does what is made of its logits.

    Args:
        runner: the model.
        prefix_cache: where to keep the prompts that are prefilled.
        metrics: the model's instruments.
        name: the model's, for messages.
        encoder: of an encoder-decoder model.
        keep_hidden: is called after each pass, with the sequences that it read tokens of.
        prefix_disk: where to keep those prompts beyond memory.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prefix_cache: PrefixCache | None,
        metrics: ModelMetrics,
        name: str,
        encoder: SourceEncoder | None = None,
        keep_hidden: Callable[[tuple[Sequence, ...]], None] | None = None,
        prefix_disk: DiskTier | None = None,
    ) -> None:
        self._runner = runner
        self._encoder = encoder
        self._keep_hidden = keep_hidden
        self._prefix_cache = prefix_cache
        self._prefix_disk = prefix_disk
        self._metrics = metrics
        self._name = name
        self._snapshots: dict[Sequence, NDArray[np.float32]] = {}
        """The states before the drafts of the last pass."""

    def run(self, plan: Plan) -> list[Output]:
        """Runs a plan. Grammar masks are computed on other threads meanwhile."""
        self._copy(plan)
        try:
            return self._run_passes(plan)
        except Exception as error:  # around the passes, so none of the plan's sequences goes on
            prefilling = (prefill.sequence for prefill in plan.prefills)
            involved = (*plan.awaiting_mask, *plan.decoding, *prefilling, *plan.encoding)
            return [Output.failed(involved, self._failure(error))]

    def _copy(self, plan: Plan) -> None:
        """Brings the caches' contents to where the passes expect them."""
        for fork in plan.forks:
            if fork.start:
                self._runner.cache.copy_tokens(
                    fork.source, fork.target, fork.start, fork.num_tokens
                )
            else:
                self._runner.cache.copy(fork.source, fork.target, fork.num_tokens)
        for move in plan.moves:
            if isinstance(move, Save):
                move.sequence.saved = self._runner.cache.read(move.slot, 0, move.num_tokens)
            elif isinstance(move, Load):
                self._runner.cache.write(move.slot, move.start, move.block)
            else:
                self._runner.cache.copy(move.source, move.target, move.num_tokens)
        for load in plan.loads:
            self._runner.cache.write(load.slot, load.start, load.block)
            if load.states is not None:
                self._runner.cache.write_states(load.slot, load.states)
        for restore in plan.restores:
            self._runner.cache.write_states(restore.slot, restore.states)
        self._rewind()

    def _run_passes(self, plan: Plan) -> list[Output]:
        drafts = dict(zip(plan.decoding, plan.drafts, strict=False))
        for sequence in _to_sample(plan):
            if sequence.grammar is not None:
                sequence.grammar.prepare(drafts.get(sequence, ()))
        self._set_adapters(plan)
        outputs = []
        if plan.awaiting_mask:
            held = [s.held_logits for s in plan.awaiting_mask if s.held_logits is not None]
            outputs.append(Output(plan.awaiting_mask, np.stack(held)))
        together = self._runner.decode_and_prefill
        behind = any(sequence.rewound for sequence in plan.decoding)
        shares = bool(plan.decoding and (plan.prefills or plan.drafts or behind))
        if together is not None and (shares or _looking_ahead(plan)):
            outputs += self._run_together(plan, together)
        else:
            if plan.drafts:
                outputs.append(self._verify(plan.decoding[0], plan.drafts[0]))
            elif plan.decoding:
                outputs.append(self._decode(plan))
            if plan.prefills:
                outputs.append(self._prefill(plan.prefills))
        if plan.encoding:
            outputs.append(self._encode(plan.encoding))
        return outputs

    def _set_adapters(self, plan: Plan) -> None:
        """Tells the runner the adapters of the slots that the passes compute."""
        adapters = self._runner.adapters
        if adapters is None:
            return
        for slot, sequence in enumerate(plan.rows):
            adapters[slot] = address_of(sequence.adapter)
        for prefill in plan.prefills:
            adapters[prefill.slot] = address_of(prefill.sequence.adapter)

    def next_step(self, plan: Plan, token_ids: list[int], max_length: int) -> Callable[[], Output]:
        """The decode step that follows another, for the caller to run.

        It reads the sequences now, so they may change while it runs. Rows of sequences that end
        meanwhile are dummy rows.

        Args:
            plan: a decode step that has run, but has not been noted by the scheduler.
            token_ids: what was sampled for each row.
            max_length: tokens that a slot holds. A row that has as many ends; its dummy token is
                written to the last position.
        """
        lengths = np.array([sequence.num_computed + 1 for sequence in plan.rows], np.int64)
        lengths = np.minimum(lengths, max_length - 1)
        return lambda: self._run_rows(plan, np.array(token_ids, np.int64), lengths)

    def _decode(self, plan: Plan) -> Output:
        token_ids = np.array([sequence.last_token_id for sequence in plan.rows], np.int64)
        lengths = np.array([sequence.num_computed for sequence in plan.rows], np.int64)
        return self._run_rows(plan, token_ids, lengths)

    def _run_rows(
        self, plan: Plan, token_ids: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> Output:
        decoding = plan.decoding
        rows = np.array(plan.decoding_rows, np.int64)

        def run() -> Logits:
            logits = self._runner.decode(token_ids, lengths, rows)
            for index in np.flatnonzero(lengths[rows] % _FORGET_EVERY == 0):
                self._forget(decoding[index], int(rows[index]), int(lengths[rows[index]]))
            return logits

        return self._pass(decoding, _Size(len(decoding), len(decoding), len(plan.rows)), run)

    def _run_together(self, plan: Plan, together: DecodeAndPrefill) -> list[Output]:
        """One pass for the steps, the drafts and the prompts of a plan."""
        decoding, prefills = plan.decoding, plan.prefills
        token_ids = np.array([sequence.last_token_id for sequence in plan.rows], np.int64)
        lengths = np.array([sequence.num_computed for sequence in plan.rows], np.int64)
        drafts = plan.drafts or ((),) * len(decoding)
        drafted = [
            i
            for i, draft in enumerate(drafts)
            if draft or decoding[i].rewound or decoding[i].block_text is not None
        ]
        steps = [i for i in range(len(decoding)) if i not in drafted]
        rows = np.array([plan.decoding_rows[i] for i in steps], np.int64)
        pieces = [_next_piece(plan.decoding_rows[i], decoding[i], drafts[i]) for i in drafted]
        for i, piece in zip(drafted, pieces, strict=True):
            end = piece.start + len(piece.token_ids)
            self._keep_states(decoding[i], piece.slot, piece.start, end)
        pieces += map(_reading, prefills)
        num_tokens = len(steps) + sum(len(piece.token_ids) for piece in pieces)
        output = self._pass(
            (*decoding, *(each.sequence for each in prefills)),
            _Size(len(decoding) + len(prefills), num_tokens, num_tokens),
            lambda: together(token_ids, lengths, rows, pieces),
        )
        if output.error is not None:
            return self._run_apart(plan, output)
        outputs, end = [], len(steps)
        if steps:
            outputs.append(Output(tuple(decoding[i] for i in steps), output.logits[:end]))
        for i, piece in zip(drafted, pieces, strict=False):
            start, end = end, end + len(piece.rows)
            unmasks = decoding[i].block_text is not None
            logits = output.logits[start:end]
            outputs.append(Output((decoding[i],), logits, drafts[i], unmasks=unmasks))
        if prefills:
            read = Output(output.sequences[len(decoding) :], output.logits[end:])
            outputs.append(self._note(prefills, read))
        for sequence, draft in zip(decoding, drafts, strict=True):
            self._forget_behind(sequence, 1 + len(draft))
        return outputs

    def _run_apart(self, plan: Plan, failed: Output) -> list[Output]:
        """Passes for the steps and the prompts of a plan, after the one for both has failed; what
        only that can compute fails.
        """
        # It may have changed states, which cannot be computed again.
        if self._runner.cache.state_bytes:
            return [failed]
        outputs, lost = [], _looking_ahead(plan)
        if lost:
            outputs.append(replace(failed, sequences=tuple(lost)))
        rows = tuple(row for row in plan.decoding_rows if plan.rows[row] not in lost)
        if rows:
            outputs.append(self._decode(replace(plan, decoding_rows=rows, drafts=())))
        prefills = tuple(prefill for prefill in plan.prefills if prefill.sequence not in lost)
        if prefills == plan.prefills and prefills:
            outputs.append(self._prefill(prefills))
        else:  # each pass writes over the logits of the one before
            outputs += [_copied(self._prefill((each,))) for each in prefills]
        return outputs

    def _keep_states(self, sequence: Sequence, slot: int, start: int, end: int) -> None:
        """Keeps the states before a pass that reads draft tokens: they cannot be cut back."""
        if self._runner.cache.state_bytes:
            self._snapshots[sequence] = self._runner.cache.read_states(slot)
            sequence.read_states(start, end)

    def _rewind(self) -> None:
        """Gives the sequences with wrong draft tokens the states from before them."""
        for sequence, states in self._snapshots.items():
            if sequence.rewound and sequence.slot >= 0:
                self._runner.cache.write_states(sequence.slot, states)
        self._snapshots.clear()

    def _verify(self, sequence: Sequence, drafts: tuple[int, ...]) -> Output:
        token_ids, start = _newest(sequence, drafts)
        num_tokens = len(token_ids)
        output = self._pass(
            (sequence,),
            _Size(1, num_tokens, num_tokens),
            lambda: self._runner.prefill(sequence.slot, token_ids, start, num_tokens),
        )
        return replace(output, drafts=drafts)

    def _prefill(self, prefills: tuple[Prefill, ...]) -> Output:
        first, lengths = prefills[0], [prefill.num_tokens for prefill in prefills]

        def run() -> Logits:
            if len(prefills) > 1:
                return self._runner.prefill_together(first.slot, [_tokens(p) for p in prefills])
            return self._runner.prefill(first.slot, _tokens(first), first.start, _num_logits(first))

        output = self._pass(
            tuple(prefill.sequence for prefill in prefills),
            _Size(len(prefills), sum(lengths), len(prefills) * max(lengths)),
            run,
        )
        return self._note(prefills, output)

    def _note(self, prefills: tuple[Prefill, ...], output: Output) -> Output:
        """What a pass gives the sequences whose prompts it read; whole blocks are kept."""
        if output.error is not None:
            return output
        try:
            return self._take_prompts(prefills, output)
        except Exception as error:
            return Output.failed(output.sequences, self._failure(error))

    def _take_prompts(self, prefills: tuple[Prefill, ...], output: Output) -> Output:
        """As `_note`, of a pass that has not failed."""
        self._metrics.prompt_tokens.inc(sum(prefill.num_tokens for prefill in prefills))
        for prefill in prefills:
            try:
                self._cache_blocks(prefill)
            except DeviceLostError:
                raise
            except Exception:  # the text does not depend on it
                _log.exception("a prompt could not be kept in the prefix cache")
            self._forget(prefill.sequence, prefill.slot, prefill.start + prefill.num_tokens)
            shared = prefill.sequence.shared_prompt
            if prefill.is_last and shared is not None and self._runner.cache.state_bytes:
                shared.states = self._runner.cache.read_states(prefill.slot)
        if len(prefills) > 1:
            return replace(output, prefills=prefills)
        (prefill,) = prefills
        sequence, end = prefill.sequence, prefill.start + prefill.num_tokens
        logprobs: tuple[PromptLogprob, ...] = ()
        if sequence.params.prompt_logprobs:
            following = sequence.prompt_ids[prefill.start + 1 : end + 1]
            logits = output.logits[: len(following)]
            logprobs = tuple(prompt_logprobs(logits, following, sequence.params.top_n_tokens))
        return Output(
            output.sequences if prefill.is_last else (),
            output.logits[-1:],
            prefills=(prefill,),
            prompt_logprobs=logprobs,
        )

    def _encode(self, sequences: tuple[Sequence, ...]) -> Output:
        """Reads source texts; their sequences get their first token in the next step."""
        sources = [sequence.source_ids for sequence in sequences]
        lengths = [len(source) for source in sources]
        encoder = self._encoder
        assert encoder is not None, "only models with an encoder have source texts"

        def run() -> Logits:
            encoder.encode([sequence.slot for sequence in sequences], sources)
            return _NO_LOGITS

        size = _Size(len(sources), sum(lengths), len(sources) * max(lengths))
        output = self._pass(sequences, size, run)
        if output.error is not None:
            return output
        self._metrics.prompt_tokens.inc(sum(lengths))
        return replace(output, sequences=())

    def _cache_blocks(self, prefill: Prefill) -> None:
        """Copies the whole blocks of a chunk to the prefix cache."""
        if self._prefix_cache is None or prefill.sequence.full_prompt:
            return
        sequence, size = prefill.sequence, self._prefix_cache.block_tokens
        first, end = prefill.start // size, (prefill.start + prefill.num_tokens) // size
        snapshots = sequence.snapshot_keys
        for index in range(first, end):
            key = sequence.block_keys[index]
            ends_here = (index + 1) * size == prefill.start + prefill.num_tokens
            keeps = ends_here and index + 1 in sequence.snapshots
            if key not in self._prefix_cache or (keeps and not self._prefix_cache.has_states(key)):
                block = self._runner.cache.read(prefill.slot, index * size, size)
                states = self._runner.cache.read_states(prefill.slot) if keeps else None
                evicts = not sequence.usage.background
                self._prefix_cache.put(key, block, states, snapshots=snapshots, evicts=evicts)
        # What runs in the background, a file of requests, would push conversations out.
        if self._prefix_disk is not None and not sequence.usage.background:
            self._prefix_disk.keep(sequence.block_keys[:end], snapshots, sequence.usage.key)

    def _forget_behind(self, sequence: Sequence, num_tokens: int) -> None:
        """As `_forget`, when a pass of ``num_tokens`` reaches one of the lengths to do so at."""
        length = sequence.num_computed
        if -length % _FORGET_EVERY < num_tokens:
            self._forget(sequence, sequence.slot, length)

    def _forget(self, sequence: Sequence, slot: int, num_tokens: int) -> None:
        """Forgets what lies behind the windows, unless another sequence may yet copy the slot."""
        if sequence.shared_prompt is None and sequence.search is None:
            self._runner.cache.forget(slot, num_tokens)

    def _pass(
        self, sequences: tuple[Sequence, ...], size: _Size, run: Callable[[], Logits]
    ) -> Output:
        started_at = time.perf_counter()
        try:
            logits = run()
            seconds = time.perf_counter() - started_at
            if self._keep_hidden is not None:
                self._keep_hidden(sequences)
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            return Output.failed(sequences, self._failure(error))
        self._metrics.observe_pass(seconds, size.num_rows, size.num_tokens, size.padded_tokens)
        return Output(sequences, logits)

    def _failure(self, error: Exception) -> MaskdialError:
        return failure_of(error, GenerationError, f"a pass of model {self._name!r}")


def _copied(output: Output) -> Output:
    """An output whose logits outlive the next pass of the kind."""
    return replace(output, logits=np.array(output.logits))


def _newest(sequence: Sequence, drafts: tuple[int, ...]) -> tuple[NDArray[np.int64], int]:
    """A sequence's tokens that are to be read, its draft tokens, and the position of the first."""
    start = sequence.num_computed
    return np.concatenate([sequence.token_ids[start:], np.array(drafts, np.int64)]), start


def _looking_ahead(plan: Plan) -> list[Sequence]:
    """The sequences of which a pass reads tokens that see later ones."""
    blocks = [sequence for sequence in plan.decoding if sequence.block_text is not None]
    prompts = [prefill.sequence for prefill in plan.prefills if prefill.sequence.full_prompt]
    return blocks + prompts


def _next_piece(slot: int, sequence: Sequence, drafts: tuple[int, ...]) -> Piece:
    """A sequence's newest tokens and its draft tokens, or its block at work."""
    if sequence.block_text is not None:
        return sequence.block_text.piece(slot)
    return Piece.of(slot, *_newest(sequence, drafts), 1 + len(drafts))


def _reading(prefill: Prefill) -> Piece:
    """A chunk of a prompt, or a whole one that is read in both directions."""
    ahead = np.arange(prefill.num_tokens)[::-1] if prefill.sequence.full_prompt else None
    return Piece.of(prefill.slot, _tokens(prefill), prefill.start, _num_logits(prefill), ahead)


def _tokens(prefill: Prefill) -> NDArray[np.int64]:
    """The piece of the prompt that a pass reads."""
    return prefill.sequence.prompt_ids[prefill.start : prefill.start + prefill.num_tokens]


def _num_logits(prefill: Prefill) -> int:
    return prefill.num_tokens if prefill.sequence.params.prompt_logprobs else 1


def _to_sample(plan: Plan) -> tuple[Sequence, ...]:
    """The sequences that get a token in this step."""
    prefilled = tuple(prefill.sequence for prefill in plan.prefills if prefill.is_last)
    return (*plan.awaiting_mask, *plan.decoding, *prefilled)
