"""Record: how often the draft tokens of one kind were right."""

_DECAY, _OVERALL_DECAY = 0.95, 0.98  # for each draft token
_FIRST_RATE = 0.5
_OVERALL_PRIOR_TESTS = 2.0
_MOST_AT_FIRST, _PRIOR_TESTS = 0.5, 2.0  # of what a text repeats, which others do not tell
_MODEL_PRIOR_TESTS = 8.0


class Rates:
    """How probable it is that a draft token is right: after one that was, and after another.

    Later draft tokens count more than earlier ones.

    Args:
        prior: what to take for these two at first.
        weight: how many draft tokens that counts for.
        decay: by which each one counts less after another.
    """

    __slots__ = ("_decay", "_right", "_tests")

    def __init__(self, prior: tuple[float, float], weight: float, decay: float) -> None:
        self._right = [weight * each for each in prior]
        self._tests = [weight, weight]
        self._decay = decay

    @classmethod
    def overall(cls) -> "Rates":
        """Those of all sequences."""
        return cls((_FIRST_RATE, _FIRST_RATE), _OVERALL_PRIOR_TESTS, _OVERALL_DECAY)

    def after(self, *, right: bool) -> float:
        """Of a draft token that follows one that was right, or another."""
        return self._right[right] / self._tests[right]

    def note(self, num_right: int, num_wrong: int, *, after_right: bool) -> None:
        """Takes in draft tokens, of which so many were right, and perhaps a wrong one; not none."""
        first = num_right > 0
        self._add(after_right, first, 1)
        self._add(True, num_right - first, num_right - first + (num_wrong if first else 0))

    def _add(self, level: bool, num_right: int, num_tests: int) -> None:
        if num_tests:
            kept = self._decay**num_tests
            self._right[level] = kept * self._right[level] + num_right
            self._tests[level] = kept * self._tests[level] + num_tests


class Record:
    """What became of a sequence's draft tokens of one kind.

    Args:
        overall: of all sequences' draft tokens of this kind, for a start.
        by_model: whether a model writes them, which is about as often right in one text as in
            another. What others repeat tells little of a text.
    """

    __slots__ = ("_after_right", "_overall", "_rates")

    def __init__(self, overall: Rates, *, by_model: bool = False) -> None:
        first, later = overall.after(right=False), overall.after(right=True)
        if by_model:
            self._rates = Rates((first, later), _MODEL_PRIOR_TESTS, _DECAY)
        else:
            prior = min(first, _MOST_AT_FIRST), min(later, _MOST_AT_FIRST)
            self._rates = Rates(prior, _PRIOR_TESTS, _DECAY)
        self._overall = overall
        self._after_right = False

    @property
    def first_rate(self) -> float:
        """How probable it is that the next draft token is right."""
        return self._rates.after(right=self._after_right)

    @property
    def rate(self) -> float:
        """How probable it is that one after right ones is right."""
        return self._rates.after(right=True)

    def note(self, num_right: int, num_wrong: int) -> None:
        """Takes in a draft of which so many tokens were right, and perhaps a wrong one."""
        if not (num_right or num_wrong):
            return
        for rates in (self._rates, self._overall):
            rates.note(num_right, num_wrong, after_right=self._after_right)
        self._after_right = not num_wrong

    def interrupt(self) -> None:
        """Takes in that there were no draft tokens: the next one follows none that was right."""
        self._after_right = False
