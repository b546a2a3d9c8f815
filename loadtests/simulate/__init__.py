"""``python -m loadtests simulate``: many replicas, by a simulation with measured step times."""

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from uvicorn.loops.auto import auto_loop_factory

from loadtests import UsageError, count, names_of, positive
from loadtests.engines import LoadedCausal
from loadtests.measurement import Section, add_report_options, load_averages, write_reports
from loadtests.scaling.load import SHARES
from loadtests.simulate import fleets, one_machine, timed_engine
from loadtests.simulate.calibration import measure_steps
from loadtests.simulate.cluster import Shape
from loadtests.simulate.replica import Limits
from loadtests.simulate.router import POLICIES
from loadtests.simulate.scaled import autoscaling
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Length, Workload
from maskdial.config import load_config

DESCRIPTION = (
    "Simulate replicas of the server behind a gateway, a router and an autoscaler, under "
    "conversations that begin at random times. How long the steps of a replica take is read from "
    "--step-times, or measured with --bundle. The sections one-machine and timed-engine compare "
    "the simulation with a server, and with its engine, to say how far it can be trusted."
)
_CHECKS = ("one-machine", "timed-engine")
SECTIONS = (*_CHECKS, *fleets.SECTIONS, "autoscaling")
_DEFAULT_SECTIONS = SECTIONS[len(_CHECKS) :]


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
    parser.add_argument(
        "--sections",
        type=names_of(SECTIONS),
        default=_DEFAULT_SECTIONS,
        metavar="A,B",
        help=f"what to find out, of {','.join(SECTIONS)} (default: all but the first two)",
    )
    parser.add_argument(
        "--measure-seconds",
        type=positive,
        default=20.0,
        metavar="S",
        help="measuring time: for the step times, and in the first two sections for each "
        "rate (default: %(default)s)",
    )
    parser.add_argument(
        "--shares",
        type=_shares,
        default=SHARES,
        metavar="X,X",
        help="rates of the section one-machine, as shares of what a closed loop achieves "
        f"(default: {','.join(map(str, SHARES))})",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws everything")
    _add_cluster_options(parser.add_argument_group("the cluster"))
    _add_workload_options(parser.add_argument_group("its load"))
    add_report_options(parser)


def _add_cluster_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--replicas",
        type=_counts,
        default=(10, 100),
        metavar="N,N",
        help="sizes of the fleets (default: 10,100)",
    )
    group.add_argument("--slots", type=count, default=8, help="(default: %(default)s)")
    group.add_argument("--max-queue", type=count, default=1024, help="(default: %(default)s)")
    group.add_argument(
        "--prefill-chunk-tokens", type=count, default=256, help="(default: %(default)s)"
    )
    group.add_argument(
        "--prefix-cache-tokens",
        type=int,
        default=11_000,
        metavar="N",
        help="tokens that a replica's prefix cache holds; 0: none (default: %(default)s)",
    )
    group.add_argument(
        "--routing",
        choices=POLICIES,
        default="two-choices",
        help="where a section does not vary it (default: %(default)s)",
    )
    group.add_argument(
        "--spread",
        type=positive,
        default=1.25,
        metavar="X",
        help="session and prefix pass over a replica without a free slot that has more than X "
        "times the mean number of requests (default: %(default)s)",
    )
    group.add_argument(
        "--gateway-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="time of the gateway per request, where a section does not vary it (default: 0)",
    )
    group.add_argument(
        "--gateway-workers",
        type=count,
        default=1,
        metavar="N",
        help="requests that the gateway works on at a time (default: %(default)s)",
    )


def _add_workload_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--load",
        type=positive,
        default=1.0,
        metavar="X",
        help="requests offered, as a share of what the replicas could do with full slots and "
        "without a prefix cache (default: %(default)s)",
    )
    group.add_argument(
        "--seconds",
        type=positive,
        default=120.0,
        metavar="S",
        help="simulated time, of which the first half is not counted (default: %(default)s)",
    )
    for name, default, text in (
        ("turns", 4, "requests of a conversation"),
        ("instruction-tokens", 128, "tokens that a conversation begins with"),
        ("instructions", 20, "different instructions; the k-th is used in proportion to 1/k"),
        ("prompt-tokens", 48, "mean new tokens of a turn"),
        ("new-tokens", 64, "mean tokens of a reply"),
    ):
        group.add_argument(
            f"--{name}",
            type=count,
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    group.add_argument(
        "--length-spread",
        type=float,
        default=1.0,
        metavar="X",
        help="coefficient of variation of both, log-normal; 0: all alike (default: %(default)s)",
    )
    group.add_argument(
        "--pause",
        type=positive,
        default=10.0,
        metavar="S",
        help="mean seconds from a reply to the next turn (default: %(default)s)",
    )


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def _shares(text: str) -> tuple[float, ...]:
    return tuple(positive(part) for part in text.split(","))


def main(args: argparse.Namespace) -> int:
    """Simulates, prints and writes the report; returns 0.

    Raises:
        UsageError: the options do not say which bundle or which step times.
    """
    if args.bundle is None:
        if args.step_times is None:
            raise UsageError("simulate needs --step-times or --bundle")
        if set(_CHECKS).intersection(args.sections):
            raise UsageError(f"the sections {' and '.join(_CHECKS)} need --bundle")
    facts = {"load": load_averages(), "seed": args.seed}
    console = Console()
    sections: list[Section] = []
    # The same loop as the server's.
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        for section in _simulate(args, runner):
            section.show(console)
            sections.append(section)
    write_reports(args, sections, facts)
    return 0


def _simulate(args: argparse.Namespace, runner: asyncio.Runner) -> Iterator[Section]:
    """The sections, each as soon as it is asked for."""
    seconds, num_tokens, seed = args.measure_seconds, args.new_tokens, args.seed
    model = None if args.bundle is None else LoadedCausal.load(args.bundle, load_config({}))
    if args.step_times is not None:
        times = StepTimes.read(args.step_times)
    else:
        assert model is not None, "there are step times or a bundle"
        times = runner.run(measure_steps(model, seconds, np.random.default_rng(seed)))
    if model is not None and "one-machine" in args.sections:
        shares = args.shares
        yield runner.run(one_machine.measure(model, times, seconds, num_tokens, seed, shares))
    if model is not None and "timed-engine" in args.sections:
        yield runner.run(timed_engine.measure(model, times, seconds, num_tokens, seed))
    scenario = scenario_of(args, times)
    for name, simulate in fleets.SECTIONS.items():
        if name in args.sections:
            yield simulate(scenario, args.replicas)
    if "autoscaling" in args.sections:
        yield autoscaling(scenario)


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
