"""The words of a text, their tokens, and the windows in which a long text is read."""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import ValidationError

# gliner's "whitespace": words with - and _ within, and any other character by itself
_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
_CHUNK = re.compile(r"\S+")
_LONGEST_ADDRESS = 256  # characters of a chunk in which an e-mail address is looked for
# gliner2's end of a sentence
_SIGNS = (".", "!", "?")
_MARKS = (range(0x300, 0x1F000), range(0xE0100, 0xE01F0))  # where combining characters are


@dataclass(frozen=True, slots=True)
class WordWindow:
    """A part of a text's words that the model reads at once, and those that it answers for.

    ``own`` are fewer than ``words`` where windows overlap.
    """

    words: range
    own: range


@dataclass(frozen=True, slots=True)
class TextWords:
    """The words of a text that have tokens.

    ``starts`` and ``ends`` are characters, (num_words,); ``firsts`` where each word's tokens begin
    in ``ids``, (num_words + 1,).
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    ids: NDArray[np.int64]
    firsts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    @classmethod
    def read(cls, text: str, tokenizer: Tokenizer, max_words: int) -> "TextWords":
        """Splits a text into words as gliner does, and these into tokens.

        Raises:
            ValidationError: there are more than ``max_words``, or one of the tokenizer's regular
                expressions gives up on the text.
        """
        found = [match.span() for match in _WORD.finditer(text)]
        _check_number(len(found), max_words)
        return cls._of(found, tokenizer.encode_words([text[start:end] for start, end in found]))

    @classmethod
    def read_sentence(cls, text: str, tokenizer: Tokenizer, max_words: int) -> "TextWords":
        """The same as gliner2 does: in lower case, with a full stop at the end if there is no sign.

        A word of that full stop alone starts and ends at the end of the text.

        Raises:
            ValidationError: as `read`.
        """
        sentence = text if text.endswith(_SIGNS) else f"{text}."
        found = list(_sentence_words(sentence))
        _check_number(len(found), max_words)
        words = [sentence[start:end].lower() for start, end in found]
        given = [(start, min(end, len(text))) for start, end in found]
        return cls._of(given, tokenizer.encode_each(words))

    @classmethod
    def of(cls, words: Sequence[str], tokenizer: Tokenizer) -> "TextWords":
        """Words that belong to no text; their characters are 0.

        Raises:
            ValidationError: as `read`.
        """
        return cls._of([(0, 0)] * len(words), tokenizer.encode_each(words))

    @classmethod
    def _of(
        cls, spans: Sequence[tuple[int, int]], tokens: tuple[NDArray[np.int64], NDArray[np.int64]]
    ) -> "TextWords":
        ids, words = tokens
        firsts = np.flatnonzero(np.diff(words, prepend=-1))
        kept = np.array(spans, np.int64).reshape(-1, 2)[words[firsts]]
        return cls(kept[:, 0], kept[:, 1], ids, np.append(firsts, len(words)))

    def cut(self, room: int) -> "TextWords":
        """The same, with no word of more than ``room`` tokens."""
        lengths = np.diff(self.firsts)
        if len(lengths) == 0 or lengths.max() <= room:
            return self
        places = np.arange(len(self.ids)) - np.repeat(self.firsts[:-1], lengths)
        firsts = np.append(0, np.minimum(lengths, room).cumsum())
        return replace(self, ids=self.ids[places < room], firsts=firsts)

    def limited(self, room: int, *, from_end: bool) -> "TextWords":
        """The first words that have at most ``room`` tokens together, or the last ones."""
        if len(self.ids) <= room:
            return self
        if from_end:
            first = int(np.searchsorted(self.firsts, len(self.ids) - room, "left"))
            kept = slice(first, len(self))
        else:
            kept = slice(0, int(np.searchsorted(self.firsts, room, "right")) - 1)
        firsts = self.firsts[kept.start : kept.stop + 1]
        ids = self.ids[firsts[0] : firsts[-1]]
        return TextWords(self.starts[kept], self.ends[kept], ids, firsts - firsts[0])

    def windows(self, room: int, max_words: int, stride: int | None) -> list[WordWindow]:
        """The parts that the model reads at once.

        Args:
            room: tokens of the text in one window, as many as the longest word has or more.
            max_words: words in one window.
            stride: tokens at most that neighboring windows share; None: a quarter of a window.
        """
        offsets, lengths = self.firsts, np.diff(self.firsts)
        count = len(self)
        parts: list[range] = []
        start = 0
        while count and (not parts or parts[-1].stop < count):
            end = int(np.searchsorted(offsets, offsets[start] + room, "right")) - 1
            end = min(end, start + max_words)
            parts.append(range(start, end))
            if end == count:
                break
            shared = (offsets[end] - offsets[start]) // 4 if stride is None else stride
            shared = min(shared, room - int(lengths[end]))  # the next word must fit in, too
            after = int(np.searchsorted(offsets, offsets[end] - shared, "left"))
            start = min(max(after, start + 1, end + 1 - max_words), end)
        seams = [(one.stop + next_.start + 1) // 2 for one, next_ in pairwise(parts)]
        edges = [0, *seams, count][: len(parts) + 1]
        return [
            WordWindow(part, range(*own)) for part, own in zip(parts, pairwise(edges), strict=True)
        ]


def _check_number(num_words: int, max_words: int) -> None:
    if num_words > max_words:
        raise ValidationError(
            f"the text has {num_words:,} words; one request may have at most {max_words:,}"
        )


def _sentence_words(text: str) -> Iterator[tuple[int, int]]:
    """gliner2's words: URLs, addresses, names after @, words with their combining characters."""
    address, word = _sentence_patterns()
    for chunk in _CHUNK.finditer(text):
        start, end = chunk.span()
        # From each of its characters, the expression may look for the sign to the end of a chunk
        has_address = end - start <= _LONGEST_ADDRESS and "@" in chunk[0]
        for match in (address if has_address else word).finditer(text, start, end):
            yield match.span()


@cache
def _sentence_patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """The patterns of words: one that looks for addresses as well, and one that does not."""
    marks = "".join(
        chr(code) for code in chain(*_MARKS) if unicodedata.category(chr(code)).startswith("M")
    )
    letter = rf"[\w{marks}\u200c\u200d]"
    url = r"(?:https?://[^\s]+|www\.[^\s]+)"
    address = r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,}"
    rest = rf"@[a-z0-9_]+|{letter}+(?:[-_]{letter}+)*|\S"
    with_address = re.compile(f"{url}|{address}|{rest}", re.IGNORECASE)
    return with_address, re.compile(f"{url}|{rest}", re.IGNORECASE)
