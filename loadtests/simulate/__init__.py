"""``python -m loadtests simulate``: many replicas, by a simulation with measured step times."""

import argparse
from pathlib import Path

from rich.console import Console

from loadtests import add_number, add_sections, add_seed, count
from loadtests.measurement import add_report_options, load_averages, write_reports
from loadtests.simulate import fleets
from loadtests.simulate.cluster import Shape
from loadtests.simulate.replica import Limits
from loadtests.simulate.router import POLICIES
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Length, Workload

DESCRIPTION = (
    "Simulate replicas of the server behind a gateway and a router, under "
    "conversations that begin at random times. How long the steps of a replica take is read from "
    "--step-times."
)
_SPREAD = 1.0
"""Coefficient of variation of prompts and replies, which are log-normal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--step-times",
        type=Path,
        default=Path(__file__).with_name("llama-135m-int8.json"),
        metavar="FILE",
        help="report of loadtests engine --sections steps --output FILE (default: that of a 135M "
        "Llama shape in int8)",
    )
    add_sections(parser, tuple(fleets.SECTIONS))
    add_seed(parser, "everything")
    parser.add_argument(
        "--replicas",
        type=lambda text: tuple(map(count, text.split(","))),
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
    add_number(parser, "--slots", 8, "N", "of a replica")
    add_number(parser, "--max-queue", 1024, "N", "requests that may wait for a replica")
    add_number(parser, "--prefill-chunk-tokens", 256, "N", "prompt tokens read in a step")
    add_number(parser, "--turns", 4, "N", "requests of a conversation")
    add_number(parser, "--pause", 10.0, "S", "mean seconds from a reply to the next turn")
    add_number(parser, "--instruction-tokens", 128, "N", "that a conversation begins with")
    add_number(parser, "--instructions", 20, "N", "kinds of them, the k-th in proportion to 1/k")
    add_number(parser, "--prompt-tokens", 48, "N", "mean new tokens of a turn")
    add_number(parser, "--new-tokens", 64, "N", "mean tokens of a reply")
    add_number(
        parser,
        "--load",
        1.0,
        "X",
        "requests offered, as a share of what the replicas could do with full slots and without a "
        "prefix cache",
    )
    add_number(
        parser, "--seconds", 120.0, "S", "simulated time, of which the first half is not counted"
    )
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Simulates, prints and writes the report; returns 0."""
    facts = {"load": load_averages(), "seed": args.seed}
    scenario = scenario_of(args)
    sections = []
    for name in args.sections:
        sections.append(fleets.section(name, scenario, args.replicas))
        sections[-1].show(Console())
    write_reports(args, sections, facts)
    return 0


def scenario_of(args: argparse.Namespace) -> fleets.Scenario:
    """What the options describe."""
    times = StepTimes.read(args.step_times)
    limits = Limits(args.slots, args.max_queue, args.prefill_chunk_tokens, args.prefix_cache_tokens)
    workload = Workload(
        turns=args.turns,
        prompt=Length(args.prompt_tokens, _SPREAD),
        generated=Length(args.new_tokens, _SPREAD),
        pause=args.pause,
        num_instructions=args.instruction_tokens,
        num_kinds=args.instructions,
    )
    rate = args.load * fleets.capacity(times, limits, workload)
    shape = Shape(limits=limits, routing=args.routing, seed=args.seed)
    return fleets.Scenario(times, shape, workload, rate, args.seconds)
