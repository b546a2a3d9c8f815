"""``python -m loadtests scaling``: how a server's costs grow with load, memory and model size."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console

from loadtests import LoadTestError, add_bundles, add_number, add_sections, add_seed
from loadtests.measurement import Section, add_report_options, load_averages, write_reports
from loadtests.scaling import load, memory
from loadtests.server import running_server
from maskdial.bundle.bundle import Bundle, load_bundle

DESCRIPTION = (
    "Serve bundles in processes of their own and measure latency against the offered load until "
    "beyond saturation, memory against slots and context, and the time to readiness against the "
    "model's size. MASKDIAL_* variables configure the rest."
)
SECTIONS = ("load", "memory", "start")
_QUESTION = "time from the start of the process to readiness, against the model's size"

_NOTES = (
    "listening: Python, its imports and the socket, the same for every model; loading: from there "
    "to readiness: hashes, graph, golden check and first pass, with the files in the page cache",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_bundles(parser, "bundle to serve")
    add_sections(parser, SECTIONS)
    add_number(parser, "--seconds", 20.0, "S", "seconds of load per rate")
    add_number(parser, "--max-new-tokens", 32, "N", "tokens per text, for load")
    add_number(parser, "--prompt-tokens", 256, "N", "prompt tokens per stream, for memory")
    add_number(parser, "--starts", 4, "N", "starts per model, for start")
    add_seed(parser, "arrivals and texts")
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 0."""
    facts = {"load": load_averages(), "seed": args.seed}
    bundles = [load_bundle(path.resolve().name, path) for path in args.bundles]
    if len({bundle.name for bundle in bundles}) < len(bundles):
        raise LoadTestError(
            "two bundle folders have the same name, which is how models are told apart"
        )
    sections = asyncio.run(_measure(bundles, args))
    write_reports(args, sections, facts)
    return 0


async def _measure(bundles: list[Bundle], args: argparse.Namespace) -> list[Section]:
    """Prints each section as soon as it is measured."""
    measures = {
        "load": lambda: load.measure(bundles, args.seconds, args.max_new_tokens, args.seed),
        "memory": lambda: memory.measure(bundles, args.prompt_tokens, args.seed),
        "start": lambda: measure_start(bundles, args.starts),
    }
    sections: list[Section] = []
    for name in args.sections:
        sections.append(await measures[name]())
        sections[-1].show(Console())
    return sections


@dataclass(frozen=True, slots=True)
class Start:
    """One start; times in seconds."""

    listening: float
    ready: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Row:
    """One model: medians over its starts, in seconds. ``size_mb`` is the size of all its files."""

    model: str
    size_mb: float
    starts: int
    listening_s: float
    loading_s: float
    ready_s: float
    cpu_s: float
    loaded_mb_per_s: float


async def measure_start(bundles: Sequence[Bundle], num_starts: int) -> Section:
    """Starts a server for each model, in turns.

    Args:
        bundles: the models.
        num_starts: starts per model; the first is dropped if at least two more follow.
    """
    samples: dict[str, list[Start]] = {bundle.name: [] for bundle in bundles}
    for _ in range(num_starts):
        for bundle in bundles:
            samples[bundle.name].append(await asyncio.to_thread(_start, bundle))
    rows = tuple(summarize(bundle, samples[bundle.name]) for bundle in bundles)
    findings = tuple(
        f"{row.model}: {row.size_mb:.0f} MB load in {row.loading_s:.2f} s" for row in rows
    )
    return Section("start", _QUESTION, num_starts, rows, findings, _NOTES)


def _start(bundle: Bundle) -> Start:
    with running_server({bundle.name: bundle.path}) as server:
        return Start(server.start_seconds, server.ready_seconds, server.cpu_seconds())


def summarize(bundle: Bundle, starts: Sequence[Start]) -> Row:
    """Summarizes the starts of one model."""
    size = sum((bundle.path / name).stat().st_size for name in bundle.manifest.files) / 1e6
    counted = starts[1:] if len(starts) > 2 else starts
    loading = median(start.ready - start.listening for start in counted)
    return Row(
        model=bundle.name,
        size_mb=size,
        starts=len(counted),
        listening_s=median(start.listening for start in counted),
        loading_s=loading,
        ready_s=median(start.ready for start in counted),
        cpu_s=median(start.cpu for start in counted),
        loaded_mb_per_s=size / loading,
    )
