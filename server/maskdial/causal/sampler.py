"""Sampler: logits to tokens, in plain numpy.

The processors and their order are those of transformers: repetition penalty, temperature, top-k,
top-p (`LogitsProcessor` and its subclasses). Rows are worked on one by one, so a row's token never
depends on what else is in the batch, not even in its last bit; only the argmax, which is exact,
runs over all rows at once.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.params import SamplingParams
from maskdial.causal.sequence import Sequence

_BLOCK = 512
_BIN_SHIFT = 18  # leaves 5 bits of mantissa: the weights of one bin differ by 3% at most


@dataclass(frozen=True, slots=True)
class Sample:
    """A chosen token and its natural log-probability under the model's own distribution.

    NaN says that the model's logits were no numbers, and the token means nothing.

    The log-probability is taken before penalties, temperature and truncation (vLLM's
    ``raw_logprobs``), so it is comparable between requests.
    """

    token_id: int
    logprob: float


def sample(logits: NDArray[np.float32], sequences: Iterable[Sequence]) -> list[Sample]:
    """Chooses the next token of each sequence.

    Args:
        logits: float32 (num_sequences, vocab_size); not changed.
        sequences: in the order of the logits' rows.
    """
    most_likely = logits.argmax(axis=-1).tolist()
    return [
        _sample_row(row, sequence, first)
        for row, sequence, first in zip(logits, sequences, most_likely, strict=True)
    ]


def _sample_row(logits: NDArray[np.float32], sequence: Sequence, most_likely: int) -> Sample:
    if not math.isfinite(logits[most_likely]):
        return Sample(most_likely, math.nan)
    params = sequence.params
    scores = logits
    if params.repetition_penalty != 1.0:
        scores = _penalize_repetition(logits, sequence.token_ids, params.repetition_penalty)
        most_likely = int(scores.argmax())
    if params.greedy:
        token_id = most_likely
    else:
        token_id = _draw(scores, params, uniform(sequence.seed, sequence.num_generated))
    return Sample(token_id, _logprob(logits, token_id))


def _penalize_repetition(
    logits: NDArray[np.float32], token_ids: NDArray[np.int64], penalty: float
) -> NDArray[np.float32]:
    scores = logits.copy()
    seen = logits[token_ids]
    factor = np.float32(penalty)
    scores[token_ids] = np.where(seen < 0, seen * factor, seen / factor)
    return scores


def _draw(scores: NDArray[np.float32], params: SamplingParams, u: float) -> int:
    candidates, weights = _candidates(scores, params)
    drawn = _pick(weights, u)
    return drawn if candidates is None else int(candidates[drawn])


def distribution(scores: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """The probabilities that a token is drawn from, float64 (vocab_size,).

    Args:
        scores: float32 (vocab_size,), after the repetition penalty.
        params: of a sequence that is not greedy.
    """
    candidates, weights = _candidates(scores, params)
    probabilities = np.zeros(len(scores))
    probabilities[slice(None) if candidates is None else candidates] = weights
    probabilities /= probabilities.sum()
    return probabilities


def _candidates(
    scores: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.intp] | None, NDArray[np.float32]]:
    """The tokens left to draw from (None: all of them) and their unnormalised probabilities."""
    scores = (scores - scores.max()) / np.float32(params.temperature)
    candidates = None
    if 0 < params.top_k < len(scores):
        candidates = _top(scores, params.top_k)
        scores = scores[candidates]
    weights = np.exp(scores)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights, params.top_p)
        weights = weights[nucleus]
        candidates = nucleus if candidates is None else candidates[nucleus]
    return candidates, weights


def _top(values: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """Where the k greatest values are, and those equal to the k-th."""
    kth = np.partition(values, len(values) - k)[len(values) - k]
    return np.flatnonzero(values >= kth)


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.intp]:
    """The smallest set of greatest weights that holds the share top_p (arXiv:1904.09751).

    Of equal weights the lower index comes first. Few weights are looked at twice and fewer sorted:
    those below (1 - top_p) of the mean cannot belong to the set, since all of them together weigh
    less than what is left out; the rest are put into bins of like size, by the leading bits of
    their floats, and only the bin in which the share is reached is sorted.
    """
    total = float(weights.sum(dtype=np.float64))
    target = top_p * total
    likely = np.flatnonzero(weights >= (1 - top_p) * total / len(weights))
    heavy = weights[likely]
    bins = (heavy.view(np.uint32) >> _BIN_SHIFT).astype(np.intp)
    mass_from_bin = np.bincount(bins, heavy)[::-1].cumsum()[::-1]
    edge = max(int(np.count_nonzero(mass_from_bin >= target)) - 1, 0)
    above, at_edge = np.flatnonzero(bins > edge), np.flatnonzero(bins == edge)
    at_edge = at_edge[np.argsort(-heavy[at_edge], kind="stable")]
    mass = heavy[above].sum(dtype=np.float64) + np.cumsum(heavy[at_edge], dtype=np.float64)
    num_needed = int(np.searchsorted(mass, target)) + 1
    nucleus: NDArray[np.intp] = likely[np.concatenate([above, at_edge[:num_needed]])]
    return nucleus


def _pick(weights: NDArray[np.float32], u: float) -> int:
    """The index that the share u, in [0, 1), of the weights' sum falls on.

    Sums blocks first and then walks one block: a running sum over a whole vocabulary takes several
    times as long.
    """
    starts = np.arange(0, len(weights), _BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    target = u * blocks[-1]
    block = int(np.searchsorted(blocks, target, side="right"))
    before = blocks[block - 1] if block else 0.0
    start = block * _BLOCK
    within = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    chosen = int(np.searchsorted(within, target - before, side="right"))
    if chosen < len(within):
        return start + chosen
    # The two sums differ by rounding: take the block's last token that has any weight.
    return start + int(np.flatnonzero(weights[start : start + _BLOCK])[-1])


def uniform(seed: int, index: int) -> float:
    """Random number ``index`` of a seed, in [0, 1), by Philox (Salmon et al., SC 2011).

    The generator is counter-based, so a number does not depend on the ones drawn before it.
    """
    bits = int(np.random.Philox(key=seed, counter=index).random_raw())
    return (bits >> 11) * 2.0**-53


def _logprob(logits: NDArray[np.float32], token_id: int) -> float:
    greatest = logits.max()
    total = np.exp(logits - greatest).sum(dtype=np.float64)
    return float(logits[token_id] - greatest) - float(np.log(total))
