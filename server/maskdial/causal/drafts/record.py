"""Record: how often the draft tokens of one kind were right."""

_DECAY = 0.85  # for each draft token
_PRIOR_TESTS = 1.0
_LONGEST_PAUSE = 32
_LONGEST_WAIT = 3


class Record:
    """What became of a sequence's draft tokens of one kind.

    Args:
        prior: share of right ones among those of other sequences.
    """

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._hits = self._tests = 0.0
        self._pause = self._wait = 0
        self.resume_at = 0
        """Tokens of the text from which on it is worth looking for draft tokens again."""
        self.untried: tuple[int, int] | None = None
        """A position, and the draft token for it that no pass verifies."""

    @property
    def rate(self) -> float:
        """How probable it is that a draft token after right ones is right."""
        return (self._hits + _PRIOR_TESTS * self._prior) / (self._tests + _PRIOR_TESTS)

    def note(self, num_right: int, num_wrong: int, num_tokens: int) -> None:
        """Takes in what became of draft tokens; a text of ``num_tokens`` tokens goes on.

        After wrong ones, it pauses for more and more tokens.
        """
        kept = _DECAY ** (num_right + num_wrong)
        self._hits = kept * self._hits + num_right
        self._tests = kept * self._tests + num_right + num_wrong
        self._pause = 0 if num_right else min(2 * self._pause + 1, _LONGEST_PAUSE)
        self._wait = 0
        self.resume_at = num_tokens + self._pause

    def note_none(self, num_tokens: int) -> None:
        """Takes in that a text had no draft tokens: looking for some takes time as well."""
        self._wait = min(self._wait + 1, _LONGEST_WAIT)
        self.resume_at = num_tokens + self._wait
