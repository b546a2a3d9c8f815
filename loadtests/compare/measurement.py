"""Measurement: one shape, from its models to its section of the report."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtests.compare.child import Child
from loadtests.compare.entrants import REQUIREMENTS, Entrant, choose
from loadtests.compare.results import Case, Reads, Result, memory_shares, results_of
from loadtests.compare.rounds import Times, take_rounds
from loadtests.compare.setup import Setup
from loadtests.compare.shapes import Shape
from loadtests.compare.table import shape_table
from loadtests.compare.weights import bytes_read
from loadtests.compare.work import Work
from loadtests.errors import LoadTestError
from loadtests.reports import load_averages
from maskdial.models.bundle import read_manifests


@dataclass(frozen=True, slots=True)
class Measured:
    """``section`` is what the report has of the results, its ``table`` included."""

    section: dict[str, Any]
    results: Sequence[Result]


class Measurement:
    """One shape's entrants and their rounds. What it does is told on standard error."""

    def __init__(self, shape: Shape, args: argparse.Namespace, digest: str) -> None:
        """``digest`` is the exporter's.

        Raises:
            LoadTestError: a peer that was named is none.
        """
        self._shape = shape
        self._args = args
        self._digest = digest
        self._folder: Path = args.work.resolve()
        self._entrants = list(choose(shape.family, args.peers, args.provider, args.load))
        self._skipped: dict[str, str] = {}

    @property
    def name(self) -> str:
        """Of its section."""
        return f"{self._shape.name} {self._args.precision}"

    def prepare(self) -> list[Entrant]:
        """Makes the models that are not there; those that have what they need."""

        def prepare(entrant: Entrant) -> None:
            if entrant.missing:
                raise LoadTestError(
                    f"{', '.join(entrant.missing)} is not installed: pip install -r {REQUIREMENTS}"
                )
            setup = self._setup(entrant)
            if not setup.product.exists():
                Child.prepare(entrant, setup, self._log(entrant))

        return [each for each in self._entrants if self._try(each, "preparing", prepare)]

    def run(self, seconds: float) -> Measured:
        """Measures for some time.

        Raises:
            LoadTestError: our engine failed.
        """
        args = self._args
        entrants = self.prepare()
        times: Times = {}
        playing: list[Entrant] = []
        groups = [[each] for each in entrants] if args.apart else [entrants]
        for group in groups:
            with ExitStack() as stack:
                children = self._loaded(group, stack)
                loaded = [each for each in group if each.name in children]
                playing += loaded
                taken = self._rounds(loaded, children, seconds / len(groups))
            for work, by_name in taken.items():
                times.setdefault(work, {}).update(by_name)
        results = results_of(times)
        case = Case(self._shape.name, args.provider, args.precision)
        section: dict[str, Any] = {
            "shape": self._shape.name,
            "provider": args.provider,
            "precision": args.precision,
            "apart": args.apart,
            "results": [result.as_json() for result in results],
            "entrants": {each.name: each.about for each in playing},
            "skipped": self._skipped,
            "load_at_end": load_averages(),
        }
        shares = {}
        reads = self._reads(entrants[0])
        if reads is not None:
            shares = memory_shares(times, reads)
            section["weights_read_bytes"] = reads.weights
            section["kv_bytes_per_token"] = reads.kv_per_token
            section["memory_shares"] = {work.name: each.as_json() for work, each in shares.items()}
        heading = f"{self._shape.heading}, {args.precision}, {args.provider}"
        table = shape_table(heading, case, results, playing, shares)
        skipped = "".join(f"- {name}: {reason}.\n" for name, reason in self._skipped.items())
        section["table"] = f"{table}\n{skipped}".rstrip() + "\n"
        return Measured(section, results)

    def _reads(self, engine: Entrant) -> Reads | None:
        """What a decode step reads; None of models that do not decode."""
        bundle = self._setup(engine).bundle
        (manifest,) = read_manifests(self._shape.name, bundle)
        if manifest.kv is None:
            return None
        return Reads(bytes_read(bundle / manifest.graph), manifest.kv.bytes_per_token)

    def _loaded(self, entrants: Iterable[Entrant], stack: ExitStack) -> dict[str, Child]:
        children = {}

        def load(entrant: Entrant) -> None:
            child = Child.serve(entrant, self._setup(entrant), self._log(entrant))
            stack.callback(child.close)
            children[entrant.name] = child

        for each in entrants:
            self._try(each, "loading", load)
        return children

    def _rounds(
        self, entrants: Iterable[Entrant], children: dict[str, Child], seconds: float
    ) -> Times:
        def run(entrant: Entrant, work: Work) -> float:
            _tell(f"{entrant.name}: {work.name}", end="\r")
            return children[entrant.name].run(work)

        def begin(number: int) -> None:
            _tell(f"{self._shape.name}, round {number}, load {load_averages()}")

        return take_rounds(
            entrants,
            run,
            seconds,
            most=self._args.rounds,
            on_round=begin,
            on_failure=self._skip,
        )

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
        spent = time.perf_counter() - started
        _tell(f"{what} {self._shape.name} {entrant.name}: {spent:.1f} s")
        return True

    def _skip(self, entrant: Entrant, error: LoadTestError) -> None:
        self._skipped[entrant.name] = f"left out: {error}"
        print(f"{self._shape.name} {entrant.name} left out: {error}", flush=True)

    def _setup(self, entrant: Entrant) -> Setup:
        args = self._args
        setup = Setup(
            str(self._folder),
            self._shape.name,
            entrant.variant,
            entrant.makes,
            args.precision,
            self._digest,
            args.threads,
            args.seed,
            args.provider,
            args.load,
        )
        bundles = setup.bundles() if args.reuse else []
        if bundles:  # of the newest one's exporter
            return replace(setup, exporter=bundles[-1].name.rpartition("-")[2])
        return setup

    def _log(self, entrant: Entrant) -> Path:
        return self._folder / "logs" / f"{self._shape.name}-{entrant.name}.log"


def _tell(line: str, end: str = "\n") -> None:
    if end == "\n" or sys.stderr.isatty():
        print(
            f"\x1b[K{line}" if sys.stderr.isatty() else line, end=end, file=sys.stderr, flush=True
        )
