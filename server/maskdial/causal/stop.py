"""Stop strings, found in text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Releases text up to the first completed stop string, however the text is cut into pieces.

    The first to be *completed* wins; of those completed by the same character, the longest. A
    character costs the same however long the stop strings are (Knuth, Morris and Pratt 1977).

    Args:
        stops: non-empty strings.
        include: whether the stop string itself is released, as text-generation-inference does, or
            cut off, as OpenAI does. When it is cut off, text that may still become one is held
            back.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._candidates = [_Candidate(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Takes the next piece and returns what may be shown now; nothing once it matched."""
        if self.matched:
            return ""
        num_undecided = len(self._held)
        known = self._held + text
        for end, letter in enumerate(text, len(self._held) + 1):
            num_undecided = num_completed = 0
            for candidate in self._candidates:
                candidate.advance(letter)
                num_undecided = max(num_undecided, candidate.num_matched)
                if candidate.completed:
                    num_completed = max(num_completed, candidate.num_matched)
            if num_completed:
                self.matched = True
                return known[: end if self._include else end - num_completed]
        num_shown = len(known) - (0 if self._include else num_undecided)
        self._held = known[num_shown:]
        return known[:num_shown]

    def flush(self) -> str:
        """The text held back, now that no more will come."""
        return "" if self.matched else self._held


class _Candidate:
    """A stop string, and how many of its characters the text ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.num_matched = 0

    @property
    def completed(self) -> bool:
        return self.num_matched == len(self._stop)

    def advance(self, letter: str) -> None:
        while self.num_matched and self._stop[self.num_matched] != letter:
            self.num_matched = self._borders[self.num_matched - 1]
        self.num_matched += self._stop[self.num_matched] == letter


def _borders(stop: str) -> list[int]:
    """For each beginning of the string, the length of its longest border.

    A border is a shorter beginning of the string that is also the ending of this one.
    """
    borders = [0]
    length = 0
    for letter in stop[1:]:
        while length and stop[length] != letter:
            length = borders[length - 1]
        length += stop[length] == letter
        borders.append(length)
    return borders
