"""Scanner: the text of a reply that was not read yet, and the small steps of reading it.

Most methods are generators: they yield where they need more text, so that a parser is written as if
it had all of it.
"""

import re
from collections.abc import Callable, Generator, Sequence

# What yields where it needs more text, and returns nothing, an answer, or a text.
Reader = Generator[None, None, None]
Asker = Generator[None, None, bool]
Taker = Generator[None, None, str]
_WORD = re.compile(r"[\w.$-]*")


class CutError(Exception):
    """The text ended within a call."""


class MismatchError(Exception):
    """The text is no call after all."""


class Scanner:
    """The text that was not read yet.

    Attributes:
        text: it.
        ended: no more of it comes.
        cut: it was ended from outside.
        taken: what was read by `take` since that was last set.
    """

    def __init__(self) -> None:
        self.text = ""
        self.ended = self.cut = False
        self.taken = ""

    def take(self, length: int) -> str:
        """Reads that many characters."""
        taken, self.text = self.text[:length], self.text[length:]
        self.taken += taken
        return taken

    def wait(self) -> Reader:
        """Needs more text.

        Raises:
            CutError: no more comes.
        """
        if self.ended:
            raise CutError
        yield

    def literal(self, text: str) -> Reader:
        """Reads a text that has to be there.

        Raises:
            MismatchError: it is not.
        """
        while len(self.text) < len(text) and text.startswith(self.text):
            yield from self.wait()
        if not self.text.startswith(text):
            raise MismatchError
        self.take(len(text))

    def at(self, text: str) -> Asker:
        """Whether a text is next in a call."""
        while len(self.text) < len(text) and text.startswith(self.text):
            if self.ended and not self.text.strip():
                return False
            yield from self.wait()
        return self.text.startswith(text)

    def word(self) -> Taker:
        """Reads a name or an id, which ends where anything else begins."""
        while True:
            match = _WORD.match(self.text)
            assert match is not None
            if match.end() < len(self.text):
                if not match[0]:
                    raise MismatchError
                return self.take(match.end())
            yield from self.wait()

    def skip_space(self) -> Reader:
        """Drops white space, until anything else or the end comes."""
        while not self.text.lstrip() and not self.ended:
            yield
        self.text = self.text.lstrip()

    def begins_with(self, texts: Sequence[str]) -> Asker:
        """Whether the text begins with one of some texts, white space aside."""
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

    def copy_until(self, tag: str, pass_on: Callable[[str], None]) -> Asker:
        """Passes text on up to a tag, which it drops with the white space before it.

        Returns whether the tag came; of an empty one, all is passed on. At the end of the reply,
        what may be half a tag is text, unless the reply was cut.
        """
        while True:
            found = self.text.find(tag) if tag else -1
            if found >= 0:
                pass_on(self.text[:found].rstrip())
                self.text = self.text[found + len(tag) :]
                return True
            certain = self.text[: len(self.text) - _overlap(self.text, tag)]
            if self.ended:
                pass_on(certain if self.cut else self.text)
                self.text = ""
                return False
            certain = certain.rstrip() if tag else certain
            pass_on(certain)
            self.text = self.text[len(certain) :]
            yield

    def copy_argument(self, end: str, pass_on: Callable[[str], None]) -> Reader:
        """Passes an argument on up to what ends it, which it drops.

        Raises:
            CutError: the text ended before; what was certain of it is passed on.
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
