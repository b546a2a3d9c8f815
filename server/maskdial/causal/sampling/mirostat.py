"""Mirostat: draws that keep a text's surprise near a target (Mirostat 2.0, arXiv:2007.14966)."""

import math

import numpy as np
from numpy.typing import NDArray

from maskdial.causal.sampling.candidates import Candidates

_LN_2 = math.log(2)


class Mirostat:
    """A sequence's state between its tokens, as in llama.cpp (`llama_sampler_mirostat_v2_apply`).

    Args:
        target: the surprise to keep to, in bits (tau).
        rate: how fast the limit follows it (eta).

    Attributes:
        limit: tokens with more surprise, in bits, are not drawn (mu).
    """

    def __init__(self, target: float, rate: float) -> None:
        self._target = target
        self._rate = rate
        self.limit = 2 * target

    def candidates(
        self, scores: NDArray[np.float32], greatest: np.float32, temperature: float
    ) -> Candidates:
        """The tokens whose surprise is within the limit; at least the likeliest.

        Args:
            scores: float32 (vocab_size,); a token with -inf is never drawn.
            greatest: the maximum score, finite.
            temperature: divides the scores.
        """
        softmax = Candidates.of(scores, greatest, temperature)
        surprise = (math.log(softmax.total) - softmax.log) / np.float32(_LN_2)
        within = np.flatnonzero(surprise <= self.limit)
        return softmax.at(within if len(within) else np.array([softmax.log.argmax()]))

    def observe(self, logprob: float) -> None:
        """Moves the limit after a draw.

        Args:
            logprob: the natural log-probability of the drawn token among the candidates.
        """
        self.limit -= self._rate * (-logprob / _LN_2 - self._target)

    def draw(
        self, scores: NDArray[np.float32], greatest: np.float32, temperature: float, u: float
    ) -> int:
        """Draws one of the candidates by ``u``, a float in [0, 1), and moves the limit."""
        candidates = self.candidates(scores, greatest, temperature)
        token_id = candidates.pick(u)
        assert candidates.token_ids is not None, "they are some of the vocabulary"
        self.observe(candidates.logprob(int(np.searchsorted(candidates.token_ids, token_id))))
        return token_id
