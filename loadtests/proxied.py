"""``python -m loadtests proxied``: servers behind a proxy against the same number without one."""

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from rich.console import Console
from uvicorn.loops.auto import auto_loop_factory

from loadtests import UsageError, count, positive
from loadtests.closed_loop import (
    Classification,
    Client,
    Generation,
    Work,
    drive,
    http_clients,
)
from loadtests.measurement import (
    Section,
    add_report_options,
    load_averages,
    median,
    take_turns,
    write_reports,
)
from loadtests.texts import draw_jobs

DESCRIPTION = (
    "Compare replicas behind a proxy, such as Ray's, with as many servers started by hand whose "
    "clients are spread evenly. All of them run already, on this machine; each side is idle while "
    "the other is measured."
)
_QUESTION = "closed loops through the proxy against the servers themselves"
_NOTES = (
    "ratio: of the throughputs, within a round; one: milliseconds of a request that is alone, of "
    "one token or one text; the load generator runs on the same cores",
)
_NUM_TEXTS = 256
_ALONE = 50
# A machine shared with others changes its speed within seconds, so many short turns are compared.
_TURN_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work; units are tokens or requests."""

    work: str
    clients: int
    direct_units_per_s: float
    proxied_units_per_s: float
    ratio: float
    least_ratio: float
    greatest_ratio: float
    direct_one_ms: float
    proxied_one_ms: float
    added_one_ms: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What one side did: closed loops, and the median seconds of a request that is alone."""

    throughput: float
    alone: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--direct", type=_ports, required=True, metavar="PORT,PORT", help="of the servers"
    )
    parser.add_argument("--proxy", type=count, required=True, metavar="PORT", help="of the proxy")
    parser.add_argument(
        "--work",
        choices=("generate", "classify"),
        default="generate",
        help="what is asked of the servers' default models (default: %(default)s)",
    )
    parser.add_argument(
        "--clients",
        type=count,
        default=16,
        metavar="N",
        help="of all servers (default: %(default)s)",
    )
    parser.add_argument(
        "--new-tokens", type=count, default=32, metavar="N", help="of a text (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=60.0,
        metavar="S",
        help="measuring time (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="draws the texts")
    add_report_options(parser)


def _ports(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 0.

    Raises:
        UsageError: there are fewer clients than servers.
    """
    if args.clients < len(args.direct):
        raise UsageError("there have to be as many clients as servers, at least")
    facts = {"load": load_averages(), "seed": args.seed}
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        section = runner.run(_measure(args))
    section.show(Console())
    write_reports(args, [section], facts)
    return 0


async def _measure(args: argparse.Namespace) -> Section:
    generates = args.work == "generate"
    work: Work = Generation(args.new_tokens) if generates else Classification()
    one: Work = Generation(1) if generates else work
    texts = [job.text for job in draw_jobs(args.work, _NUM_TEXTS, args.seed)]
    seconds = min(args.seconds / 8, _TURN_SECONDS)
    sides = {
        "direct": partial(_sample, work, one, texts, args.direct, args.clients, seconds),
        "proxied": partial(_sample, work, one, texts, (args.proxy,), args.clients, seconds),
    }
    samples = await take_turns(sides, args.seconds)
    direct, proxied = samples["direct"], samples["proxied"]
    ratios = [
        behind.throughput / before.throughput
        for behind, before in zip(proxied, direct, strict=True)
    ]
    row = Row(
        work=args.work,
        clients=args.clients,
        direct_units_per_s=median(each.throughput for each in direct),
        proxied_units_per_s=median(each.throughput for each in proxied),
        ratio=median(ratios),
        least_ratio=min(ratios),
        greatest_ratio=max(ratios),
        direct_one_ms=1e3 * median(each.alone for each in direct),
        proxied_one_ms=1e3 * median(each.alone for each in proxied),
        added_one_ms=1e3
        * median(
            behind.alone - before.alone for behind, before in zip(proxied, direct, strict=True)
        ),
    )
    finding = (
        f"{row.ratio:.0%} of the throughput behind the proxy ({row.least_ratio:.0%} to "
        f"{row.greatest_ratio:.0%}), which adds {row.added_one_ms:.1f} ms to a request alone"
    )
    return Section("proxied", _QUESTION, len(direct), (row,), (finding,), _NOTES)


async def _sample(
    work: Work,
    one: Work,
    texts: Sequence[str],
    ports: Sequence[int],
    num_clients: int,
    seconds: float,
) -> Sample:
    """Loads one side, and then sends it requests one by one."""
    async with AsyncExitStack() as stack:
        clients: list[Client] = []
        for number, port in enumerate(ports):
            share = len(range(number, num_clients, len(ports)))
            clients += await stack.enter_async_context(http_clients(work, texts, port, share))
        await drive(clients, texts, 0)  # warm-up
        found = await drive(clients, texts, seconds)
        (single,) = await stack.enter_async_context(http_clients(one, texts, ports[0], 1))
        times = []
        for text in texts[:_ALONE]:
            started = time.perf_counter()
            await single(text)
            times.append(time.perf_counter() - started)
    return Sample(found.per_second, median(times))
