"""Unmasking: the masks of texts are filled pass by pass, and each pass sees what was filled.

A pass gives logits for the masks that are left. Each gets a candidate, the likeliest token or a
drawn one, and the masks that the order puts first keep theirs. That is how masked diffusion models
write (LLaDA, arXiv:2502.09992; Dream, arXiv:2508.15487; with a threshold, Fast-dLLM,
arXiv:2505.22618); MaskGIT (arXiv:2202.04200) has the order by confidence.
"""

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maskdial.elementary import exp
from maskdial.engine.logits import largest_indices, summarize
from maskdial.engine.philox import Philox
from maskdial.kernels.logits import VocabularyKernels
from maskdial.unmasking.canvas import Allowed, Canvas, Draft, FilledToken

Order = Literal["confidence", "topk_margin", "entropy", "random", "left_to_right"]

_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Unmasking:
    """How masks are filled.

    Attributes:
        order: which masks a pass fills first. ``confidence``: those whose candidate is the most
            probable (LLaDA's ``low_confidence``, Dream's ``maskgit_plus``). ``topk_margin``: those
            whose likeliest token leads by most. ``entropy``: those whose distribution has the least
            entropy. Or the places of a text's blanks in the order to fill them.
        threshold: in place of a number of passes, a pass fills every mask whose candidate is at
            least so probable, and at least the first one.
        temperature: candidates are drawn from the softmax of the logits divided by it; 0 for the
            likeliest. Confidence is always the model's own probability.
        num_beams: fillings that a search follows; 1 for none.
    """

    order: Order | tuple[int, ...] = "confidence"
    threshold: float | None = None
    temperature: float = 0.0
    num_beams: int = 1

    @property
    def samples(self) -> bool:
        """Whether candidates are drawn."""
        return self.temperature >= _GREEDY_TEMPERATURE

    @property
    def knows_order(self) -> bool:
        """Whether the masks of a pass are known before it."""
        return self.threshold is None and self.order not in (
            "confidence",
            "topk_margin",
            "entropy",
        )

    def num_filled(self, num_masks: int, steps: int | None, step: int) -> int:
        """How many masks a pass fills.

        Args:
            num_masks: that there were before the first pass.
            steps: passes over which they are spread evenly; those that are left over go to the
                first ones (LLaDA's ``get_num_transfer_tokens``). None: as many as masks.
            step: the pass, counted from 0.
        """
        if self.threshold is not None:
            return num_masks
        steps = min(steps or num_masks, num_masks)
        return num_masks // steps + (step < num_masks % steps)


class Unmasker:
    """Fills masks of texts that are not done. Create one for each request.

    Args:
        unmasking: how.
        excluded: tokens that are never written unless a blank's words have them.
        kernels: for passes over rows of logits; None for NumPy.
    """

    def __init__(
        self,
        unmasking: Unmasking,
        excluded: Collection[int] = (),
        kernels: VocabularyKernels | None = None,
    ) -> None:
        self._how = unmasking
        self._excluded = np.fromiter(excluded, np.int64, len(excluded))
        self._excluded_ids = frozenset(excluded)
        self._kernels = kernels
        self._random = Philox()

    def positions(self, canvas: Canvas, draft: Draft) -> tuple[int, ...]:
        """The positions whose logits the next pass is asked for."""
        left = canvas.left(draft)
        if not self._how.knows_order:
            return left
        scores = [self._known_score(canvas, position) for position in left]
        first = np.argsort(-np.array(scores), kind="stable")[: self._num_filled(canvas)]
        return tuple(left[place] for place in sorted(first))

    def _num_filled(self, canvas: Canvas) -> int:
        steps = canvas.blocks[canvas.block].steps
        return self._how.num_filled(len(canvas.block_masks), steps, canvas.step_in_block)

    def _known_score(self, canvas: Canvas, position: int) -> float:
        """What the order says of a mask without a pass; greater is earlier."""
        order = self._how.order
        if order == "random":
            return self._uniform(canvas, position, 1)
        if order == "left_to_right":
            return -position
        assert isinstance(order, tuple), "the others are known after the pass only"
        place = next(at for at, blank in enumerate(canvas.blanks) if position in blank.positions)
        return -order.index(place)

    def _uniform(self, canvas: Canvas, position: int, stream: int) -> float:
        """A random number of a pass and a position; candidates and order have a stream each."""
        length = len(canvas.drafts[0].input_ids)
        return self._random.uniform(canvas.seed, 2 * (canvas.step * length + position) + stream)

    def grow(
        self, canvas: Canvas, draft: Draft, positions: tuple[int, ...], logits: NDArray[np.float32]
    ) -> Iterator[Draft]:
        """The drafts that a pass makes of one, as many as there are beams at most."""
        rows = dict(zip(positions, self._read(logits), strict=True))
        pool = [draft]
        for position in self._chosen(canvas, draft, rows):
            pool = self._best(
                partial.fill(token)
                for partial in pool
                for token in self._candidates(canvas, partial, position, rows[position])
            )
        yield from pool

    def _read(self, logits: NDArray[np.float32]) -> "Iterator[_Row]":
        """The rows of a text's logits."""
        for row, (best, log_total) in zip(logits, summarize(logits, self._kernels), strict=True):
            # Where the likeliest of all tokens may be written, no other one has to be found.
            known = None if best in self._excluded_ids else best
            yield _Row(row, log_total, self._excluded, known, self._kernels)

    def _chosen(self, canvas: Canvas, draft: Draft, rows: "dict[int, _Row]") -> list[int]:
        """The positions that a pass fills, the first one first."""
        positions = list(rows)
        likeliest = [
            next(self._candidates(canvas, draft, position, row)).logprob
            for position, row in rows.items()
        ]
        scores = [
            self._score(canvas, draft, position, row, logprob)
            for (position, row), logprob in zip(rows.items(), likeliest, strict=True)
        ]
        ranked = np.argsort(-np.array(scores), kind="stable")[: self._num_filled(canvas)]
        if self._how.threshold is not None:
            least = math.log(self._how.threshold) if self._how.threshold else -math.inf
            ranked = np.array(
                [place for at, place in enumerate(ranked) if at == 0 or likeliest[place] >= least]
            )
        return [positions[place] for place in ranked]

    def _score(
        self, canvas: Canvas, draft: Draft, position: int, row: "_Row", logprob: float
    ) -> float:
        """What the order says of a mask; greater is earlier."""
        order = self._how.order
        if order == "confidence":
            return logprob
        if order == "topk_margin":
            return row.margin(canvas.allowed(draft, position))
        if order == "entropy":
            return -row.entropy(canvas.allowed(draft, position))
        return self._known_score(canvas, position)

    def _candidates(
        self, canvas: Canvas, draft: Draft, position: int, row: "_Row"
    ) -> Iterator[FilledToken]:
        """The tokens that may fill a mask, best first: as many as there are beams, or one drawn."""
        allowed = canvas.allowed(draft, position)
        if self._how.samples:
            u = self._uniform(canvas, position, 0)
            tokens = [row.draw(allowed, self._how.temperature, u)]
        else:
            tokens = row.best(allowed, self._how.num_beams)
        for token in tokens:
            yield FilledToken(position, token, row.logprob(token), canvas.step)

    def _best(self, drafts: Iterable[Draft]) -> list[Draft]:
        """The likeliest drafts; two that have become the same text are one."""
        unique: dict[tuple[int, ...], Draft] = {}
        for draft in sorted(drafts, key=lambda draft: -draft.log_probability):
            unique.setdefault(draft.input_ids, draft)
        return list(unique.values())[: self._how.num_beams]

    def advance(self, canvas: Canvas, drafts: Iterable[Draft]) -> None:
        """Ends a pass over a text, which has made drafts of its own."""
        canvas.drafts = self._best(drafts)
        canvas.step += 1
        canvas.step_in_block += 1
        if not any(canvas.left(draft) for draft in canvas.drafts):
            canvas.block, canvas.step_in_block = canvas.block + 1, 0


