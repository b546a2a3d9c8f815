"""The bench tool, run as ``python -m loadtests COMMAND``; see README.md."""

import argparse
import math
from collections.abc import Callable, Sequence


class LoadTestError(Exception):
    """The measurement cannot be made; the message says why."""


class UsageError(Exception):
    """Options that do not go together; the process exits with 2, as after any wrong argument."""


def positive(text: str) -> float:
    """Argument type: a finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def count(text: str) -> int:
    """Argument type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Argument type: comma-separated names, returned in the order of ``known`` and each once."""

    def parse(text: str) -> tuple[str, ...]:
        names = {name.strip() for name in text.split(",")}
        unknown = sorted(names.difference(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
        return tuple(name for name in known if name in names)

    return parse
