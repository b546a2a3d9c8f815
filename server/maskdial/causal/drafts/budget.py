"""How many draft tokens pay: the cost of a pass by its rows, and what each draft may gain."""

from collections.abc import Sequence

_DECAY = 0.98
_PRIOR_SHARE = 0.06
_PRIOR_WEIGHT = 8.0
_OUTLIER = 4.0
_MARGIN = 1.15
_SHORTEST = 1e-9  # seconds


class PassCosts:
    """What a row more adds to the time of a pass: a line through the latest passes' times.

    Two sums over rows and times are kept, in which older passes count less and less, so the line
    follows the load, the lengths of the texts, and how many run. Until passes of different sizes
    have been seen, a row is taken to cost 6% of a pass.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = 0.0  # weighted means, variance and covariance
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """Takes in a pass, with all that was done for it."""
        if self._weight:
            # A pass that was interrupted says nothing of its rows.
            seconds = min(seconds, _OUTLIER * self.seconds(num_rows))
        self._weight = _DECAY * self._weight + 1.0
        share = 1.0 / self._weight
        rows, late = num_rows - self._rows, seconds - self._seconds
        self._rows += share * rows
        self._seconds += share * late
        self._variance = (1 - share) * (self._variance + share * rows * rows)
        self._covariance = (1 - share) * (self._covariance + share * rows * late)

    @property
    def seconds_per_row(self) -> float:
        """The slope of the line."""
        prior = _PRIOR_SHARE * self._seconds
        weight = _PRIOR_WEIGHT / max(self._weight, 1.0)
        slope = (self._covariance + weight * prior) / (self._variance + weight)
        return max(slope, 0.01 * self._seconds)

    def seconds(self, num_rows: int) -> float:
        """The expected time of a pass; 0 before the first one."""
        expected = self._seconds + self.seconds_per_row * (num_rows - self._rows)
        return max(expected, self.seconds_per_row * num_rows)


def choose(
    rates: Sequence[float],
    limits: Sequence[int],
    costs: PassCosts,
    num_rows: int,
    most: int,
    extra: Sequence[float] = (),
) -> list[int]:
    """The number of draft tokens for each sequence that gives the most tokens per second.

    The draft token after i others is right with the i-th power of its rate. They are added from
    those on that gain most for their time, as long as each one adds a larger share to the tokens of
    the pass than to its time.

    Args:
        rates: of each sequence, how probable it is that a draft token after right ones is right.
        limits: of each sequence, the number of draft tokens there are.
        costs: of the model's passes.
        num_rows: tokens of the pass without drafts.
        most: draft tokens of a pass.
        extra: of each sequence, what a draft token takes to make, in seconds. Default: nothing.
    """
    sizes = [0] * len(limits)
    per_row, beside = costs.seconds_per_row, extra or (0.0,) * len(limits)
    gains = sorted(
        (
            (rate ** (depth + 1) / max(per_row + more, _SHORTEST), -depth, index, per_row + more)
            for index, (rate, limit, more) in enumerate(zip(rates, limits, beside, strict=True))
            for depth in range(limit)
        ),
        reverse=True,
    )
    tokens, seconds = float(len(limits)), costs.seconds(num_rows)
    for gain_per_second, _, index, cost in gains[:most]:
        if gain_per_second * seconds <= _MARGIN * tokens:
            break
        tokens += gain_per_second * cost
        seconds += cost
        sizes[index] += 1
    return sizes
