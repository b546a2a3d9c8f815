"""The training texts: public-domain books, WordNet, and rated sentences.

The corpus is a folder laid out as its own README says: gzipped UTF-8 text with one paragraph per
line and a blank line between chapters, and `text<TAB>label` files. Only the files named here are
read: others have an unclear license or are free in the US only.
"""

from __future__ import annotations

import gzip
import random
from dataclasses import dataclass
from pathlib import Path

CHILDREN_FILE = "books-children.txt.gz"
BOOK_FILES = (CHILDREN_FILE, "books-short-fiction.txt.gz", "books-novels.txt.gz")
DEFINITIONS_FILE = "wordnet.txt.gz"
POLARITY_FILE = "sentiment-polarity.tsv"
SENTIMENT_VALIDATION_FILE = "sentiment-validation.tsv"
HELD_OUT_CHAPTERS = 0.015
"""Share of each book file's chapters, from its end, that only ever serve to measure."""


@dataclass(slots=True)
class Books:
    """Chapters to train on and held-out chapters; a newline separates paragraphs."""

    train: list[str]
    held_out: list[str]
    num_children: int = 0
    """How many of `train`, from its start, are of children's books."""


@dataclass(frozen=True, slots=True)
class RatedSentence:
    """A sentence of a film review and its polarity: 0 negative, 1 positive."""

    text: str
    label: int


def read_books(corpus: Path) -> Books:
    """Reads all chapters; the last 1.5% of each file, at least one, are held out."""
    books = Books(train=[], held_out=[])
    for name in BOOK_FILES:
        chapters = _read_gzip(corpus / name).split("\n\n")
        chapters = [chapter.strip() for chapter in chapters if chapter.strip()]
        num_held_out = max(1, round(len(chapters) * HELD_OUT_CHAPTERS))
        books.train.extend(chapters[:-num_held_out])
        books.held_out.extend(chapters[-num_held_out:])
        if name == CHILDREN_FILE:
            books.num_children = len(books.train)
    return books


def read_definitions(corpus: Path, share: float, seed: int) -> list[str]:
    """Samples a `share` (0 to 1) of the dictionary's lines, `Word: definition. Example.`"""
    lines = [line for line in _read_gzip(corpus / DEFINITIONS_FILE).splitlines() if line]
    return random.Random(seed).sample(lines, round(len(lines) * share))


def read_rated_sentences(path: Path) -> list[RatedSentence]:
    """Reads a `text<TAB>label` file without header or quoting."""
    rows = path.read_text(encoding="utf-8").splitlines()
    pairs = [row.rsplit("\t", 1) for row in rows if row]
    return [RatedSentence(text, int(label)) for text, label in pairs]


def _read_gzip(path: Path) -> str:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return file.read()
