"""Denoiser: writes canvases of tokens, in passes that may change every token of a canvas.

A canvas begins as tokens drawn uniformly from the vocabulary. Each pass divides its logits by a
temperature, which falls from pass to pass, and draws a token at each position. The positions of the
least entropy are accepted as long as the entropies of those before them sum up to no more than a
bound (Ben-Hamu et al. 2025, arXiv:2505.24857); at all others the next pass finds noise again. A
canvas is finished when its most probable tokens are those of the passes before and its mean entropy
is small, or after a number of passes; these tokens are what is kept. That is `generate` of
DiffusionGemma in transformers.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Denoising
from maskdial.engine.philox import Philox
from maskdial.errors import InferenceError

_DRAWN, _NOISE, _FIRST_NOISE = range(3)
"""Streams of random numbers. Those of a pass have the indices pass * canvas_length + position, the
first noise of a canvas canvas * canvas_length + position.
"""


@dataclass(frozen=True, slots=True)
class _Row:
    """What a pass says of one position: its most probable token and a drawn one, and the entropy in
    nats of what it was drawn from.
    """

    best: int
    drawn: int
    entropy: float


class Denoiser:
    """Writes one canvas after the other. Create one for each text.

    Args:
        how: the model's settings.
        vocab_size: of the model.
        steps: passes of a canvas at most; None for the model's.
        seed: of the random numbers.

    Attributes:
        tokens: the canvas as the next pass reads it.
        soft: what it reads beside the tokens, float32 (canvas_length, hidden_size).
        num_passes: that were made for all canvases.
        num_canvases: that are finished.
        best: the most probable token of each position in the last pass.
        logprobs: of a finished canvas, their log-probabilities in that pass, without a temperature.
        finished: whether the canvas is; `begin` then begins the next one.
    """

    def __init__(self, how: Denoising, vocab_size: int, steps: int | None, seed: int) -> None:
        self._how = how
        self._vocab_size = vocab_size
        self._steps = steps or how.steps
        self._seed = seed
        self._random = Philox()
        self.num_passes = self.num_canvases = 0
        self.begin()

    def begin(self) -> None:
        """Begins a canvas: noise, and nothing beside it."""
        first = self.num_canvases * self._how.canvas_length
        self.tokens = [
            self._noise(first + place, _FIRST_NOISE) for place in range(self._how.canvas_length)
        ]
        self.soft = np.zeros((self._how.canvas_length, self._how.hidden_size), np.float32)
        self.best: list[int] = []
        self.logprobs: list[float] = []
        self.finished = False
        self._left = self._steps
        # The most probable tokens of the passes before
        self._found: deque[list[int]] = deque(maxlen=self._how.stability_threshold)

    @property
    def temperature(self) -> float:
        """The temperature at which the next pass draws."""
        how = self._how
        return how.t_min + (how.t_max - how.t_min) * (self._left / self._steps)

    def advance(self, output: NDArray[np.float32]) -> None:
        """Takes in the output of a denoising step, and draws the canvas of the next one.

        Args:
            output: the graph's, (canvas_length, vocab_size + hidden_size).

        Raises:
            InferenceError: it is not finite.
        """
        first = self.num_passes * self._how.canvas_length
        temperature = self.temperature
        rows = [
            self._read(row[: self._vocab_size], temperature, first + place)
            for place, row in enumerate(output)
        ]
        accepted = self._accepted([row.entropy for row in rows])
        self.tokens = [
            row.drawn if place in accepted else self._noise(first + place, _NOISE)
            for place, row in enumerate(rows)
        ]
        self.soft = np.ascontiguousarray(output[:, self._vocab_size :])
        self.best = [row.best for row in rows]
        self.num_passes += 1
        self._left -= 1
        confident = np.mean([row.entropy for row in rows]) < self._how.confidence_threshold
        self.finished = (self._is_stable() and bool(confident)) or not self._left
        if self.finished:
            self.num_canvases += 1
            self.logprobs = [
                -math.log(np.exp(row - row.max()).sum(dtype=np.float64))
                for row in output[:, : self._vocab_size]
            ]

    def _read(self, logits: NDArray[np.float32], temperature: float, index: int) -> _Row:
        best = int(logits.argmax())
        with np.errstate(invalid="ignore"):  # infinities are caught below
            values = (logits - logits[best]) / np.float32(temperature)
            weights = np.exp(values)
        heights = np.cumsum(weights, dtype=np.float64)
        total = float(heights[-1])
        if not np.isfinite(total):
            raise InferenceError("the model returned logits that are not finite numbers")
        u = self._random.uniform(self._seed, index, _DRAWN)
        # Rounded up to the whole, u would be beyond the last token.
        drawn = int(np.searchsorted(heights, u * total, side="right"))
        drawn = min(drawn, int(np.searchsorted(heights, total)))
        mean = np.multiply(weights, values).sum(dtype=np.float64) / total
        entropy = float(math.log(total) - mean)
        return _Row(best, drawn, entropy)

    def _accepted(self, entropies: list[float]) -> frozenset[int]:
        """The positions that keep what was drawn."""
        order = np.argsort(entropies, kind="stable")
        ascending = np.array(entropies)[order]
        before = np.cumsum(ascending) - ascending
        return frozenset(order[before <= self._how.entropy_bound].tolist())

    def _is_stable(self) -> bool:
        """Whether the last pass found what those before it did, as many as the model asks for."""
        found = self._found
        stable = len(found) == found.maxlen and all(each == self.best for each in found)
        found.append(self.best)
        return stable

    def _noise(self, index: int, stream: int) -> int:
        return int(self._random.uniform(self._seed, index, stream) * self._vocab_size)
