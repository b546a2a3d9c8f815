"""The bench tool, run as ``python -m loadtests COMMAND``; see README.md."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path


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


def add_number(
    parser: argparse.ArgumentParser, flag: str, default: float, metavar: str, text: str = ""
) -> None:
    """Adds an option for a number above 0: a `count` if the default is an integer."""
    parser.add_argument(
        flag,
        type=count if isinstance(default, int) else positive,
        default=default,
        metavar=metavar,
        help=f"{text} (default: %(default)s)" if text else "default: %(default)s",
    )


def add_seed(parser: argparse.ArgumentParser, text: str = "everything that is random") -> None:
    """Adds ``--seed``."""
    parser.add_argument("--seed", type=int, default=0, help=f"seed of {text} (default: 0)")


def add_work(parser: argparse.ArgumentParser, default: str, text: str) -> None:
    """Adds ``--work``, a folder for what is kept between runs."""
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(default),
        metavar="DIR",
        help=f"{text} (default: %(default)s)",
    )


def add_sections(parser: argparse.ArgumentParser, known: Sequence[str]) -> None:
    """Adds ``--sections``, which are all of them by default."""
    parser.add_argument(
        "--sections",
        type=names_of(known),
        default=tuple(known),
        metavar="A,B",
        help=f"sections to measure, of {','.join(known)} (default: all)",
    )


def add_bundles(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds ``--bundle``, which may be repeated: ``args.bundles``."""
    parser.add_argument(
        "--bundle",
        type=Path,
        required=True,
        action="append",
        dest="bundles",
        metavar="PATH",
        help=f"{text}; repeat for several",
    )
