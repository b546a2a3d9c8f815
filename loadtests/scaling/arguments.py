"""Arguments of ``python -m loadtests scaling``; light, so that other commands start as fast."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests.arguments import count, positive

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

SECTIONS = ("load", "memory", "start")


def add_scaling_parser(commands: "Commands") -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "scaling",
        help="measure how a server's costs grow",
        description="Serves bundles in processes of their own and measures latency against the "
        "offered load up to beyond saturation, memory against slots and context, and the time to "
        "readiness against the model's size. The server's MASKDIAL_* variables set the rest.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        required=True,
        action="append",
        dest="bundles",
        metavar="PATH",
        help="a model; repeat it for several",
    )
    parser.add_argument(
        "--sections",
        type=parse_sections,
        default=SECTIONS,
        metavar="A,B",
        help=f"what to measure, of {','.join(SECTIONS)}",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=20.0,
        metavar="S",
        help="seconds of load at each rate",
    )
    parser.add_argument("--max-new-tokens", type=count, default=32, metavar="N", help="per text")
    parser.add_argument(
        "--prompt-tokens", type=count, default=256, metavar="N", help="of the streams in memory"
    )
    parser.add_argument(
        "--starts", type=count, default=4, metavar="N", help="how often each model is started"
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the arrivals and the texts")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")


def parse_sections(text: str) -> tuple[str, ...]:
    """Comma-separated names of sections, in the report's order and each once."""
    names = {name.strip() for name in text.split(",")}
    unknown = sorted(names.difference(SECTIONS))
    if unknown:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is no section; there are {', '.join(SECTIONS)}"
        )
    return tuple(name for name in SECTIONS if name in names)
