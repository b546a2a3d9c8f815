"""Arguments of ``python -m loadtests compare``; light, so that other commands start as fast."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests.arguments import count, positive

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_compare_parser(commands: "Commands") -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "compare",
        help="compare our speed with other runtimes'",
        description="Lets our engine, our server and every installed peer do the same work in "
        "turns, on models of real shapes with random weights, each in a process of its own that "
        "stands still while others run. Needs the export extra; "
        "loadtests/requirements-peers.txt has the peers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/compare"),
        metavar="FOLDER",
        help="keeps the models from one run to the next, and the logs of the last",
    )
    parser.add_argument("--only", choices=("causal", "masked"), help="one family of models")
    parser.add_argument(
        "--peers",
        type=parse_names,
        metavar="A,B",
        help='these only, by their names in the table; "" for none (default: all installed)',
    )
    parser.add_argument("--precision", default="int8", help="of our bundles")
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="measure our newest bundles in the folder, though the exporter has changed since",
    )
    parser.add_argument(
        "--threads", type=count, default=2, metavar="N", help="threads of one pass, for everyone"
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=900.0,
        metavar="S",
        help="time to measure for, without building and loading models; every piece of work is "
        "measured once, however long that takes",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws weights, prompts and texts")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/compare/report"),
        metavar="NAME",
        help="writes NAME.json, NAME.md and NAME.png",
    )


def parse_names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
