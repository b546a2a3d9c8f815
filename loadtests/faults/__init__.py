"""``python -m loadtests faults KIND``: what a server loses, breaks or keeps under faults."""

import argparse
from typing import Protocol

from rich.console import Console

from loadtests import add_seed
from loadtests.faults import chaos, crashes, fuzz, overload, soak, swaps
from loadtests.faults.outcome import Outcome
from loadtests.measurement import add_report_options, load_averages, write_reports

DESCRIPTION = (
    "Serve models in a process of their own, do to it what networks, clients and operators do, and "
    "count what is lost, wrong or kept. Exit with 1 if anything is. MASKDIAL_* variables configure "
    "the rest."
)


class _Kind(Protocol):
    """What the module of a kind has."""

    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, args: argparse.Namespace) -> Outcome: ...


KINDS: dict[str, tuple[_Kind, str]] = {
    "chaos": (chaos, "broken connections, pauses, killed child processes"),
    "crashes": (crashes, "the server is killed again and again"),
    "fuzz": (fuzz, "hostile bodies, raw HTTP, grammars and templates"),
    "overload": (overload, "five times what the server can do"),
    "soak": (soak, "an hour of mixed load, or of each kind of request in turn"),
    "swaps": (swaps, "a model is replaced again and again under load"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the kinds, each with its options."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, (kind, summary) in KINDS.items():
        options = kinds.add_parser(name, help=summary, description=kind.DESCRIPTION)
        kind.add_arguments(options)
        add_seed(options, "everything")
        add_report_options(options)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 1 if anything was lost, wrong or broken."""
    facts = {"load": load_averages(), "seed": args.seed}
    outcome = KINDS[args.kind][0].run(args)
    outcome.section.show(Console())
    write_reports(args, [outcome.section], facts)
    return 1 if outcome.failed else 0
