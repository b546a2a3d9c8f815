"""Measurement: the rounds in which the entrants measure one shape."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtests import LoadTestError
from loadtests.compare.child import Child
from loadtests.compare.entrants import REQUIREMENTS, Entrant, choose
from loadtests.compare.report import shape_table
from loadtests.compare.results import (
    Reads,
    Times,
    bytes_read,
    memory_shares,
    results_of,
)
from loadtests.compare.setup import Setup, Shape
from loadtests.compare.work import Work
from loadtests.measurement import load_averages
from maskdial.bundle.bundle import read_manifests
from maskdial.config import load_config
from maskdial.kernels.installed import find_kernels
from maskdial.kernels.rewrite import rewrite


def take_rounds(
    entrants: Iterable[Entrant],
    run: Callable[[Entrant, Work], float],
    seconds: float,
    *,
    most: int | None = None,
    on_round: Callable[[int], None] = lambda _: None,
    on_failure: Callable[[Entrant, LoadTestError], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Goes round until the time is up.

    At each piece of work, every entrant takes its turn before the next piece begins, and each round
    starts with another entrant. An entrant that fails takes no more turns. The first round is a
    warm-up: it is dropped for work that is measured again.

    Args:
        entrants: the participants.
        run: lets one of them do a piece of work and returns its seconds.
        seconds: no piece of work begins later than this.
        most: number of rounds including the first; None for as many as fit.
        on_round: called with the number of each round when it begins, from 0.
        on_failure: called with an entrant that failed.
        clock: seconds from any origin.
    """
    playing = list(entrants)
    times: Times = {}
    deadline = clock() + seconds
    for number in range(most) if most is not None else itertools.count():
        if not playing or clock() >= deadline:
            break
        on_round(number)
        for work in dict.fromkeys(work for entrant in playing for work in entrant.work):
            if clock() >= deadline:
                break
            for entrant in _rotated([each for each in playing if work in each.work], number):
                try:
                    spent = run(entrant, work)
                except LoadTestError as error:
                    playing.remove(entrant)
                    on_failure(entrant, error)
                    continue
                times.setdefault(work, {}).setdefault(entrant.name, {})[number] = spent
    return {work: _without_warm_up(by_name) for work, by_name in times.items()}


def _rotated(entrants: Sequence[Entrant], number: int) -> list[Entrant]:
    first = number % len(entrants) if entrants else 0
    return [*entrants[first:], *entrants[:first]]


def _without_warm_up(by_name: dict[str, dict[int, float]]) -> dict[str, dict[int, float]]:
    return {
        name: {
            number: spent for number, spent in by_round.items() if number > 0 or len(by_round) == 1
        }
        for name, by_round in by_name.items()
    }


class Measurement:
    """One shape's entrants and their rounds. Progress goes to standard error."""

    def __init__(self, shape: Shape, args: argparse.Namespace, digest: str) -> None:
        """``digest`` is the exporter's.

        Raises:
            LoadTestError: a named peer does not exist.
        """
        self._shape = shape
        self._args = args
        self._digest = digest
        self._folder: Path = args.work.resolve()
        self._entrants = list(choose(shape.family, args.peers, args.provider, args.load))
        self._skipped: dict[str, str] = {}

    @property
    def name(self) -> str:
        """The name of its section."""
        return f"{self._shape.name} {self._args.precision}"

    def prepare(self) -> list[Entrant]:
        """Builds missing models; returns the entrants that have what they need."""

        def prepare(entrant: Entrant) -> None:
            if entrant.missing:
                raise LoadTestError(
                    f"{', '.join(entrant.missing)} is not installed: pip install -r {REQUIREMENTS}"
                )
            setup = self._setup(entrant)
            if not setup.product.exists():
                Child.prepare(entrant, setup, self._log(entrant))

        return [each for each in self._entrants if self._try(each, "preparing", prepare)]

    def run(self, seconds: float) -> dict[str, Any]:
        """Measures for a time; returns the section for the report's JSON, with its ``table``.

        Raises:
            LoadTestError: our own engine failed.
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
        table = shape_table(heading, results, playing, shares)
        skipped = "".join(f"- {name}: {reason}.\n" for name, reason in self._skipped.items())
        section["table"] = f"{table}\n{skipped}".rstrip() + "\n"
        return section

    def _reads(self, engine: Entrant) -> Reads | None:
        """What a decode step reads; None for models that do not decode."""
        bundle = self._setup(engine).bundle
        (manifest,) = read_manifests(self._shape.name, bundle)
        if manifest.kv is None:
            return None
        graph, config, layout = bundle / manifest.graph, load_config({}), manifest.kv
        if self._args.provider == "cpu" and find_kernels(config.kernels) is not None:
            layout = layout.stored_as(rewrite(graph, config.kv_cache_dtype).kv_cache)
        return Reads(bytes_read(graph), layout.bytes_per_token)

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
        """Whether it succeeded. A peer may fail; without our engine there is no comparison."""
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
        if bundles:  # take the newest one's exporter
            return replace(setup, exporter=bundles[-1].name.rpartition("-")[2])
        return setup

    def _log(self, entrant: Entrant) -> Path:
        return self._folder / "logs" / f"{self._shape.name}-{entrant.name}.log"


def _tell(line: str, end: str = "\n") -> None:
    if end == "\n" or sys.stderr.isatty():
        print(
            f"\x1b[K{line}" if sys.stderr.isatty() else line, end=end, file=sys.stderr, flush=True
        )
