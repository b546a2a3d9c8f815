"""``python -m loadtests simulate``: many replicas, by a simulation with measured step times."""

import argparse
import asyncio
from pathlib import Path

import numpy as np
from rich.console import Console

from loadtests import UsageError, add_sections, add_seed, count, positive
from loadtests.engine import steps
from loadtests.engines import LoadedCausal
from loadtests.measurement import add_report_options, load_averages, write_reports
from loadtests.simulate import fleets
from loadtests.simulate.cluster import Shape
from loadtests.simulate.replica import Limits
from loadtests.simulate.router import POLICIES
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Length, Workload
from maskdial.config import load_config

DESCRIPTION = (
    "Simulate replicas of the server behind a gateway and a router, under "
    "conversations that begin at random times. How long the steps of a replica take is read from "
    "--step-times, or measured with --bundle."
)
SECTIONS = tuple(fleets.SECTIONS)
_COUNTS: dict[str, tuple[int, str]] = {
    "slots": (8, "of a replica"),
    "max-queue": (1024, "requests that may wait for a replica"),
    "prefill-chunk-tokens": (256, "prompt tokens read in a step"),
    "gateway-workers": (1, "requests that the gateway works on at a time"),
    "turns": (4, "requests of a conversation"),
    "instruction-tokens": (128, "tokens that a conversation begins with"),
    "instructions": (20, "different instructions; the k-th is used in proportion to 1/k"),
    "prompt-tokens": (48, "mean new tokens of a turn"),
    "new-tokens": (64, "mean tokens of a reply"),
}
_NUMBERS: dict[str, tuple[float, str]] = {
    "measure-seconds": (20.0, "measuring time for the step times of --bundle"),
    "spread": (
        1.25,
        "session and prefix pass over a replica without a free slot that has more than so many "
        "times the mean number of requests",
    ),
    "load": (
        1.0,
        "requests offered, as a share of what the replicas could do with full slots and without a "
        "prefix cache",
    ),
    "seconds": (120.0, "simulated time, of which the first half is not counted"),
    "pause": (10.0, "mean seconds from a reply to the next turn"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument("--bundle", type=Path, metavar="PATH", help="causal bundle to measure")
    parser.add_argument(
        "--step-times",
        type=Path,
        metavar="FILE",
        help="report of loadtests engine --sections steps --output FILE; default: --bundle is "
        "measured",
    )
    add_sections(parser, SECTIONS)
    add_seed(parser, "everything")
    parser.add_argument(
        "--replicas",
        type=_counts,
        default=(10, 100),
        metavar="N,N",
        help="sizes of the fleets (default: 10,100)",
    )
    parser.add_argument(
        "--routing",
        choices=POLICIES,
        default="two-choices",
        help="where a section does not vary it (default: %(default)s)",
    )
    parser.add_argument(
        "--prefix-cache-tokens",
        type=int,
        default=11_000,
        metavar="N",
        help="tokens that a replica's prefix cache holds; 0: none (default: %(default)s)",
    )
    parser.add_argument(
        "--gateway-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="time of the gateway per request, where a section does not vary it (default: 0)",
    )
    parser.add_argument(
        "--length-spread",
        type=float,
        default=1.0,
        metavar="X",
        help="coefficient of variation of prompts and replies, log-normal; 0: all alike (default: "
        "%(default)s)",
    )
    for name, (number, text) in _COUNTS.items():
        described = f"{text} (default: {number})"
        parser.add_argument(f"--{name}", type=count, default=number, metavar="N", help=described)
    for name, (value, text) in _NUMBERS.items():
        described = f"{text} (default: {value:g})"
        parser.add_argument(f"--{name}", type=positive, default=value, metavar="X", help=described)
    add_report_options(parser)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def main(args: argparse.Namespace) -> int:
    """Simulates, prints and writes the report; returns 0.

    Raises:
        UsageError: the options do not say which bundle or which step times.
    """
    if args.step_times is not None:
        times = StepTimes.read(args.step_times)
    elif args.bundle is not None:
        times = asyncio.run(_measure(args.bundle, args.measure_seconds, args.seed))
    else:
        raise UsageError("simulate needs --step-times or --bundle")
    facts = {"load": load_averages(), "seed": args.seed}
    scenario = scenario_of(args, times)
    sections = []
    for name in args.sections:
        found = fleets.section(name, scenario, args.replicas)
        found.show(Console())
        sections.append(found)
    write_reports(args, sections, facts)
    return 0


async def _measure(bundle: Path, seconds: float, seed: int) -> StepTimes:
    """What the section ``steps`` of ``loadtests engine`` measures."""
    model = LoadedCausal.load(bundle, load_config({}))
    section = await steps.measure(model, seconds, np.random.default_rng(seed))
    rows = [row for row in section.rows if isinstance(row, steps.Row)]
    return StepTimes.from_rows(rows, model.layout.query_block, model.packs)


def scenario_of(args: argparse.Namespace, times: StepTimes) -> fleets.Scenario:
    """What the options describe."""
    shape = Shape(
        limits=Limits(
            slots=args.slots,
            max_queue=args.max_queue,
            chunk_tokens=args.prefill_chunk_tokens,
            prefix_cache_tokens=args.prefix_cache_tokens,
        ),
        routing=args.routing,
        spread=args.spread,
        gateway_seconds=args.gateway_ms / 1e3,
        gateway_workers=args.gateway_workers,
        seed=args.seed,
    )
    workload = Workload(
        turns=args.turns,
        prompt=Length(args.prompt_tokens, args.length_spread),
        generated=Length(args.new_tokens, args.length_spread),
        pause=args.pause,
        num_instructions=args.instruction_tokens,
        num_kinds=args.instructions,
    )
    rate = args.load * fleets.capacity(times, shape, workload)
    return fleets.Scenario(times, shape, workload, rate, args.seconds, args.seed)
