"""Arguments of ``python -m loadtests agreement``; light, so that other commands start as fast."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from loadtests.arguments import count

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

PRECISIONS = ("fp16", "fp32")
"""Those that torch has, too."""


def add_agreement_parser(commands: "Commands") -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "agreement",
        help="compare greedy texts of the engine with torch's, token by token",
        description="Writes on from 20 prompts by the server's engine, in this process, and by "
        "transformers' generate at the same precision, and compares the tokens. Exits with 1 where "
        "texts part at more than a near tie. The server's MASKDIAL_* variables set what no flag "
        "here does.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR", help="a causal model for torch"
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="PATH",
        help="the same model, exported at the precision; without it, it is exported first",
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="fp16", help="of both")
    parser.add_argument("--provider", choices=("cpu", "cuda"), default="cpu", help="of both")
    parser.add_argument(
        "--num-tokens", type=count, default=64, metavar="N", help="new tokens of each text"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
