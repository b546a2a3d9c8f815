"""Throughput and latency against the offered load, in an open loop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtests import LoadTestError
from loadtests.closed_loop import Work, capacity
from loadtests.measurement import Section
from loadtests.open_loop import Runner, poisson_schedule
from loadtests.report import Report, Summary, make_report
from loadtests.server import Connection, ServerProcess, count_tokens, running_server
from loadtests.texts import Job, draw_jobs
from maskdial.bundle.bundle import Bundle

_QUESTION = "throughput and latency against the offered load"
SHARES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2)
_CLIENTS = {"causal": 8, "encoder-decoder": 8, "masked": 32}
_CAPACITY_SECONDS = 0.5
_TIMEOUT = 120.0
_DRAIN_TIMEOUT = 60.0

_NOTES = (
    "share: of the throughput of a closed loop of 8 streams or 32 texts; milliseconds count from "
    "the scheduled start of a request",
    "cpu: the server's CPU milliseconds per request; resident: its memory after that rate; delay: "
    "how late the load generator sent requests",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One rate. Rates are in requests per second; a time is None if nothing was measured."""

    model: str
    share: float
    offered: float
    achieved: float
    requests: int
    failed: int
    p50_ms: float | None
    p99_ms: float | None
    first_token_p99_ms: float | None
    tokens_per_second: float
    most_open: int
    cpu_ms: float
    resident_mb: float
    delay_p99_ms: float | None


class Sender:
    """Sends texts over as many connections as are open at once."""

    def __init__(self, work: Work, port: int) -> None:
        self._work = work
        self._port = port
        self._idle: list[Connection] = []

    async def __call__(self, job: Job, on_token: Callable[[], None]) -> None:
        """Sends a job's text and reads the whole reply; calls ``on_token`` at each token."""

        def note(data: bytes) -> None:
            for _ in range(count_tokens(data)):
                on_token()

        self._idle = [each for each in self._idle if not each.closed]
        connection = self._idle.pop() if self._idle else await Connection.open(self._port)
        try:
            self._work.check(await connection.send(self._work.request(job.text), note))
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    def close(self) -> None:
        """Closes all connections."""
        for connection in self._idle:
            connection.close()


async def measure(bundles: Sequence[Bundle], seconds: float, num_tokens: int, seed: int) -> Section:
    """Loads a server of each model at rising rates.

    Args:
        bundles: the models.
        seconds: seconds of load per rate.
        num_tokens: tokens per generated text.
        seed: draws the arrivals and the texts.
    """
    rows: list[Row] = []
    for bundle in bundles:
        with running_server({bundle.name: bundle.path}) as server:
            rows += await _load(bundle, server, seconds, num_tokens, seed)
    findings = tuple(_finding([row for row in rows if row.model == b.name]) for b in bundles)
    return Section("load", _QUESTION, 1, tuple(rows), findings, _NOTES)


async def _load(
    bundle: Bundle, server: ServerProcess, seconds: float, num_tokens: int, seed: int
) -> list[Row]:
    work, num_clients = Work.of(bundle, num_tokens), _CLIENTS[bundle.manifest.family]
    requests = [work.request(job.text) for job in draw_jobs("classify", 256, seed)]
    await capacity(server.port, requests, num_clients, 0.1)  # warm-up
    most = await capacity(server.port, requests, num_clients, _CAPACITY_SECONDS * seconds)
    scenario = "generate" if bundle.manifest.family == "causal" else "classify"
    rows: list[Row] = []
    for number, share in enumerate(SHARES, seed):
        schedule = poisson_schedule(share * most, seconds, number)
        if not schedule:
            raise LoadTestError("the run is too short for a single request; raise --seconds")
        sender, cpu = Sender(work, server.port), server.cpu_seconds()
        runner = Runner(sender, _TIMEOUT, _DRAIN_TIMEOUT)
        jobs = draw_jobs(scenario, len(schedule), number)
        report = make_report(seconds, await runner.run(jobs, schedule, seconds))
        sender.close()
        cpu = server.cpu_seconds() - cpu
        rows.append(summarize(bundle.name, share, report, cpu, server.resident_bytes()))
    return rows


def summarize(
    model: str, share: float, report: Report, cpu_seconds: float, resident_bytes: int
) -> Row:
    """Summarizes one rate, with the server's CPU time and memory."""
    (latencies,) = report.kinds.values()
    whole = latencies.end_to_end
    return Row(
        model=model,
        share=share,
        offered=report.offered_rate,
        achieved=report.achieved_rate,
        requests=report.requests,
        failed=report.failed,
        p50_ms=None if whole is None else whole.p50,
        p99_ms=_p99(whole),
        first_token_p99_ms=_p99(latencies.time_to_first_token),
        tokens_per_second=report.tokens_per_second,
        most_open=report.peak_in_flight,
        cpu_ms=1e3 * cpu_seconds / report.requests,
        resident_mb=resident_bytes / 1e6,
        delay_p99_ms=_p99(report.start_delay),
    )


def _p99(summary: Summary | None) -> float | None:
    return None if summary is None else summary.p99


def _finding(rows: Sequence[Row]) -> str:
    least, most = rows[0], max(rows, key=lambda row: row.achieved)
    return (
        f"{least.model}: at most {most.achieved:.1f} requests per second; a request takes "
        f"{least.cpu_ms:.2f} ms of CPU at the lowest rate and {rows[-1].cpu_ms:.2f} at the highest"
    )
