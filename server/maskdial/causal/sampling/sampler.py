"""Sampler: logits to tokens, in plain numpy.

Rows are worked on one by one, so a row's token never depends on what else is in the batch, not even
in its last bit; only the argmax, which is exact, runs over all rows at once. The rest would even be
slower over many rows, which do not fit into a core's cache.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sampling.candidates import Candidates, greatest_k, narrow
from maskdial.causal.sampling.philox import Philox
from maskdial.causal.sampling.processors import process
from maskdial.causal.sequence import Sequence
from maskdial.errors import GenerationError, MaskdialError
from maskdial.runtime.device_logits import DeviceLogits

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """A chosen token and its natural log-probability under the model's own distribution.

    The log-probability is taken before penalties, temperature and truncation (vLLM's
    ``raw_logprobs``), so it is comparable between requests. NaN says that the model's logits were
    no numbers, and the token means nothing.

    ``top`` holds the ``top_n_tokens`` likeliest tokens and their log-probabilities, under the
    model's own distribution too, best first; of equally likely ones the lower id comes first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class TokenSampler(Protocol):
    """What the engine needs of a sampler."""

    def sample(
        self, logits: NDArray[np.float32] | DeviceLogits, sequences: Iterable[Sequence]
    ) -> list[Sample | MaskdialError]:
        """Chooses a token for each sequence, or says why there is none; no row spoils another.

        Args:
            logits: float32 (num_sequences, vocab_size); not changed.
            sequences: in the order of the logits' rows.
        """


class Sampler:
    """Chooses the next token of each sequence, on the host.

    Args:
        vocab_size: the length of the logits' rows.
        eos_token_ids: tokens that end a text; those that the logits do not cover are passed over.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = frozenset(t for t in eos_token_ids if t < vocab_size)
        self._random = Philox()

    def sample(
        self, logits: NDArray[np.float32] | DeviceLogits, sequences: Iterable[Sequence]
    ) -> list[Sample | MaskdialError]:
        """As `TokenSampler` says; logits of a device are copied to the host."""
        logits = np.asarray(logits)
        most_likely = logits.argmax(axis=-1).tolist()
        samples: list[Sample | MaskdialError] = []
        for row, sequence, first in zip(logits, sequences, most_likely, strict=True):
            try:
                samples.append(self._sample(row, sequence, first))
            except MaskdialError as error:
                samples.append(error)
        return samples

    def distribution(self, logits: NDArray[np.float32], sequence: Sequence) -> NDArray[np.float64]:
        """The probabilities that the next token is drawn with, float64 (vocab_size,).

        Args:
            logits: float32 (vocab_size,); not changed.
            sequence: to continue.

        Raises:
            MaskdialError: as `sample` would return.
        """
        scores, best = self._score(logits, sequence, int(logits.argmax()))
        probabilities = np.zeros(len(logits))
        if sequence.params.greedy:
            probabilities[best] = 1.0
        else:
            candidates = narrow(scores, scores[best], sequence.params)
            drawn = slice(None) if candidates.token_ids is None else candidates.token_ids
            probabilities[drawn] = candidates.weights
            probabilities /= probabilities.sum()
        return probabilities

    def _sample(self, logits: NDArray[np.float32], sequence: Sequence, most_likely: int) -> Sample:
        if not math.isfinite(logits[most_likely]):
            return Sample(most_likely, math.nan)
        try:
            softmax = Candidates.of(logits, logits[most_likely])
            scores, best = self._score(logits, sequence, most_likely)
            params = sequence.params
            if params.greedy:
                token_id = best
            else:
                unchanged = softmax if scores is logits else None
                candidates = narrow(scores, scores[best], params, unchanged)
                token_id = candidates.pick(
                    self._random.uniform(sequence.seed, sequence.num_generated)
                )
            top = _top(logits, softmax, params.top_n_tokens) if params.top_n_tokens else ()
            return Sample(token_id, softmax.logprob(token_id), top)
        except MaskdialError:
            raise
        except Exception as error:  # whatever it is, it concerns this sequence only
            _log.exception("sampling failed")
            raise GenerationError(f"no token could be chosen: {error!r}") from error

    def _score(
        self, logits: NDArray[np.float32], sequence: Sequence, most_likely: int
    ) -> tuple[NDArray[np.float32], int]:
        """What the token is chosen by, float32 (vocab_size,), and where its maximum is."""
        scores = process(logits, sequence, self._eos_token_ids)
        best = most_likely if scores is logits else int(scores.argmax())
        if not math.isfinite(scores[best]):
            raise GenerationError(
                "no token can be chosen: with its bias, penalties and grammar applied, the best "
                f"one scores {scores[best]}"
            )
        return scores, best


def _top(
    logits: NDArray[np.float32], softmax: Candidates, num_tokens: int
) -> tuple[tuple[int, float], ...]:
    token_ids = greatest_k(logits, min(num_tokens, len(logits)))
    best_first = np.argsort(-logits[token_ids], kind="stable")[:num_tokens]
    return tuple((i, softmax.logprob(i)) for i in token_ids[best_first].tolist())


def prompt_logprobs(logits: NDArray[np.float32], token_ids: NDArray[np.int64]) -> list[float]:
    """The natural log-probability of one token in each row, under the model's own distribution.

    Args:
        logits: float32 (num_tokens, vocab_size).
        token_ids: int64 (num_tokens,), each below vocab_size.

    Returns:
        One float a row, NaN where the logits are no numbers.
    """
    return [
        _logprob(row, token_id) for row, token_id in zip(logits, token_ids.tolist(), strict=True)
    ]


def _logprob(logits: NDArray[np.float32], token_id: int) -> float:
    greatest = logits.max()
    if not math.isfinite(greatest):
        return math.nan
    return Candidates.of(logits, greatest).logprob(token_id)
