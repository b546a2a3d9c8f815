"""Record: how often the draft tokens of one kind were right."""

_DECAY = 0.95  # for each draft token
_PRIOR_TESTS = 1.0
LONGEST_PAUSE = 32


class Record:
    """What became of a sequence's draft tokens of one kind.

    Args:
        prior: share of right ones among those of other sequences.
    """

    def __init__(self, prior: float) -> None:
        self._hits, self._tests = _PRIOR_TESTS * prior, _PRIOR_TESTS
        self._pause = 0
        self.resume_at = 0
        """Tokens of the text from which on it is worth looking for draft tokens again."""
        self.untried: tuple[int, int] | None = None
        """A position, and the draft token for it that no pass verifies."""

    @property
    def rate(self) -> float:
        """How probable it is that a draft token after right ones is right."""
        return self._hits / self._tests

    def note(self, num_right: int, num_wrong: int) -> None:
        """Takes in what became of draft tokens."""
        kept = _DECAY ** (num_right + num_wrong)
        self._hits = kept * self._hits + num_right
        self._tests = kept * self._tests + num_right + num_wrong
        if num_right:
            self._pause = 0

    def pause(self, num_tokens: int) -> None:
        """Takes in that draft tokens did not pay, in a text of ``num_tokens`` tokens.

        As long as none is right, it pauses for more and more tokens.
        """
        self._pause = min(2 * self._pause + 1, LONGEST_PAUSE)
        self.resume_at = num_tokens + self._pause

    def wait(self, num_tokens: int, tokens: int) -> None:
        """Takes in that a text had no draft tokens: looking for some takes time as well."""
        self.resume_at = num_tokens + tokens
