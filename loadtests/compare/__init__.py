"""``python -m loadtests compare``: our engine and server against other runtimes."""

import argparse
import sys
from pathlib import Path
from typing import get_args

from loadtests import LoadTestError, add_number, add_seed, add_work, count
from loadtests.compare.setup import HALF, SHAPES, USUAL, Shape, exporter_digest, find
from loadtests.compare.work import USUAL_LOAD, Family, Load, Provider

DESCRIPTION = (
    "Measure our engine, our server and every installed peer on the same work, in turns, with "
    "models of real shapes and random weights. Each runs in a process of its own that is stopped "
    "while the others run. Needs the export extra; the peers are in "
    "loadtests/requirements-peers.txt."
)

_SHARES: dict[Family, float] = {"causal": 0.75, "masked": 0.25}
"""How a shape's time compares with that of a shape of the other family."""

_PRECISIONS: dict[Provider, str] = {"cpu": "int8", "cuda": "fp16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    _add_choices(parser)
    add_number(parser, "--threads", 2, "N", "threads per pass, for everyone")
    add_number(
        parser,
        "--seconds",
        900.0,
        "S",
        "measuring time, without the time to build and load models",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        metavar="N",
        help="end after this many rounds, the first being a warm-up (default: as many as fit)",
    )
    add_seed(parser, "weights, prompts and texts")
    add_work(parser, "runs/compare", "keeps the models between runs, and the logs")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("runs/compare/report"),
        metavar="NAME",
        help="write NAME.json and NAME.md (default: %(default)s)",
    )
    parser.add_argument(
        "--append",
        action="store_true",
        help="keep the report's sections on other shapes and precisions",
    )
    parser.add_argument(
        "--prepare-only", action="store_true", help="build the missing models and measure nothing"
    )
    parser.add_argument(
        "--apart",
        action="store_true",
        help="load one entrant at a time for all its rounds, for models that do not fit into "
        "memory together; ratios then pair rounds by number",
    )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    usual = "; ".join(f"on {provider}: {', '.join(names)}" for provider, names in USUAL.items())
    parser.add_argument(
        "--provider",
        choices=get_args(Provider),
        default="cpu",
        help="device of our engine and of the peers that support it (default: %(default)s)",
    )
    parser.add_argument(
        "--shapes",
        type=parse_names,
        metavar="A,B",
        help=f"models to measure, of {', '.join(SHAPES)} (default: {usual})",
    )
    parser.add_argument("--only", choices=("causal", "masked"), help="only one family of models")
    parser.add_argument(
        "--load",
        choices=get_args(Load),
        help="small: up to 16 texts at once; large: up to 64, many: 256, with ragged lengths "
        "(default: small on the CPU, large on CUDA)",
    )
    parser.add_argument(
        "--peers",
        type=parse_names,
        metavar="A,B",
        help='only these peers, by their names in the table; "" for none (default: all installed)',
    )
    parser.add_argument(
        "--precision",
        help="precision of our bundles (default: int8 on the CPU, fp16 on CUDA, where only "
        f"{' and '.join(HALF)} are available)",
    )
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="measure the newest bundles in the folder even if the exporter has changed since",
    )


def parse_names(text: str) -> tuple[str, ...]:
    """Argument type: comma-separated names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report after each shape; returns 0, or 130 after Ctrl-C."""
    args.precision = args.precision or _PRECISIONS[args.provider]
    args.load = args.load or USUAL_LOAD[args.provider]
    if args.provider == "cuda" and args.precision not in HALF:
        raise LoadTestError(f"on CUDA, --precision must be {' or '.join(HALF)}")
    try:
        _compare(args)
    except KeyboardInterrupt:
        print("loadtests: interrupted; the report has the finished shapes", file=sys.stderr)
        return 130
    return 0


def _compare(args: argparse.Namespace) -> None:
    # The child processes import this package, too, and need none of these.
    from loadtests.compare.report import Document, describe, lines
    from loadtests.compare.rounds import Measurement

    shapes = _shapes(args)
    digest = exporter_digest()
    measurements = [(shape, Measurement(shape, args, digest)) for shape in shapes]
    facts = describe(args.threads, args.provider)
    print("\n".join(lines(facts)), flush=True)
    (args.work / "logs").mkdir(parents=True, exist_ok=True)
    if args.prepare_only:
        for _, measurement in measurements:
            measurement.prepare()
        return
    document = Document(args.output, facts, append=args.append)
    whole = sum(_SHARES[shape.family] for shape in shapes)
    for shape, measurement in measurements:
        measured = measurement.run(args.seconds * _SHARES[shape.family] / whole)
        document.add(measurement.name, measured)
        print(f"\n{measured['table']}", flush=True)


def _shapes(args: argparse.Namespace) -> list[Shape]:
    found = find(args.shapes or USUAL[args.provider])
    chosen = [shape for shape in found if args.only in (None, shape.family)]
    if not chosen:
        raise LoadTestError(f"none of the shapes is {args.only}")
    return chosen
