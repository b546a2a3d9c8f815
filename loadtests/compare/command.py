"""The run of ``python -m loadtests compare``."""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loadtests.compare.child import Child
from loadtests.compare.entrants import REQUIREMENTS, Entrant, choose
from loadtests.compare.machine import describe, lines
from loadtests.compare.plot import draw
from loadtests.compare.results import memory_share, results_of
from loadtests.compare.rounds import take_rounds
from loadtests.compare.setup import Setup, exporter_digest
from loadtests.compare.table import family_table
from loadtests.compare.weights import bytes_read
from loadtests.compare.work import Family, Work
from loadtests.errors import LoadTestError
from loadtests.reports import load_averages
from maskdial.bundle import GRAPH

_SHARES: dict[Family, float] = {"causal": 0.75, "masked": 0.25}
"""Which part of the time each family gets if both are measured."""


def run_compare(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; see `add_compare_parser` for the arguments.

    Returns 0; 1 if it could not be made, 130 after Ctrl-C.
    """
    try:
        _Comparison(args).run()
    except (LoadTestError, OSError) as error:
        print(f"loadtests: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loadtests: interrupted, no report", file=sys.stderr)
        return 130
    return 0


class _Comparison:
    """One run. What it does is told on standard error, what it found on standard output."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._families: tuple[Family, ...] = (args.only,) if args.only else ("causal", "masked")
        self._entrants = list(choose(self._families, args.peers))
        self._folder: Path = args.work.resolve()
        self._digest = exporter_digest()
        self._skipped: dict[str, str] = {}

    def run(self) -> None:
        args = self._args
        report = describe(args.threads)
        print("\n".join(lines(report)), flush=True)
        report |= {"precision": args.precision, "families": {}}
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        tables = ["\n\n".join(lines(report)), ""]
        whole = sum(_SHARES[family] for family in self._families)
        for family in self._families:
            seconds = args.seconds * _SHARES[family] / whole
            section, table = self._measure(family, seconds)
            report["families"][family] = section
            tables.append(table)
            print(f"\n{table}", flush=True)
        report |= {"skipped": self._skipped, "load_at_end": load_averages()}
        tables += [f"- {name}: {reason}." for name, reason in self._skipped.items()]
        _beside(args.output, ".json").write_text(json.dumps(report, indent=2) + "\n", "utf-8")
        _beside(args.output, ".md").write_text("\n".join(tables).rstrip() + "\n", "utf-8")

    def _measure(self, family: Family, seconds: float) -> tuple[dict[str, Any], str]:
        entrants = self._prepared([each for each in self._entrants if each.family == family])
        with ExitStack() as stack:
            children = self._loaded(entrants, stack)
            playing = [each for each in entrants if each.name in children]

            def run(entrant: Entrant, work: Work) -> float:
                _tell(f"{entrant.name}: {work.name}", end="\r")
                return children[entrant.name].run(work)

            times = take_rounds(
                playing,
                run,
                seconds,
                most=self._args.rounds,
                on_round=lambda number: _tell(f"{family}, round {number}, load {load_averages()}"),
                on_failure=self._skip,
            )
        results = results_of(times)
        section: dict[str, Any] = {"results": [result.as_json() for result in results]}
        share = None
        if family == "causal":
            num_bytes = bytes_read(self._setup(entrants[0]).bundle / GRAPH)
            share = memory_share(times, num_bytes)
            section["weights_read_bytes"] = num_bytes
            section["memory_share"] = None if share is None else share.as_json()
            self._draw(results)
        section["entrants"] = {each.name: each.about for each in playing}
        return section, family_table(family, results, playing, share)

    def _prepared(self, entrants: Iterable[Entrant]) -> list[Entrant]:
        """Those that have what they need, their models made."""

        def prepare(entrant: Entrant) -> None:
            if entrant.missing:
                raise LoadTestError(
                    f"{', '.join(entrant.missing)} is not installed: pip install -r {REQUIREMENTS}"
                )
            setup = self._setup(entrant)
            if not setup.product.exists():
                Child.prepare(entrant, setup, self._log(entrant))

        return [each for each in entrants if self._try(each, "preparing", prepare)]

    def _loaded(self, entrants: Iterable[Entrant], stack: ExitStack) -> dict[str, Child]:
        children = {}

        def load(entrant: Entrant) -> None:
            child = Child.serve(entrant, self._setup(entrant), self._log(entrant))
            stack.callback(child.close)
            children[entrant.name] = child

        for each in entrants:
            self._try(each, "loading", load)
        return children

    def _try(self, entrant: Entrant, what: str, act: Callable[[Entrant], None]) -> bool:
        """Whether it went well. A peer may fail; without us there is nothing to compare."""
        started = time.perf_counter()
        try:
            act(entrant)
        except LoadTestError as error:
            if not entrant.is_peer:
                raise LoadTestError(f"{entrant.name}: {error}") from error
            self._skip(entrant, error)
            return False
        _tell(f"{what} {entrant.family} {entrant.name}: {time.perf_counter() - started:.1f} s")
        return True

    def _skip(self, entrant: Entrant, error: LoadTestError) -> None:
        self._skipped[f"{entrant.family} {entrant.name}"] = f"left out: {error}"
        print(f"{entrant.family} {entrant.name} left out: {error}", flush=True)

    def _setup(self, entrant: Entrant) -> Setup:
        args = self._args
        return Setup(
            str(self._folder),
            entrant.family,
            entrant.variant,
            entrant.makes,
            args.precision,
            self._exporter(entrant.family),
            args.threads,
            args.seed,
        )

    def _exporter(self, family: Family) -> str:
        """Of which exporter a bundle is to be measured: this one, or that of the newest bundle."""
        if self._args.reuse:
            pattern = f"{family}-{self._args.seed}-bundle-{self._args.precision}-*"
            made = sorted(self._folder.glob(pattern), key=lambda path: path.stat().st_mtime)
            if made:
                return made[-1].name.rpartition("-")[2]
        return self._digest

    def _log(self, entrant: Entrant) -> Path:
        return self._folder / "logs" / f"{entrant.family}-{entrant.name}.log"

    def _draw(self, results: Any) -> None:
        if not _exists("matplotlib"):
            print(f"no plot: matplotlib is not installed: pip install -r {REQUIREMENTS}")
            return
        title = f"Generation, 135M Llama shape, {self._args.threads} threads"
        draw(results, _beside(self._args.output, ".png"), title)


def _exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _tell(line: str, end: str = "\n") -> None:
    if end == "\n" or sys.stderr.isatty():
        print(
            f"\x1b[K{line}" if sys.stderr.isatty() else line, end=end, file=sys.stderr, flush=True
        )
