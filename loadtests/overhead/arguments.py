"""Arguments of ``python -m loadtests overhead``; light, so that other commands start as fast."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests.arguments import count, positive

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_overhead_parser(commands: "Commands") -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "overhead",
        help="compare a server with the bare engine",
        description="Serves each bundle in a process of its own and drives it over HTTP, in turns "
        "with its engine in this process: causal models with streams, classifiers with single "
        "texts. The server's MASKDIAL_* variables set what no flag here does, for both.",
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
        "--streams", type=count, default=8, metavar="N", help="texts generated at once"
    )
    parser.add_argument(
        "--clients", type=count, default=32, metavar="N", help="texts classified at once"
    )
    parser.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="per stream")
    parser.add_argument(
        "--seconds", type=positive, default=60.0, metavar="S", help="time to measure each model for"
    )
    parser.add_argument(
        "--round-seconds",
        type=positive,
        default=4.0,
        metavar="S",
        help="time of one turn; requests that are open then are waited for",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the texts")
    parser.add_argument("--threads", type=count, metavar="N", help="threads of one pass")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as Markdown")
