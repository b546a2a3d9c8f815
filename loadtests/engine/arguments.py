"""Arguments of ``python -m loadtests engine``; light, so that other commands start as fast."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests.arguments import positive

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

SHARES = {
    "stall": 0.18,
    "split": 0.20,
    "prefix": 0.07,
    "together": 0.07,
    "speculation": 0.43,
    "memory": 0.05,
}
"""The sections, and which part of the time each gets if all of them run."""


def add_engine_parser(commands: "Commands") -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "engine",
        help="measure the engine of a causal bundle in this process",
        description="Measures the engine of a causal bundle in this process, without HTTP. The "
        "server's MASKDIAL_* variables set what no flag here does.",
    )
    parser.add_argument("--bundle", type=Path, required=True, metavar="PATH", help="the model")
    parser.add_argument(
        "--sections",
        type=parse_sections,
        default=tuple(SHARES),
        metavar="A,B",
        help=f"what to measure, of {','.join(SHARES)} (default: all)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=300.0,
        metavar="S",
        help="time to measure for; each section measures everything once, however long that takes "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="draws the prompts (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="threads of one pass")
    parser.add_argument(
        "--prefill-chunk-tokens", type=int, metavar="N", help="prompt tokens between two steps"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")


def parse_sections(text: str) -> tuple[str, ...]:
    """Comma-separated names of sections, in the report's order and each once."""
    names = {name.strip() for name in text.split(",")}
    unknown = sorted(names - SHARES.keys())
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is no section; there are {', '.join(SHARES)}"
        )
    return tuple(name for name in SHARES if name in names)


def seconds_of(sections: tuple[str, ...], seconds: float) -> dict[str, float]:
    """How many of the seconds each of the sections gets."""
    whole = sum(SHARES[name] for name in sections)
    return {name: seconds * SHARES[name] / whole for name in sections}
