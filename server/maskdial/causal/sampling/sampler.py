"""Sampler: logits to tokens, in NumPy; with the kernels, they make the passes over all logits.

Rows are processed one by one, so that a row's token does not depend on the rest of the batch, not
even in its last bit. Only the argmax, which is exact, runs over all rows at once. The other steps
would be slower over many rows, which do not fit into a core's cache.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.events import PromptLogprob
from maskdial.causal.sampling.candidates import Candidates, greatest_k, narrow
from maskdial.causal.sampling.llama_chain import narrow_as_llama
from maskdial.causal.sampling.processors import process
from maskdial.causal.sequence import Sequence
from maskdial.engine.life import failure_of
from maskdial.engine.philox import Philox
from maskdial.errors import GenerationError, MaskdialError
from maskdial.kernels.logits import VocabularyKernels
from maskdial.runtime.logits import Logits, SummarizedLogits

_CHANCES = 1  # the random numbers that decide whether XTC applies


@dataclass(frozen=True, slots=True)
class Sample:
    """A chosen token and its natural log-probability under the model's own distribution.

    The log-probability is taken before penalties, temperature and truncation (vLLM's
    ``raw_logprobs``), so that requests can be compared. If the model's logits were not finite, it
    is NaN and the token is meaningless.

    ``top`` holds the ``top_n_tokens`` likeliest tokens and their log-probabilities, also under the
    model's own distribution, best first; of equally likely tokens the lower id comes first. If the
    parameters have ``scored_tokens``, it holds these.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenSampler(Protocol):
    """What the engine needs of a sampler."""

    def sample(self, logits: Logits, sequences: Iterable[Sequence]) -> list[Sample | MaskdialError]:
        """Chooses a token for each sequence.

        Args:
            logits: float32 (num_sequences, vocab_size); not changed.
            sequences: in the order of the logits' rows.

        Returns:
            A sample for each sequence, or the error that concerns this sequence only.
        """


class Sampler:
    """Chooses the next token of each sequence on the host.

    Args:
        vocab_size: the length of the logits' rows.
        eos_token_ids: tokens that end a text; ids beyond the vocabulary are ignored.
        never: tokens that are not drawn unless the sequence has a bias for them, such as padding;
            ids beyond the vocabulary are ignored.
        kernels: for the passes over all logits, instead of NumPy; for the same vocabulary.

    Attributes:
        never: those of the vocabulary.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        never: frozenset[int] = frozenset(),
        kernels: VocabularyKernels | None = None,
    ) -> None:
        self._eos_token_ids = frozenset(t for t in eos_token_ids if t < vocab_size)
        self.never = frozenset(t for t in never if t < vocab_size)
        self._random = Philox()
        self._kernels = kernels

    def sample(self, logits: Logits, sequences: Iterable[Sequence]) -> list[Sample | MaskdialError]:
        """See `TokenSampler`; logits in a device's memory are copied to the host."""
        samples: list[Sample | MaskdialError] = []
        rows = _softmaxes(logits, self._kernels)
        for (row, best, softmax), sequence in zip(rows, sequences, strict=True):
            try:
                samples.append(self._sample(row, sequence, best, softmax))
            except Exception as error:  # the other sequences go on
                samples.append(failure_of(error, GenerationError, "choosing a token"))
        return samples

    def _sample(
        self,
        logits: NDArray[np.float32],
        sequence: Sequence,
        most_likely: int,
        softmax: "_Softmax | None",
    ) -> Sample:
        if softmax is None:
            return Sample(most_likely, math.nan)
        scores, best = self._score(logits, sequence, most_likely)
        params = sequence.params
        if params.greedy:
            token_id = best
        else:
            known = softmax if isinstance(softmax, Candidates) and scores is logits else None
            token_id = self._draw(scores, scores[best], sequence, known)
        top: tuple[tuple[int, float], ...] = ()
        if params.top_n_tokens:
            top = _top(logits, softmax, params.top_n_tokens, self._kernels)
        if params.scored_tokens:
            top = tuple((each, softmax.logprob(each)) for each in params.scored_tokens)
        return Sample(token_id, softmax.logprob(token_id), top)

    def _draw(
        self,
        scores: NDArray[np.float32],
        greatest: np.float32,
        sequence: Sequence,
        known: Candidates | None,
    ) -> int:
        params, index = sequence.params, sequence.num_generated
        u = self._random.uniform(sequence.seed, index)
        if sequence.mirostat is not None:
            return sequence.mirostat.draw(scores, greatest, params.temperature, u)
        if params.as_llama:
            chance = self._random.uniform(sequence.seed, index, _CHANCES)
            find = greatest_k if self._kernels is None else self._kernels.greatest_k
            return narrow_as_llama(scores, greatest, params, chance, find).pick(u)
        if self._kernels is None or params.typical_p < 1.0:
            return narrow(scores, greatest, params, known).pick(u)
        return self._kernels.draw(
            scores,
            float(greatest),
            u,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )

    def _score(
        self, logits: NDArray[np.float32], sequence: Sequence, most_likely: int
    ) -> tuple[NDArray[np.float32], int]:
        """The scores to choose by, float32 (vocab_size,), and the id of the best token."""
        wanted = most_likely if sequence.params.greedy else None
        scores = process(logits, sequence, self._eos_token_ids, self.never, wanted)
        best = most_likely if scores is logits else int(scores.argmax())
        if not math.isfinite(scores[best]):
            raise GenerationError(
                "no token can be chosen: after bias, penalties and grammar, the best score is "
                f"{scores[best]}"
            )
        return scores, best


