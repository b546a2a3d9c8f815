"""``python -m loadtests run``: open-loop load on a running server."""

import argparse
import asyncio
import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.status import Status

from loadtests import LoadTestError, UsageError, add_number, add_seed
from loadtests.measurement import Section
from loadtests.open_loop import Runner, Sender, load_client, poisson_schedule
from loadtests.report import Report, make_report
from loadtests.texts import SCENARIOS, draw_jobs

DESCRIPTION = (
    "Send requests to a running server at scheduled times, however slow the answers are, and "
    "report latencies from the scheduled starts."
)
_SETTINGS = (
    *("url", "scenario", "model", "rate", "duration", "seed", "max_new_tokens"),
    *("timeout", "drain_timeout", "max_in_flight"),
)
_ABOUT = "milliseconds; first token and end to end from the scheduled start"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="where the server listens (default: %(default)s)",
    )
    parser.add_argument(
        "--scenario",
        choices=SCENARIOS,
        default="mixed",
        help="which requests to send; half of mixed ones generate (default: %(default)s)",
    )
    parser.add_argument(
        "--model", metavar="NAME", help="served model (default: the server's for each task)"
    )
    add_number(parser, "--rate", 2.0, "R", "mean requests per second")
    add_number(parser, "--duration", 30.0, "S", "seconds of load")
    add_seed(parser, "arrivals and texts")
    add_number(parser, "--max-new-tokens", 64, "N", "tokens per generation")
    add_number(parser, "--timeout", 60.0, "S", "seconds per request, from when it is sent")
    add_number(
        parser,
        "--drain-timeout",
        30.0,
        "S",
        "seconds after the load for open requests to finish; others count as errors",
    )
    add_number(
        parser,
        "--max-in-flight",
        1000,
        "N",
        "maximum open requests; the wait of others counts in their latency",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument(
        "--allow-errors", action="store_true", help="exit with 0 even if requests failed"
    )
    parser.add_argument(
        "--allow-remote", action="store_true", help="allow a server on another machine"
    )


def main(args: argparse.Namespace) -> int:
    """Runs, prints and writes the report; returns 1 if requests failed without --allow-errors."""
    if args.model is not None and args.scenario == "mixed":
        raise UsageError("--model names one model, and the mixed scenario needs several")
    if not args.allow_remote and not is_loopback(args.url):
        raise UsageError(f"{args.url} is another machine; loading it needs --allow-remote")
    report = asyncio.run(run_load_test(args, Console(stderr=True)))
    if args.output is not None:
        document = {"settings": {name: getattr(args, name) for name in _SETTINGS}}
        text = json.dumps(document | report.as_json(), indent=2)
        args.output.write_text(f"{text}\n", encoding="utf-8")
    print_report(Console(), report)
    return 1 if report.failed and not args.allow_errors else 0


async def run_load_test(settings: argparse.Namespace, console: Console) -> Report:
    """Checks that the server is ready and loads it."""
    schedule = poisson_schedule(settings.rate, settings.duration, settings.seed)
    if not schedule:
        raise LoadTestError("the run is too short for a single request; raise --rate or --duration")
    jobs = draw_jobs(settings.scenario, len(schedule), settings.seed)
    async with load_client(settings.url) as client:
        try:
            async with asyncio.timeout(settings.timeout):
                health = await client.health()
        except TimeoutError as error:
            raise LoadTestError(f"the server at {settings.url} does not answer") from error
        if not health.ready:
            raise LoadTestError(f"the server at {settings.url} is not ready: {health.status}")
        send = Sender(client, model=settings.model, max_new_tokens=settings.max_new_tokens)
        runner = Runner(send, settings.timeout, settings.drain_timeout, settings.max_in_flight)
        with console.status("") as status:
            showing = asyncio.create_task(_show(status, runner, len(jobs)))
            run = await runner.run(jobs, schedule, settings.duration)
            showing.cancel()
    return make_report(settings.duration, run)


async def _show(status: Status, runner: Runner, total: int) -> None:
    while True:
        status.update(
            f"{runner.num_ended} of {total} requests ended, {runner.num_failed} failed, "
            f"{runner.in_flight} in flight"
        )
        await asyncio.sleep(0.2)


def is_loopback(url: str) -> bool:
    """Whether the host of a URL is ``localhost`` or a loopback address; it is not resolved."""
    host = urlsplit(url).hostname
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of request and what was measured of it, in milliseconds."""

    request: str
    measure: str
    count: int
    p50: float
    p90: float
    p99: float
    max: float


def print_report(console: Console, report: Report) -> None:
    """Prints throughput, the latencies of each kind of request, and the errors."""
    console.print(
        f"offered {report.offered_rate:.2f}/s, achieved {report.achieved_rate:.2f}/s: "
        f"{report.succeeded} of {report.requests} requests in {report.elapsed:.1f} s"
    )
    if report.tokens:
        console.print(f"{report.tokens} tokens, {report.tokens_per_second:.1f} tokens/s")
    console.print(f"at most {report.peak_in_flight} in flight")
    if report.start_delay is not None:
        console.print(f"start delay p99: {report.start_delay.p99:.1f} ms")
    rows = []
    for kind, latencies in report.kinds.items():
        for name, each in (
            ("time to first token", latencies.time_to_first_token),
            ("between tokens", latencies.inter_token),
            ("end to end", latencies.end_to_end),
        ):
            if each is not None:
                times = each.p50, each.p90, each.p99, each.max
                rows.append(Row(kind.value, name, each.count, *times))
    for name, about, found in (("latencies", _ABOUT, rows), ("errors", "by type", report.errors)):
        if found:
            Section(name, about, 1, tuple(found), ()).show(console)
