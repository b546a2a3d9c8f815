"""What a GLiNER model reads: labels, each after a token that stands for it, and a text's words.

Texts longer than the model are read in windows of whole words, each with all the labels.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Entities
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import ValidationError, shortened

# gliner's "whitespace": words with - and _ within, and any other character by itself
_WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")
_MIN_ROOM = 8  # part of the model's length that labels leave for the text


@dataclass(frozen=True, slots=True)
class LabelPrompt:
    """The labels of a request as tokens; ``rows`` are those whose vectors stand for them."""

    ids: tuple[int, ...]
    rows: tuple[int, ...]

    @classmethod
    def read(
        cls, labels: Sequence[str], entities: Entities, tokenizer: Tokenizer, max_length: int
    ) -> "LabelPrompt":
        """Tokenizes labels; the special tokens before them are included. There are only those where
        another model encodes the labels.

        Raises:
            ValidationError: a label has no tokens or a marker of the model in it, or they leave
                next to no room for a text.
        """
        before, after = tokenizer.ends()
        if entities.label_token is None:
            return cls((*before,), ())
        encoded = tokenizer.encode_words(labels)
        parts: list[list[int]] = [[] for _ in labels]
        for token_id, place in zip(*(each.tolist() for each in encoded), strict=True):
            parts[place].append(token_id)
        ids, rows = [*before], []
        for label, part in zip(labels, parts, strict=True):
            marker = next((each for each in entities.markers if each in label), None)
            if marker is not None:
                raise ValidationError(
                    f"{shortened(label)!r} contains {marker}, which marks labels in the model's "
                    "prompt; leave it out",
                    field="candidate_labels",
                )
            if not part:
                raise ValidationError(
                    f"{shortened(label)!r} has no tokens in the model's vocabulary; leave it out",
                    field="candidate_labels",
                )
            rows.append(len(ids) + int(entities.reads_label))
            ids += [entities.label_token, *part]
        ids += entities.separator
        longest = max_length - len(after) - max(max_length // _MIN_ROOM, 1)
        if len(ids) > longest:
            raise ValidationError(
                f"the {len(labels):,} labels take {len(ids):,} tokens, and the model reads at most "
                f"{longest:,} before a text; send fewer of them, or shorter ones",
                field="candidate_labels",
            )
        return cls(tuple(ids), tuple(rows))


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
        """Splits a text into words, and these into tokens.

        Raises:
            ValidationError: there are more than ``max_words``, or one of the tokenizer's regular
                expressions gives up on the text.
        """
        found = [(match.start(), match.end()) for match in _WORD.finditer(text)]
        if len(found) > max_words:
            raise ValidationError(
                f"the text has {len(found):,} words; one request may have at most {max_words:,}"
            )
        ids, words = tokenizer.encode_words([text[start:end] for start, end in found])
        firsts = np.flatnonzero(np.diff(words, prepend=-1))
        spans = np.array(found, np.int64).reshape(-1, 2)[words[firsts]]
        return cls(
            spans[:, 0],
            spans[:, 1],
            ids,
            np.append(firsts, len(words)),
        )

    def cut(self, room: int) -> "TextWords":
        """The same, with no word of more than ``room`` tokens."""
        lengths = np.diff(self.firsts)
        if len(lengths) == 0 or lengths.max() <= room:
            return self
        places = np.arange(len(self.ids)) - np.repeat(self.firsts[:-1], lengths)
        firsts = np.append(0, np.minimum(lengths, room).cumsum())
        return replace(self, ids=self.ids[places < room], firsts=firsts)

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