class _Softmax(Protocol):
    """The model's own distribution over the vocabulary, before anything narrows it down."""

    def logprob(self, index: int, /) -> float:
        """The natural log-probability of a token."""


@dataclass(frozen=True, slots=True)
class _Summary:
    """What the kernels tell of it."""

    logits: NDArray[np.float32]
    greatest: float
    log_total: float

    def logprob(self, index: int, /) -> float:
        return float(self.logits[index]) - self.greatest - self.log_total


def _softmaxes(
    logits: Logits, kernels: VocabularyKernels | None = None
) -> Iterator[tuple[NDArray[np.float32], int, _Softmax | None]]:
    """Each row, its most likely token, and the model's own distribution.

    The latter is None if the greatest logit is not finite.
    """
    rows = np.asarray(logits)
    if isinstance(logits, SummarizedLogits):
        found = logits.summaries
    elif kernels is not None:
        found = kernels.summarize(rows)
    else:
        for row, best in zip(rows, rows.argmax(axis=-1).tolist(), strict=True):
            greatest = row[best]
            yield row, best, Candidates.of(row, greatest) if math.isfinite(greatest) else None
        return
    for row, (best, peak, total) in zip(rows, found, strict=True):
        yield row, best, _Summary(row, peak, math.log(total)) if total else None


def _top(
    logits: NDArray[np.float32],
    softmax: _Softmax,
    num_tokens: int,
    kernels: VocabularyKernels | None = None,
) -> tuple[tuple[int, float], ...]:
    find = greatest_k if kernels is None else kernels.greatest_k
    token_ids = find(logits, min(num_tokens, len(logits)))
    best_first = np.argsort(-logits[token_ids], kind="stable")[:num_tokens]
    return tuple((i, softmax.logprob(i)) for i in token_ids[best_first].tolist())


def prompt_logprobs(
    logits: Logits, token_ids: NDArray[np.int64], top_n_tokens: int = 0
) -> list[PromptLogprob]:
    """The natural log-probability of one token per row, under the model's own distribution.

    Args:
        logits: float32 (num_tokens, vocab_size).
        token_ids: int64 (num_tokens,), each below vocab_size.
        top_n_tokens: how many of the most likely tokens to report for each row.

    Returns:
        One per row; NaN, without alternatives, if the row's logits are not finite.
    """
    return [
        PromptLogprob(math.nan)
        if softmax is None
        else PromptLogprob(
            softmax.logprob(token_id),
            _top(row, softmax, top_n_tokens) if top_n_tokens else (),
        )
        for (row, _, softmax), token_id in zip(_softmaxes(logits), token_ids.tolist(), strict=True)
    ]
