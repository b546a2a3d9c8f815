"""The terminal: a progress bar while a run goes on, tables when it is over."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table

from loadtests.report import Latencies, Report, Summary
from loadtests.runner import Progress


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[Progress], None]]:
    """A bar of finished requests; gives the function that moves it."""
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
    """The load, the latencies of each kind of request, and the errors."""
    console.print(
        f"offered {report.offered_rate:.2f}/s, achieved {report.achieved_rate:.2f}/s: "
        f"{report.succeeded} of {report.requests} requests in {report.elapsed:.1f} s"
    )
    if report.tokens:
        console.print(f"{report.tokens} tokens, {report.tokens_per_second:.1f} tokens/s")
    console.print(f"at most {report.peak_in_flight} in flight")
    if report.start_delay is not None:
        console.print(f"p99 of the requests' start delay: {report.start_delay.p99:.1f} ms")
    console.print(_latency_table(report))
    if report.errors:
        console.print(_error_table(report))


def _latency_table(report: Report) -> Table:
    table = Table(title="milliseconds from the scheduled start")
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
    for name in ("type", "status", "count", "for example"):
        table.add_column(name, justify="right" if name == "count" else "left")
    for error in report.errors:
        status = "-" if error.status is None else str(error.status)
        table.add_row(error.error_type, status, str(error.count), escape(error.example))
    return table
