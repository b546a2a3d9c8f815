"""The run of ``python -m loadtests compare``."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtests.compare.document import Document
from loadtests.compare.entrants import REQUIREMENTS
from loadtests.compare.machine import describe, lines
from loadtests.compare.measurement import Measurement
from loadtests.compare.plot import draw
from loadtests.compare.results import Result
from loadtests.compare.setup import HALF, exporter_digest
from loadtests.compare.shapes import USUAL, Shape, find
from loadtests.compare.work import USUAL_LOAD, Family, Provider
from loadtests.errors import LoadTestError

_SHARES: dict[Family, float] = {"causal": 0.75, "masked": 0.25}
"""How a family's shapes share the time with the other's."""
_PRECISIONS: dict[Provider, str] = {"cpu": "int8", "cuda": "fp16"}


def run_compare(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; see `add_compare_parser` for the arguments.

    Returns 0; 1 if it could not be made, 130 after Ctrl-C.
    """
    try:
        _compare(args)
    except (LoadTestError, OSError) as error:
        print(f"loadtests: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loadtests: interrupted; the report has what was done before", file=sys.stderr)
        return 130
    return 0


def _compare(args: argparse.Namespace) -> None:
    args.precision = args.precision or _PRECISIONS[args.provider]
    args.load = args.load or USUAL_LOAD[args.provider]
    if args.provider == "cuda" and args.precision not in HALF:
        raise LoadTestError(f"on CUDA --precision is {' or '.join(HALF)}")
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
        document.add(measurement.name, measured.section)
        print(f"\n{measured.section['table']}", flush=True)
        if shape.family == "causal":
            title = f"{shape.heading}, {args.precision}, {args.provider}"
            _draw(measured.results, document.beside(f"-{shape.name}.png"), title)


def _shapes(args: argparse.Namespace) -> list[Shape]:
    """Those that were asked for, of the family that was asked for."""
    found = find(args.shapes or USUAL[args.provider])
    chosen = [shape for shape in found if args.only in (None, shape.family)]
    if not chosen:
        raise LoadTestError(f"none of the shapes is {args.only}")
    return chosen


def _draw(results: Sequence[Result], path: Path, title: str) -> None:
    if not _exists("matplotlib"):
        print(f"no plot: matplotlib is not installed: pip install -r {REQUIREMENTS}")
        return
    draw(results, path, title)


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
