"""llama.cpp's chain of samplers: the candidates that it leaves of a row of scores.

Its order is top-n-sigma, top-k, typical-p, top-p, min-p, XTC, and the temperature last.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sampling.candidates import (
    NEGLIGIBLE,
    Candidates,
    greatest_k,
    nucleus,
    typical,
)
from maskdial.causal.sampling.params import SamplingParams
from maskdial.elementary import log

_NEVER = np.float32(-math.inf)
FindGreatest = Callable[[NDArray[np.float32], int], NDArray[np.int64]]


def narrow_as_llama(
    scores: NDArray[np.float32],
    greatest: np.float32,
    params: SamplingParams,
    chance: float,
    find_greatest: FindGreatest = greatest_k,
) -> Candidates:
    """The candidates that llama.cpp's samplers leave, with the weights that they are drawn by.

    Args:
        scores: float32 (vocab_size,); a token with -inf is never drawn.
        greatest: the maximum score, finite.
        params: of a sequence that is not greedy.
        chance: a random number in [0, 1), which decides whether XTC applies.
        find_greatest: finds the tokens with the k greatest scores, ascending.
    """
    if params.top_n_sigma > 0:
        scores = _near_the_greatest(scores, greatest, params.top_n_sigma)
    narrows = params.typical_p < 1.0 or params.top_p < 1.0 or params.min_p > 0.0
    size = len(scores)
    if 0 < params.top_k < size:
        token_ids = find_greatest(scores, params.top_k)
        candidates = Candidates.of(scores[token_ids], greatest, token_ids=token_ids)
        size = params.top_k
    elif narrows:  # which leaves none of those that are negligible
        token_ids = np.flatnonzero(scores >= greatest - np.float32(NEGLIGIBLE))
        candidates = Candidates.of(scores[token_ids], greatest, token_ids=token_ids)
    else:
        candidates = Candidates.of(scores, greatest)
    if params.typical_p < 1.0:
        candidates = _rescaled(candidates.at(typical(candidates, params.typical_p)))
    if params.top_p < 1.0:
        candidates = candidates.at(nucleus(candidates, params.top_p))
    if params.min_p > 0.0:
        likely = candidates.weights >= np.float32(params.min_p)
        candidates = candidates.at(np.flatnonzero(likely))
    if narrows:
        size = len(candidates)
    if params.excludes_top_choices and chance <= params.xtc_probability:
        num_before = len(candidates)
        candidates = _without_top_choices(candidates, params.xtc_threshold)
        size -= num_before - len(candidates)
    return _at_temperature(candidates, size, params)


def _near_the_greatest(
    scores: NDArray[np.float32], greatest: np.float32, num_deviations: float
) -> NDArray[np.float32]:
    """Top-n-sigma (arXiv:2411.07641): the scores at most so many standard deviations below the
    greatest; others become -inf.
    """
    possible = scores[scores > _NEVER]
    least = float(greatest) - num_deviations * float(possible.std(dtype=np.float64))
    return np.where(scores >= least, scores, _NEVER)


def _without_top_choices(candidates: Candidates, threshold: float) -> Candidates:
    """XTC (text-generation-webui's pull request 6335): of those that have at least the threshold's
    probability, only the least likely one, and all others.
    """
    shares = candidates.weights / np.float32(candidates.total)
    above = np.flatnonzero(shares >= np.float32(threshold))
    if len(above) < 2:
        return candidates
    kept = np.ones(len(candidates), np.bool_)
    kept[above] = False
    kept[above[::-1][shares[above][::-1].argmin()]] = True  # of equal ones the last
    return _rescaled(candidates.at(np.flatnonzero(kept)))


def _at_temperature(candidates: Candidates, size: int, params: SamplingParams) -> Candidates:
    """The candidates at the temperature, or at a dynamic one by their entropy (EBLT).

    Args:
        candidates: the likeliest weighs 1.
        size: how many llama.cpp counts, whose entropy is at most the logarithm of it.
        params: which temperature, and how far it may be from it.
    """
    temperature, spread = params.temperature, params.dynatemp_range
    if spread > 0.0:
        if size < 2:
            return candidates
        shares = candidates.weights.astype(np.float64) / candidates.total
        shares = shares[shares > 0]
        entropy = max(float(-(shares * log(shares)).sum()) / math.log(size), 0.0)
        lowest = max(temperature - spread, 0.0)
        temperature += spread
        temperature = lowest + (temperature - lowest) * entropy**params.dynatemp_exponent
        if temperature <= 0.0:
            return candidates.at(np.array([candidates.log.argmax()]))
    if temperature == 1.0:
        return candidates
    return Candidates.of(candidates.log, np.float32(0), temperature, candidates.token_ids)


def _rescaled(candidates: Candidates) -> Candidates:
    """The same candidates; the likeliest weighs 1."""
    return Candidates.of(candidates.log, candidates.log.max(), token_ids=candidates.token_ids)
