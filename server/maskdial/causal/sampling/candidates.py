"""Candidates: the tokens to draw from, and how they are narrowed down.

The order is that of transformers: temperature, top-k, top-p, min-p, typical-p; `llama_chain` has
llama.cpp's. Each step works on what the one before it has left. Nothing here sorts a whole
vocabulary.
"""

import math

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sampling.params import SamplingParams

_BLOCK = 512
_MIN_GROUPS = 512
_SORT_LIMIT = 1024  # up to here, sorting all keys is faster than sorting them into bins first
_BIN_SHIFT = 18  # leaves 5 bits of mantissa: the floats of a bin differ by at most 3%
# ln(1e12). In a vocabulary of 100,000, tokens that are less likely than the likeliest by a larger
# factor weigh less, together, than the rounding of float32.
NEGLIGIBLE = 27.6
_BITS_OF_ONE = np.uint32(0x3F800000)
_MIN_LOG = np.float32(-1e4)


def _block_sums(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """The sum of each block of values; summing these up in float64 is fast and exact enough."""
    sums: NDArray[np.float32] = np.add.reduceat(values, np.arange(0, len(values), _BLOCK))
    return sums


def _sum(values: NDArray[np.float32]) -> float:
    return float(_block_sums(values).sum(dtype=np.float64))


class Candidates:
    """Tokens and their unnormalized probabilities.

    Attributes:
        token_ids: int64 (num_candidates,); None stands for the whole vocabulary.
        log: float32 (num_candidates,), natural logarithms of the weights, at most 0.
        weights: float32 (num_candidates,), proportional to the probabilities, at most 1.
        total: the sum of the weights.
    """

    __slots__ = ("_sums", "log", "token_ids", "total", "weights")

    def __init__(
        self,
        token_ids: NDArray[np.int64] | None,
        log: NDArray[np.float32],
        weights: NDArray[np.float32],
    ) -> None:
        self.token_ids = token_ids
        self.log = log
        self.weights = weights
        self._sums = _block_sums(weights)
        self.total = float(self._sums.sum(dtype=np.float64))

    @classmethod
    def of(
        cls,
        scores: NDArray[np.float32],
        greatest: np.float32,
        temperature: float = 1.0,
        token_ids: NDArray[np.int64] | None = None,
    ) -> "Candidates":
        """The softmax of scores (num_candidates,) whose maximum is known."""
        log = scores - greatest
        if temperature != 1.0:
            log /= np.float32(temperature)
        return cls(token_ids, log, np.exp(log))

    def __len__(self) -> int:
        return len(self.weights)

    def logprob(self, index: int) -> float:
        """The natural log-probability of the candidate at an index."""
        return float(self.log[index]) - math.log(self.total)

    def at(self, indices: NDArray[np.intp]) -> "Candidates":
        """The candidates at some indices, int64 (num_chosen,)."""
        token_ids = indices if self.token_ids is None else self.token_ids[indices]
        return Candidates(token_ids, self.log[indices], self.weights[indices])

    def pick(self, u: float) -> int:
        """Draws the token at which the cumulative share passes ``u``, in [0, 1); returns its id."""
        start, before, weights = 0, 0.0, self.weights
        target = u * self.total
        if len(self._sums) > 1:
            ends = np.cumsum(self._sums, dtype=np.float64)
            target = u * ends[-1]
            block = int(np.searchsorted(ends, target, side="right"))
            start = block * _BLOCK
            weights = weights[start : start + _BLOCK]
            before = ends[block - 1] if block else 0.0
        within = np.cumsum(weights, dtype=np.float64)
        index = int(np.searchsorted(within, target - before, side="right"))
        if index == len(within):
            # Rounding made the two sums differ: take the block's last token with any weight.
            index = int(np.flatnonzero(weights)[-1])
        return start + index if self.token_ids is None else int(self.token_ids[start + index])


def narrow(
    scores: NDArray[np.float32],
    greatest: np.float32,
    params: SamplingParams,
    softmax: Candidates | None = None,
) -> Candidates:
    """The candidates that temperature, top-k, top-p, min-p and typical-p leave.

    Args:
        scores: float32 (vocab_size,); a token with -inf is never drawn.
        greatest: the maximum score, finite.
        params: of a sequence that is not greedy.
        softmax: the softmax of the scores, if the caller has it.
    """
    if 0 < params.top_k < len(scores):  # before the temperature, which keeps the order
        token_ids = greatest_k(scores, params.top_k)
        candidates = Candidates.of(scores[token_ids], greatest, params.temperature, token_ids)
    else:
        candidates = _likely_enough(scores, greatest, params, softmax)
    if params.top_p < 1.0:
        candidates = candidates.at(nucleus(candidates, params.top_p))
    if params.min_p > 0.0:  # the likeliest token, whose weight is 1, is still there
        likely = candidates.weights >= np.float32(params.min_p)
        candidates = candidates.at(np.flatnonzero(likely))
    if params.typical_p < 1.0:
        candidates = candidates.at(typical(candidates, params.typical_p))
    return candidates


def _likely_enough(
    scores: NDArray[np.float32],
    greatest: np.float32,
    params: SamplingParams,
    softmax: Candidates | None,
) -> Candidates:
    """All tokens; if others are dropped later anyway, only those with a weight that matters."""
    if softmax is not None and params.temperature == 1.0:
        return softmax
    if params.top_p < 1.0 or params.min_p > 0.0 or params.typical_p < 1.0:
        likely = scores >= greatest - np.float32(NEGLIGIBLE * params.temperature)
        if np.count_nonzero(likely) <= len(scores) // 2:
            token_ids = np.flatnonzero(likely)
            return Candidates.of(scores[token_ids], greatest, params.temperature, token_ids)
    return Candidates.of(scores, greatest, params.temperature)


def greatest_k(values: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """The indices, int64, of the k greatest values and of those equal to the k-th, ascending.

    The k-th greatest maximum of disjoint groups is a lower bound of the k-th greatest value. Few
    values reach it, and only those are partitioned.
    """
    num_groups = max(4 * k, _MIN_GROUPS)
    group_size = len(values) // num_groups
    if group_size < 2:
        return np.flatnonzero(values >= _kth_greatest(values, k))
    groups = values[: group_size * num_groups].reshape(group_size, num_groups)
    passed = np.flatnonzero(values >= _kth_greatest(groups.max(axis=0), k))
    return passed[values[passed] >= _kth_greatest(values[passed], k)]


def _kth_greatest(values: NDArray[np.float32], k: int) -> np.float32:
    index = max(len(values) - k, 0)
    kth: np.float32 = np.partition(values, index)[index]
    return kth


def nucleus(candidates: Candidates, top_p: float) -> NDArray[np.intp]:
    """The nucleus: indices, int64, of the fewest greatest weights with top_p (arXiv:1904.09751).

    Of equal weights the lower index comes first. The indices ascend, so that a draw does not depend
    on how the set was found.
    """
    likely = _likely(candidates, top_p)
    weights = candidates.weights[likely]
    keys = _BITS_OF_ONE - weights.view(np.uint32)
    return np.sort(likely[_smallest_set(keys, weights, top_p * candidates.total)])


def _least_likely(share: float, total: float, num_tokens: int) -> float:
    """A weight of which all smaller ones together are less than (1 - share) of the total.

    It is (1 - share) of the mean. The greatest weights that hold the share are not below it.
    """
    # The greatest weight is 1, and rounding must not put the cut above it.
    return min((1 - share) * total / num_tokens, 1.0)


def _likely(candidates: Candidates, share: float) -> NDArray[np.intp]:
    """The indices of the weights that may be among the greatest ones that hold a share."""
    least = _least_likely(share, candidates.total, len(candidates))
    return np.flatnonzero(candidates.weights >= least)


def typical(candidates: Candidates, typical_p: float) -> NDArray[np.intp]:
    """The indices of the tokens whose information is nearest to the entropy (arXiv:2202.00666).

    Tokens are taken until they hold the share typical_p, with all that are as far as the last one.
    """
    weights, total = candidates.weights, candidates.total
    log = np.maximum(candidates.log, _MIN_LOG)  # 0 * -inf is NaN
    mean_log = _sum(weights * log) / total
    # A token's information is log(total) - log, and the entropy is log(total) - mean_log.
    distance = np.abs(log - np.float32(mean_log))
    entropy = math.log(total) - mean_log
    # The least information of the tokens that `_likely` drops. If that is at least twice the
    # entropy, they are farther from it than any other token and come last.
    information = math.log(len(candidates) / (1 - typical_p))
    if information >= 2 * entropy:
        near = _likely(candidates, typical_p)
        distance, weights = distance[near], weights[near]
    else:
        near = np.arange(len(candidates))
    keys = distance.view(np.uint32)
    return near[_smallest_set(keys, weights, typical_p * total, with_ties=True)]


def _smallest_set(
    keys: NDArray[np.uint32],
    weights: NDArray[np.float32],
    target: float,
    *,
    with_ties: bool = False,
) -> NDArray[np.intp]:
    """The indices of the smallest keys whose weights sum up to the target.

    Of equal keys the first are taken, or with ``with_ties`` all that equal the last one. Keys are
    the bits of non-negative floats, which sort as the floats do. Their leading bits put them into
    bins, and only the bin in which the target is reached is sorted.
    """
    if len(keys) <= _SORT_LIMIT:
        before, last = np.empty(0, np.intp), np.arange(len(keys))
    else:
        bins = (keys >> _BIN_SHIFT).astype(np.intp)
        bins -= bins.min()  # keeps the table of bins small
        mass = np.bincount(bins, weights).cumsum()
        last_bin = min(int(np.searchsorted(mass, target)), len(mass) - 1)
        before, last = np.flatnonzero(bins < last_bin), np.flatnonzero(bins == last_bin)
    last = _sorted_by(keys, last)
    reached = weights[before].sum(dtype=np.float64) + weights[last].cumsum(dtype=np.float64)
    num_needed = min(int(np.searchsorted(reached, target)) + 1, len(last))
    if with_ties:
        num_needed = int(np.searchsorted(keys[last], keys[last[num_needed - 1]], side="right"))
    return np.concatenate([before, last[:num_needed]])


def _sorted_by(keys: NDArray[np.uint32], indices: NDArray[np.intp]) -> NDArray[np.intp]:
    """Ascending indices, sorted by their keys; equal keys keep their order.

    Sorting keys and indices packed together takes a fifth of the time of a stable argsort.
    """
    packed = (keys[indices].astype(np.uint64) << np.uint64(32)) | indices.astype(np.uint64)
    packed.sort()
    return (packed & np.uint64(0xFFFFFFFF)).astype(np.intp)
