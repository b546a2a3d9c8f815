"""Arguments of ``python -m loadtests compare``; light, so that other commands start as fast."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from loadtests.arguments import count, positive
from loadtests.compare.setup import HALF
from loadtests.compare.shapes import SHAPES, USUAL
from loadtests.compare.work import Load, Provider

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
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/compare"),
        metavar="FOLDER",
        help="keeps the models from one run to the next, and the logs (default: %(default)s)",
    )
    parser.add_argument(
        "--provider",
        choices=get_args(Provider),
        default="cpu",
        help="where passes run: our engine's, and the peers' that can run there "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--shapes",
        type=parse_names,
        metavar="A,B",
        help=f"models to measure, of {', '.join(SHAPES)} (default: {_usual()})",
    )
    parser.add_argument("--only", choices=("causal", "masked"), help="one family of models")
    parser.add_argument(
        "--load",
        choices=get_args(Load),
        help="small: up to 16 texts at once; large: up to 64, and texts of many lengths "
        "(default: small on the CPU, large on CUDA)",
    )
    parser.add_argument(
        "--peers",
        type=parse_names,
        metavar="A,B",
        help='these only, by their names in the table; "" for none (default: all installed)',
    )
    parser.add_argument(
        "--precision",
        help="of our bundles (default: int8 on the CPU, fp16 on CUDA, where only "
        f"{' and '.join(HALF)} are measured)",
    )
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="measure our newest bundles in the folder, though the exporter has changed since",
    )
    parser.add_argument(
        "--threads",
        type=count,
        default=2,
        metavar="N",
        help="threads of one pass, for everyone (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=900.0,
        metavar="S",
        help="time to measure for, without building and loading models; what has begun then is "
        "ended (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        metavar="N",
        help="end after so many, the first of which warms up (default: as many as fit)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="draws weights, prompts and texts (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/compare/report"),
        metavar="NAME",
        help="writes NAME.json and NAME.md, and NAME-SHAPE.png of each that generates "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--append",
        action="store_true",
        help="keep what the report has of other shapes and precisions",
    )
    parser.add_argument(
        "--prepare-only",
        action="store_true",
        help="make the models that are not there yet, and measure nothing",
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="load each entrant for its own rounds only, one after the other, where they do not "
        "fit into memory together; ratios are of rounds of one number then",
    )


def _usual() -> str:
    return "; ".join(f"on {provider}: {', '.join(names)}" for provider, names in USUAL.items())


def parse_names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())
