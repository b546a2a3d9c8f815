"""Executor: carries out the scheduler's plans with the model and its caches."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.plan import Plan, Prefill
from maskdial.causal.prefix_cache import PrefixCache
from maskdial.causal.sampling.sampler import prompt_logprobs
from maskdial.causal.sequence import Sequence
from maskdial.errors import GenerationError
from maskdial.metrics import EngineMetrics
from maskdial.runtime.device_logits import DeviceLogits

_log = logging.getLogger(__name__)

Logits = NDArray[np.float32] | DeviceLogits
"""Rows of logits, float32 (num_rows, vocab_size), on the host or where the model left them."""


class Cache(Protocol):
    """What the engine needs of the KV cache; `maskdial.runtime.kv_cache` describes the methods."""

    @property
    def bytes_per_token(self) -> int: ...
    def copy(self, source: int, target: int, num_tokens: int) -> None: ...
    def read(self, slot: int, start: int, num_tokens: int) -> NDArray[np.generic]: ...
    def write(self, slot: int, start: int, block: NDArray[np.generic]) -> None: ...
    def release_pages(self, slot: int) -> None: ...


class ModelRunner(Protocol):
    """What the engine needs of a model; `maskdial.runtime.runner` describes the methods."""

    @property
    def cache(self) -> Cache: ...
    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> Logits: ...
    def prefill_together(self, slot: int, prompts: list[NDArray[np.int64]]) -> Logits: ...
    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> Logits: ...
    def warm_up(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Output:
    """What a pass gave for the sequences that get a token from it.

    ``logits`` are float32 (num_sequences, vocab_size), or those after the newest token and after
    each of its ``drafts`` where one sequence runs alone: (1 + num_drafts, vocab_size). With an
    ``error`` there are none.
    """

    sequences: tuple[Sequence, ...]
    logits: Logits
    drafts: tuple[int, ...] = ()
    error: GenerationError | None = None

    def only(self, indices: list[int]) -> "Output":
        """The part of some of the sequences, by their indices; without drafts."""
        sequences = tuple(self.sequences[i] for i in indices)
        logits = self.logits if self.error is not None else self.logits[indices]
        return Output(sequences, logits, error=self.error)


_NO_LOGITS: NDArray[np.float32] = np.empty((0, 0), np.float32)  # of a pass that failed


class Executor:
    """Copies, passes and cache traffic of one iteration. A failed pass fails its sequences only.

    Args:
        runner: the model.
        prefix_cache: where to keep the prompts that were read.
        metrics: where to report.
        name: the model's, for messages.
    """

    def __init__(
        self,
        runner: ModelRunner,
        prefix_cache: PrefixCache | None,
        metrics: EngineMetrics,
        name: str,
    ) -> None:
        self._runner = runner
        self._prefix_cache = prefix_cache
        self._metrics = metrics
        self._name = name

    def run(self, plan: Plan) -> list[Output]:
        """Carries out a plan. Masks of grammars are worked out beside the passes."""
        for sequence in _to_sample(plan):
            if sequence.grammar is not None:
                sequence.grammar.prepare()
        for load in plan.loads:
            self._runner.cache.write(load.slot, load.start, load.block)
        for move in plan.moves:
            self._runner.cache.copy(move.source, move.target, move.num_tokens)
        outputs = []
        if plan.drawing:
            held = [s.held_logits for s in plan.drawing if s.held_logits is not None]
            outputs.append(Output(plan.drawing, np.stack(held)))
        if plan.drafts:
            outputs.append(self._check_drafts(plan.decoding[0], plan.drafts))
        elif plan.decoding:
            outputs.append(self._decode(plan))
        if plan.prefills:
            output = self._prefill(plan.prefills)
            if output.error is not None or plan.prefills[0].is_last:
                outputs.append(output)
        return outputs

    def next_step(self, plan: Plan, token_ids: list[int], max_length: int) -> Callable[[], Output]:
        """The decode step after a plan that is one itself, whatever becomes of its rows.

        What it needs of the sequences is read now: they may change while it runs.

        Args:
            plan: of which the pass ran, but nothing is noted yet.
            token_ids: what was drawn for each row.
            max_length: tokens that a slot holds; a row that has as many ends, and writes within.
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
        self._metrics.batch(len(decoding), len(decoding), len(plan.rows))
        rows = np.array(plan.decoding_rows, np.int64)
        return self._pass(decoding, lambda: self._runner.decode(token_ids, lengths, rows))

    def _check_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> Output:
        token_ids = np.array([sequence.last_token_id, *drafts], np.int64)
        num_tokens = len(token_ids)
        self._metrics.batch(1, num_tokens, num_tokens)
        return self._pass(
            (sequence,),
            lambda: self._runner.prefill(
                sequence.slot, token_ids, sequence.num_computed, num_tokens
            ),
            drafts,
        )

    def _prefill(self, prefills: tuple[Prefill, ...]) -> Output:
        first = prefills[0]
        num_tokens = [prefill.num_tokens for prefill in prefills]
        self._metrics.batch(len(prefills), sum(num_tokens), len(prefills) * max(num_tokens))
        self._metrics.prompt_tokens(sum(num_tokens))
        if len(prefills) > 1:
            sequences = tuple(prefill.sequence for prefill in prefills)
            prompts = [sequence.prompt_ids for sequence in sequences]
            output = self._pass(
                sequences, lambda: self._runner.prefill_together(first.slot, prompts)
            )
        else:
            output = self._prefill_chunk(first)
        if output.error is None:
            for row, prefill in enumerate(prefills):
                self._keep(prefill, output.logits[row : row + 1])
        return output

    def _prefill_chunk(self, prefill: Prefill) -> Output:
        sequence, start, num_tokens = prefill.sequence, prefill.start, prefill.num_tokens
        token_ids = sequence.prompt_ids[start : start + num_tokens]
        num_logits = num_tokens if sequence.params.prompt_logprobs else 1
        output = self._pass(
            (sequence,),
            lambda: self._runner.prefill(prefill.slot, token_ids, start, num_logits),
        )
        if output.error is None and sequence.params.prompt_logprobs:
            following = sequence.prompt_ids[start + 1 : start + num_tokens + 1]
            logits = np.asarray(output.logits[: len(following)])
            sequence.prompt_logprobs += tuple(prompt_logprobs(logits, following))
        return Output(output.sequences, output.logits[-1:], error=output.error)

    def _keep(self, prefill: Prefill, logits: Logits) -> None:
        """Keeps what a piece of a prompt gave for those who will ask for it again.

        ``logits`` are those of its last token, (1, vocab_size).
        """
        sequence = prefill.sequence
        if prefill.is_last and sequence.shared_prompt is not None:
            sequence.shared_prompt.logits = np.array(logits)[0]
            sequence.shared_prompt.logprobs = sequence.prompt_logprobs
        if self._prefix_cache is None:
            return
        size = self._prefix_cache.block_tokens
        first, end = prefill.start // size, (prefill.start + prefill.num_tokens) // size
        for index in range(first, end):
            key = sequence.block_keys[index]
            if key not in self._prefix_cache:
                block = self._runner.cache.read(prefill.slot, index * size, size)
                self._prefix_cache.put(key, block)

    def _pass(
        self,
        sequences: tuple[Sequence, ...],
        run: Callable[[], Logits],
        drafts: tuple[int, ...] = (),
    ) -> Output:
        started_at = time.perf_counter()
        try:
            logits = run()
        except Exception as error:  # whatever the model raises ends this pass only
            _log.exception("a pass of model %r failed", self._name)
            message = f"a pass of model {self._name!r} failed: {error}"
            return Output(sequences, _NO_LOGITS, error=GenerationError(message))
        self._metrics.inference(time.perf_counter() - started_at)
        return Output(sequences, logits, drafts)


def _to_sample(plan: Plan) -> tuple[Sequence, ...]:
    """The sequences that get a token in this iteration."""
    read = tuple(prefill.sequence for prefill in plan.prefills if prefill.is_last)
    return (*plan.drawing, *plan.decoding, *read)
