"""A mix of short and long texts, made of a file of short ones."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from loadtests.errors import LoadTestError

SHORTEST, LONGEST = 200, 500
"""Words of a joined text."""


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file that are not blank.

    Raises:
        LoadTestError: it cannot be read, or there are none.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeError) as error:
        raise LoadTestError(f"{path} cannot be read: {error}") from error
    lines = [line for line in lines if line]
    if not lines:
        raise LoadTestError(f"{path} holds no texts")
    return lines


def mix(lines: Iterable[str], long_share: float, seed: int) -> list[str]:
    """The lines in random order, ``long_share`` of them joined into long texts. None is lost.

    A joined text has `SHORTEST` to `LONGEST` words. Lines that are left when the last one is made
    stay as they are, and so does a line that is longer than that itself.
    """
    rng = random.Random(seed)
    shuffled = list(lines)
    rng.shuffle(shuffled)
    num_joined = round(long_share * len(shuffled))
    texts = [*_join(shuffled[:num_joined], rng), *shuffled[num_joined:]]
    rng.shuffle(texts)
    return texts


def _join(lines: Iterable[str], rng: random.Random) -> Iterator[str]:
    text: list[str] = []
    num_words, goal = 0, rng.randint(SHORTEST, LONGEST)
    for line in lines:
        length = len(line.split())
        if num_words + length > LONGEST:
            yield from _ended(text, num_words)
            text, num_words = [], 0
        text.append(line)
        num_words += length
        if num_words >= goal:
            yield from _ended(text, num_words)
            text, num_words, goal = [], 0, rng.randint(SHORTEST, LONGEST)
    yield from _ended(text, num_words)


def _ended(text: list[str], num_words: int) -> list[str]:
    """The text, or its lines where it is too short to be a long one."""
    return [" ".join(text)] if num_words >= SHORTEST else text
