"""Windows: which parts of a growing text a model reads, and how far the text is read then.

Where a window begins and ends depends on the words of the text only, never on how it arrives. So a
text that comes token by token is read in the same windows as the whole of it, gets the same
verdicts, and none of its characters passes before its verdict is known.
"""

import abc
import re
from dataclasses import dataclass

# A character of a script that is written without spaces is a word of its own.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")
_ALONE = re.compile(f"[{_UNSPACED}]")
_SENTENCE_END = re.compile(r"""[.!?\u3002\uff01\uff1f]["')\]]*$""")


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a text that a model reads at once.

    Attributes:
        start: its first character in the text.
        end: the character behind it.
        core: the first character that no window before it is about.
        cleared: how far the text is read with it; white space behind its last word is not.
    """

    start: int
    end: int
    core: int
    cleared: int


class Words:
    """The words of a text that grows.

    Attributes:
        text: so far.
        spans: first character and end of each word that is complete.
        ended: whether the text is.
    """

    def __init__(self) -> None:
        self.text = ""
        self.spans: list[tuple[int, int]] = []
        self.ended = False
        self._scanned = 0

    def add(self, text: str) -> None:
        """Takes what the text goes on with."""
        self.text += text
        for match in _WORD.finditer(self.text, self._scanned):
            if match.end() == len(self.text) and not _ALONE.fullmatch(match.group()):
                break  # the word may go on
            self.spans.append(match.span())
            self._scanned = match.end()

    def start(self, word: int) -> int:
        """Where a word begins; the first one has the white space before it."""
        return self.spans[word][0] if word > 0 else 0

    def finish(self) -> None:
        """Notes that the text ends here."""
        if not self.ended:
            self.spans += [match.span() for match in _WORD.finditer(self.text, self._scanned)]
            self._scanned, self.ended = len(self.text), True


_FIRST = 4  # the first core has this part of the words of the largest


class _Windows(abc.ABC):
    """Windows whose cores double from a quarter of their largest size on: a reader has the first
    words soon, and words beside a core, which are read again with each window, are few in the end.

    Args:
        every: words of the largest core.
        context: words beside a core.
    """

    def __init__(self, every: int, context: int) -> None:
        self._every, self._context = every, context
        self._size = -(-every // _FIRST)
        self._first = 0

    @abc.abstractmethod
    def next(self, words: Words) -> list[Window]:
        """The windows that the words so far make."""

    def _advance(self, last: int) -> None:
        """Goes on behind a core that ends before a word."""
        self._first, self._size = last, min(2 * self._size, self._every)


class Both(_Windows):
    """Windows for a model that says where something is: it sees words on both sides of the core."""

    def next(self, words: Words) -> list[Window]:
        windows = []
        while self._first < len(words.spans):
            last = self._first + self._size
            seen = last + self._context
            if seen > len(words.spans) and not words.ended:
                break
            windows.append(self._window(words, last, seen))
            self._advance(last)
        return windows

    def _window(self, words: Words, last: int, seen: int) -> Window:
        spans = words.spans
        return Window(
            start=words.start(self._first - self._context),
            end=spans[min(seen, len(spans)) - 1][1],
            core=words.start(self._first),
            cleared=spans[min(last, len(spans) - 1)][0 if last < len(spans) else 1],
        )


class Before(_Windows):
    """Windows for a model that judges a text: it sees words before the core. A core ends after a
    sentence, once half of its words are there.
    """

    def next(self, words: Words) -> list[Window]:
        windows: list[Window] = []
        while self._first < len(words.spans) and (last := self._last(words)) is not None:
            begin, end = words.start(self._first - self._context), words.spans[last - 1][1]
            windows.append(Window(begin, end, words.start(self._first), end))
            self._advance(last)
        return windows

    def _last(self, words: Words) -> int | None:
        """The number of words up to the next window's end; None while it is not there."""
        spans = words.spans
        most = self._first + self._size
        for last in range(self._first + -(-self._size // 2), min(most, len(spans)) + 1):
            start, end = spans[last - 1]
            if last == most or _SENTENCE_END.search(words.text[start:end]):
                return last
        return len(spans) if words.ended else None
