"""``python -m loadtests run``: open-loop load on a running server."""

import argparse
import asyncio
import ipaddress
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from loadtests import LoadTestError, UsageError, add_number, add_seed
from loadtests.open_loop import Limits, Progress, Runner, Sender, load_client, poisson_schedule
from loadtests.report import Latencies, Report, Settings, Summary, make_report
from loadtests.texts import SCENARIOS, draw_jobs

DESCRIPTION = (
    "Send requests to a running server at scheduled times, however slow the answers are, and "
    "report latencies from the scheduled starts."
)


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
    settings = Settings(**{each.name: getattr(args, each.name) for each in fields(Settings)})
    if settings.model is not None and settings.scenario == "mixed":
        raise UsageError("--model names one model, and the mixed scenario needs several")
    if not args.allow_remote and not is_loopback(settings.url):
        raise UsageError(f"{settings.url} is another machine; loading it needs --allow-remote")
    report = asyncio.run(run_load_test(settings, Console(stderr=True)))
    if args.output is not None:
        args.output.write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
    print_report(Console(), report)
    return 1 if report.failed and not args.allow_errors else 0


async def run_load_test(settings: Settings, console: Console) -> Report:
    """Checks that the server is ready and loads it, with a progress bar on the console."""
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
        limits = Limits(settings.timeout, settings.drain_timeout, settings.max_in_flight)
        with progress_bar(console, len(jobs)) as show:
            run = await Runner(send, limits, show).run(jobs, schedule, settings.duration)
    return make_report(settings, run)


def is_loopback(url: str) -> bool:
    """Whether the host of a URL is ``localhost`` or a loopback address; it is not resolved."""
    host = urlsplit(url).hostname
    if host is None:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[Progress], None]]:
    """A bar of finished requests; yields the function that updates it."""
    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("in flight {task.fields[in_flight]}  errors {task.fields[failed]}"),
        TimeElapsedColumn(),
    )
    with ProgressBar(*columns, console=console) as bar:
        task = bar.add_task("", total=total, in_flight=0, failed=0)

        def show(progress: Progress) -> None:
            bar.update(
                task,
                completed=progress.ended,
                in_flight=progress.in_flight,
                failed=progress.failed,
            )

        yield show


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
    console.print(_latency_table(report))
    if report.errors:
        console.print(_error_table(report))


def _latency_table(report: Report) -> Table:
    table = Table(title="milliseconds; first token and end to end from the scheduled start")
    for name in ("request", "measure"):
        table.add_column(name)
    for name in ("count", "p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    for kind, latencies in report.kinds.items():
        for measure, summary in _measures(latencies):
            if summary is not None:
                table.add_row(kind.value, measure, *_cells(summary))
    return table


def _measures(latencies: Latencies) -> tuple[tuple[str, Summary | None], ...]:
    return (
        ("time to first token", latencies.time_to_first_token),
        ("between tokens", latencies.inter_token),
        ("end to end", latencies.end_to_end),
    )


def _cells(summary: Summary) -> tuple[str, ...]:
    times = (summary.p50, summary.p90, summary.p99, summary.max)
    return (str(summary.count), *(f"{time:.1f}" for time in times))


def _error_table(report: Report) -> Table:
    table = Table(title="errors")
    for name in ("type", "status", "count", "example"):
        table.add_column(name, justify="right" if name == "count" else "left")
    for error in report.errors:
        status = "-" if error.status is None else str(error.status)
        table.add_row(error.error_type, status, str(error.count), escape(error.example))
    return table