class _Row:
    """The logits of one mask, and what may stand there: some tokens, or any but the excluded.

    ``log_total`` is the logarithm of the sum of all exponentials; ``likeliest`` the token that is
    written if any may be, where it is known.
    """

    def __init__(
        self,
        logits: NDArray[np.float32],
        log_total: float,
        excluded: NDArray[np.int64],
        likeliest: int | None,
        kernels: VocabularyKernels | None,
    ) -> None:
        self._logits = logits
        self._log_total = log_total
        self._excluded = excluded
        self._likeliest = likeliest
        self._kernels = kernels

    def logprob(self, token: int) -> float:
        """A token's log-probability under the softmax of all logits."""
        return float(self._logits[token]) - self._log_total

    def best(self, allowed: Allowed | None, num: int) -> list[int]:
        """The likeliest tokens, best first, ties by id."""
        if allowed is None and num == 1 and self._likeliest is not None:
            return [self._likeliest]
        values = self._values(allowed)
        if allowed is not None and allowed.fits is not None:
            ranked = (allowed.tokens[place] for place in np.argsort(-values, kind="stable"))
            return list(islice(filter(allowed.fits, ranked), num))
        if num == 1:
            places = [int(values.argmax())]
        else:
            kernels = self._kernels if allowed is None else None
            places = largest_indices(values, min(num, len(values)), kernels).tolist()
        return [self._token(place, allowed) for place in places if values[place] > -np.inf]

    def draw(self, allowed: Allowed | None, temperature: float, u: float) -> int:
        """The token at a share ``u`` of the tempered distribution, in the order of ids."""
        values = self._values(allowed).astype(np.float64)
        while True:
            weights = exp((values - values.max()) / temperature)
            heights = np.cumsum(weights)
            # Rounded up to the whole, u would be beyond the last token.
            place = int(np.searchsorted(heights, u * heights[-1], side="right"))
            place = min(place, int(np.searchsorted(heights, heights[-1])))
            token = self._token(place, allowed)
            if allowed is None or allowed.fits is None or allowed.fits(token):
                return token
            # Where u is within the token's share is as good a random number for the others.
            u = (u * heights[-1] - heights[place] + weights[place]) / weights[place]
            u, values[place] = min(max(u, 0.0), 1.0), -np.inf

    def margin(self, allowed: Allowed | None) -> float:
        """By how much the likeliest token leads the next one, in probability."""
        first, *second = (math.exp(self.logprob(token)) for token in self.best(allowed, 2))
        return first - sum(second)

    def entropy(self, allowed: Allowed | None) -> float:
        """-sum p log p over the tokens that may stand there, in nats."""
        values = self._values(allowed)
        logprobs = values[values > -np.inf].astype(np.float64) - self._log_total
        return float(-(exp(logprobs) * logprobs).sum())

    def _values(self, allowed: Allowed | None) -> NDArray[np.float32]:
        if allowed is not None:
            return self._logits[list(allowed.tokens)]
        written = self._logits.copy()
        written[self._excluded] = -np.inf
        return written

    @staticmethod
    def _token(place: int, allowed: Allowed | None) -> int:
        return place if allowed is None else allowed.tokens[place]
