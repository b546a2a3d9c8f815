"""How many draft tokens pay: the cost of a pass by its rows, and what each draft may gain."""

import heapq
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

_DECAY = 0.98
_MOST_WEIGHT = 30.0  # passes
_PRIOR_SHARE = 0.04
_PRIOR_WEIGHT = 4.0
_OUTLIER = 2.0
_MARGIN = 1.05
_SHORTEST = 1e-9  # seconds

# The CPU time of the engine's thread, since what interrupts a pass says nothing of its rows.
# Windows counts it in steps of 16 ms.
pass_clock = time.perf_counter if sys.platform == "win32" else time.thread_time


@dataclass(slots=True)
class _Mean:
    """The latest passes of one number of rows without drafts: their draft rows and their times."""

    weight: float = 0.0
    drafts: float = 0.0
    seconds: float = 0.0


class PassCosts:
    """What a draft token adds to the time of a pass, and the time of a pass without any.

    A text's row costs more than a draft token, as it brings a cache of its own. So passes are
    compared with those that have as many rows beside the drafts: for each number of rows the mean
    time and the mean number of draft tokens are kept, and one slope for all of them (least squares
    within groups). Older passes count less and less, so it follows the load and the lengths of the
    texts. Until passes with different numbers of draft tokens have been seen, a token is taken to
    cost 4% of a pass with one row.
    """

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self._variance = self._covariance = 0.0
        self._prior = 0.0

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """Takes in a pass of so many rows, and draft tokens beside them, and its time."""
        mean = self._means.setdefault(num_rows, _Mean())
        if mean.weight:
            # A pass that was interrupted says nothing of its rows.
            seconds = min(seconds, _OUTLIER * self.seconds(num_rows, num_drafts))
        mean.weight = min(mean.weight + 1.0, _MOST_WEIGHT)
        share = 1.0 / mean.weight
        drafts, late = num_drafts - mean.drafts, seconds - mean.seconds
        mean.drafts += share * drafts
        mean.seconds += share * late
        self._variance = _DECAY * self._variance + (1 - share) * drafts * drafts
        self._covariance = _DECAY * self._covariance + (1 - share) * drafts * late
        rows = num_rows - 1 + mean.drafts
        self._prior = _PRIOR_SHARE * mean.seconds / (1 + _PRIOR_SHARE * rows)

    @property
    def seconds_per_draft(self) -> float:
        """What one more draft token takes."""
        slope = self._covariance + _PRIOR_WEIGHT * self._prior
        return max(slope / (self._variance + _PRIOR_WEIGHT), 0.1 * self._prior)

    def seconds(self, num_rows: int, num_drafts: int = 0) -> float:
        """The expected time of a pass; 0 before the first one."""
        if not self._means:
            return 0.0
        nearest, mean = num_rows, self._means.get(num_rows)
        if mean is None:
            nearest, mean = min(self._means.items(), key=lambda each: abs(each[0] - num_rows))
        per_row = self.seconds_per_draft
        expected = mean.seconds + per_row * (num_rows - nearest + num_drafts - mean.drafts)
        return max(expected, per_row * (num_rows + num_drafts))


def choose(
    rates: Sequence[float],
    limits: Sequence[int],
    costs: PassCosts,
    num_rows: int,
    most: int,
    extra: Sequence[float],
) -> list[int]:
    """The number of draft tokens for each sequence that gives the most tokens per second.

    The draft token after i others is right with the i-th power of its rate. They are added from
    those on that gain most for their time, as long as each one adds a larger share to the tokens of
    the pass than to its time.

    Args:
        rates: of each sequence, how probable it is that a draft token after right ones is right.
        limits: of each sequence, the number of draft tokens there are.
        costs: of the model's passes.
        num_rows: tokens of the pass without drafts, at least one for each sequence.
        most: draft tokens of a pass.
        extra: of each sequence, what a draft token takes to make, in seconds.
    """
    sizes = [0] * len(limits)
    per_draft = costs.seconds_per_draft
    prices = [max(per_draft + more, _SHORTEST) for more in extra]
    # The next draft token of each sequence, the one that gains most for its time first.
    nexts = [(-rates[i] / prices[i], i) for i, limit in enumerate(limits) if limit]
    heapq.heapify(nexts)
    tokens, seconds = float(len(limits)), costs.seconds(num_rows)
    for _ in range(most):
        if not nexts:
            break
        gain, i = nexts[0]
        if -gain * seconds <= _MARGIN * tokens:
            break
        tokens -= gain * prices[i]
        seconds += prices[i]
        sizes[i] += 1
        if sizes[i] < limits[i]:
            heapq.heapreplace(nexts, (gain * rates[i], i))
        else:
            heapq.heappop(nexts)
    return sizes
