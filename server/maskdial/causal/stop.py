"""StopMatcher: stop strings in text that arrives in pieces; and the reasoning that has none."""

from collections.abc import Sequence
from dataclasses import dataclass


class StopMatcher:
    """Releases text up to the first completed stop string, however the text is split into pieces.

    The stop string that is completed first wins; of several completed by one character, the
    longest. The cost per character does not depend on the length of the stop strings (Knuth, Morris
    and Pratt 1977, "Fast Pattern Matching in Strings").

    Args:
        stops: non-empty strings.
        include: whether the stop string itself is released (as text-generation-inference does) or
            cut off (as OpenAI does). If it is cut off, text that may still become a stop string is
            held back.

    Attributes:
        found: the stop string that won; None before that.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._candidates = [_Candidate(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.found: str | None = None

    @property
    def matched(self) -> bool:
        """Whether a stop string was completed."""
        return self.found is not None

    def push(self, text: str) -> str:
        """Takes the next piece and returns the text to release; empty after a match."""
        if not self._candidates:
            return text
        if self.matched:
            return ""
        num_undecided = len(self._held)
        known = self._held + text
        for end, letter in enumerate(text, len(self._held) + 1):
            num_undecided = 0
            completed = ""
            for candidate in self._candidates:
                candidate.advance(letter)
                num_undecided = max(num_undecided, candidate.num_matched)
                if candidate.completed:
                    completed = max(completed, candidate.stop, key=len)
            if completed:
                self.found = completed
                return known[: end if self._include else end - len(completed)]
        num_released = len(known) - (0 if self._include else num_undecided)
        self._held = known[num_released:]
        return known[:num_released]

    def flush(self) -> str:
        """The text that is still held back, for the end of the text."""
        return "" if self.matched else self._held


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks around the reasoning that a text may begin with.

    ``opened``: the text begins within it. After ``budget`` tokens of it, the tokens ``closing``
    follow, which spell the closing mark; None for any number.

    ``header`` are texts that come in this order behind the reasoning, or at once where there is
    none, before any text of the answer. What stands between them is no text of it, either.
    """

    begin: str
    end: str
    opened: bool
    budget: int | None = None
    closing: tuple[int, ...] = ()
    header: tuple[str, ...] = ()


class ReasoningGate:
    """Divides text that arrives in pieces into its reasoning and what follows.

    Args:
        reasoning: None for texts without any.
    """

    def __init__(self, reasoning: Reasoning | None) -> None:
        self._reasoning = reasoning
        self._opened = reasoning is not None and reasoning.opened
        self._marks: list[str] | None = None
        """What has to come before the answer; None while the reasoning may begin."""
        if reasoning is not None and reasoning.opened:
            self._marks = [reasoning.end, *reasoning.header]
        self._text = ""
        """What may become a mark: the text before it is decided, or the reasoning's end."""
        self._num_tokens = 0
        self._num_closing = 0

    @property
    def closing(self) -> int | None:
        """The next token of the closing mark, once the budget is spent; None for any token.

        The mark is written once: a tokenizer may spell it in another way in this place.
        """
        reasoning = self._reasoning
        if reasoning is None or not self._opened or reasoning.budget is None:
            return None
        if self._num_tokens < reasoning.budget or self._num_closing == len(reasoning.closing):
            return None
        return reasoning.closing[self._num_closing]

    def push_token(self, text: str) -> tuple[str, str]:
        """`push` of a token's text, which counts."""
        is_closing = self.closing is not None
        pieces = self.push(text)
        if is_closing:
            self._num_closing += 1
        elif self._opened:
            self._num_tokens += 1
        return pieces

    def push(self, text: str) -> tuple[str, str]:
        """Takes the next piece; returns what is reasoning, its marks included, and what is not.

        The beginning of a text is held back while it may become the mark.
        """
        if self._reasoning is None:
            return "", text
        self._text += text
        if self._marks is None:
            begin = self._reasoning.begin
            start = self._text.lstrip()
            if len(start) < len(begin) and begin.startswith(start):
                return "", ""
            text = self._text
            self._marks = [*self._reasoning.header]
            if start.startswith(begin):
                self._opened = True
                self._marks.insert(0, self._reasoning.end)
                self._text = start.removeprefix(begin)
        while self._marks:
            before, found, rest = self._text.partition(self._marks[0])
            if not found:
                self._text = before[-len(self._marks[0]) :]
                return text, ""
            self._opened = False  # the first mark is its end, if there is any
            self._marks.pop(0)
            self._text = rest
        rest = self._leave()
        return text.removesuffix(rest), rest

    def flush(self) -> str:
        """The text that is still held back, for the end of the text."""
        return "" if self._marks is not None else self._leave()

    def _leave(self) -> str:
        held, self._text, self._reasoning = self._text, "", None
        return held


class _Candidate:
    """A stop string, and the length of its longest prefix that the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._borders = _borders(stop)
        self.num_matched = 0

    @property
    def completed(self) -> bool:
        return self.num_matched == len(self.stop)

    def advance(self, letter: str) -> None:
        while self.num_matched and self.stop[self.num_matched] != letter:
            self.num_matched = self._borders[self.num_matched - 1]
        self.num_matched += self.stop[self.num_matched] == letter


def _borders(stop: str) -> list[int]:
    """For each prefix of the string, the length of its longest border.

    A border is a shorter prefix that is also a suffix: the failure function of the algorithm.
    """
    borders = [0]
    length = 0
    for letter in stop[1:]:
        while length and stop[length] != letter:
            length = borders[length - 1]
        length += stop[length] == letter
        borders.append(length)
    return borders
