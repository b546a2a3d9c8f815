"""Scanner: the unread text of a reply, and the steps of reading it.

Most methods are generators, which yield when they need more text. So a parser reads as if it had
the whole text.
"""

import re
from collections.abc import Callable, Collection, Generator, Sequence

# Generators that yield when they need more text, and return nothing, an answer, or a text.
Reader = Generator[None, None, None]
Asker = Generator[None, None, bool]
Taker = Generator[None, None, str]
# A tool's name has no more; without a limit, a word in small pieces is read anew with each of them.
_MAX_WORD = 128
_WORD = re.compile(rf"[\w.$-]{{0,{_MAX_WORD + 1}}}")


class CutError(Exception):
    """The text ended within a call."""


class MismatchError(Exception):
    """The text is not a call after all."""


class Scanner:
    """The unread text of a reply.

    Attributes:
        text: the unread text.
        ended: no more text follows.
        cut: the reply was cut off.
        taken: the text read by `take`; reset it to start anew.
        space: the white space that `copy_until` dropped before the last tag.
    """

    def __init__(self) -> None:
        self.text = self.space = ""
        self.ended = self.cut = False
        self.taken = ""

    def take(self, length: int) -> str:
        """Reads some characters."""
        taken, self.text = self.text[:length], self.text[length:]
        self.taken += taken
        return taken

    def wait(self) -> Reader:
        """Waits for more text.

        Raises:
            CutError: the reply has ended.
        """
        if self.ended:
            raise CutError
        yield

    def literal(self, text: str) -> Reader:
        """Reads an expected text.

        Raises:
            MismatchError: something else follows.
        """
        while len(self.text) < len(text) and text.startswith(self.text):
            yield from self.wait()
        if not self.text.startswith(text):
            raise MismatchError
        self.take(len(text))

    def at(self, text: str) -> Asker:
        """Whether a given text is next, inside a call."""
        while len(self.text) < len(text) and text.startswith(self.text):
            if self.ended and not self.text.strip():
                return False
            yield from self.wait()
        return self.text.startswith(text)

    def word(self) -> Taker:
        """Reads a name or an id.

        Raises:
            MismatchError: something else follows.
            CutError: the text ended before its end.
        """
        return (yield from self.name((), ""))

    def name(self, known: Collection[str], following: str) -> Taker:
        """Reads one of some names, which may have any signs, or else a word.

        Of the names with the following text behind them, it is the longest.

        Raises:
            As `word`.
        """
        following = following[:1]
        while True:
            match = _WORD.match(self.text)
            assert match is not None
            if match.end() > _MAX_WORD:
                raise MismatchError
            wholes = [name + following for name in known]
            undecided = any(
                len(whole) > len(self.text) and whole.startswith(self.text) for whole in wholes
            )
            if match.end() < len(self.text) and not undecided:
                found = [whole for whole in wholes if self.text.startswith(whole)]
                length = len(max(found, key=len)) - len(following) if found else 0
                if not (length := max(length, match.end())):
                    raise MismatchError
                return self.take(length)
            yield from self.wait()

    def skip_space(self) -> Reader:
        """Drops white space."""
        while not self.text.lstrip() and not self.ended:
            yield
        self.text = self.text.lstrip()

    def begins_with(self, texts: Sequence[str]) -> Asker:
        """Whether one of some texts is next, white space aside."""
        while True:
            text = self.text.lstrip()
            if any(text.startswith(each) for each in texts):
                return True
            if not any(each.startswith(text) for each in texts):
                return False
            if self.ended:
                self.text = "" if self.cut else self.text
                return False
            yield

    def copy_until(self, tags: Sequence[str], pass_on: Callable[[str], None]) -> Taker:
        """Passes on the text before one of some tags; drops the tag and the white space before it.

        Returns the tag; "" if none was found, as an empty one never is. Half a tag at the end of
        the reply is text, unless the reply was cut off.
        """
        tags = [tag for tag in tags if tag]
        while True:
            places = {self.text.find(tag): tag for tag in reversed(tags) if tag in self.text}
            if places:
                first = min(places)
                before = self.text[:first].rstrip()
                self.space = self.text[len(before) : first]
                pass_on(before)
                self.text = self.text[first + len(places[first]) :]
                return places[first]
            overlap = max((_overlap(self.text, tag) for tag in tags), default=0)
            certain = self.text[: len(self.text) - overlap]
            if self.ended:
                pass_on(certain if self.cut else self.text)
                self.text = ""
                return ""
            certain = certain.rstrip() if tags else certain
            pass_on(certain)
            self.text = self.text[len(certain) :]
            yield

    def copy_argument(self, end: str, pass_on: Callable[[str], None]) -> Reader:
        """Passes on an argument; drops the text that ends it.

        Raises:
            CutError: the reply ended inside the argument, whose certain part was passed on.
        """
        while (found := self.text.find(end)) < 0:
            pass_on(self.take(len(self.text) - _overlap(self.text, end)))
            yield from self.wait()
        pass_on(self.take(found))
        self.take(len(end))


def _overlap(text: str, tag: str) -> int:
    """The length of the longest end of a text with which a tag begins."""
    lengths = range(min(len(text), len(tag) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(tag[:length])), 0)
