"""Arguments of ``python -m loadtests batching``; light, so that other commands start as fast."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests.arguments import count, positive

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_batching_parser(commands: "Commands") -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "batching",
        help="compare the batches of a masked bundle with first-come ones, in this process",
        description="Runs the same texts through a masked bundle twice: in the server's batches, "
        "of like length, and in batches in the order of arrival under the same budget. Without "
        "HTTP; the server's MASKDIAL_* variables set what no flag here does.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--bundle", type=Path, required=True, metavar="PATH", help="the model")
    parser.add_argument(
        "--texts", type=Path, required=True, metavar="FILE", help="texts in UTF-8, one a line"
    )
    parser.add_argument(
        "--long-share",
        type=_share,
        default=0.2,
        metavar="X",
        help="share of the lines that are joined into texts of 200 to 500 words",
    )
    parser.add_argument(
        "--num-texts", type=count, default=2000, metavar="N", help="texts in one measurement"
    )
    parser.add_argument(
        "--clients", type=count, default=64, metavar="N", help="requests that are open at once"
    )
    parser.add_argument(
        "--request-texts", type=count, default=8, metavar="N", help="texts in one request"
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=60.0,
        metavar="S",
        help="time to measure for; each kind of batch is measured once, however long that takes",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws which lines are joined")
    parser.add_argument(
        "--max-batch-tokens", type=count, metavar="N", help="padded tokens in one pass"
    )
    parser.add_argument("--threads", type=count, metavar="N", help="threads of one pass")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be between 0 and 1")
    return value
