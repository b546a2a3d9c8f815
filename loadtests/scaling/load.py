"""Throughput and latency against the offered load, in an open loop."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from loadtests import LoadTestError
from loadtests.closed_loop import Work, drive, http_clients, work_of
from loadtests.measurement import Section
from loadtests.open_loop import Limits, Run, Runner, poisson_schedule
from loadtests.report import Report, Settings, Summary, make_report
from loadtests.server import Connection, ServerProcess, count_tokens, running_server
from loadtests.texts import Job, draw_jobs
from maskdial.bundle.bundle import Bundle

_QUESTION = "throughput and latency against the offered load"
SHARES = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2)
_CLIENTS = {"causal": 8, "encoder-decoder": 8, "masked": 32}
_CAPACITY_SECONDS = 0.5
_TIMEOUT = 120.0
_DRAIN_TIMEOUT = 60.0
_MAX_IN_FLIGHT = 1000

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

    async def __call__(self, text: str, on_token: Callable[[], None]) -> None:
        """Sends a text and reads the whole reply; calls ``on_token`` at each token."""

        def note(data: bytes) -> None:
            for _ in range(count_tokens(data)):
                on_token()

        connection = await self._connect()
        try:
            reply = await connection.send(self._work.request(text), note)
            self._work.count(reply)
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)

    async def aclose(self) -> None:
        """Closes all connections."""
        for connection in self._idle:
            connection.close()

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        return await Connection.open(self._port)


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
    work = work_of(bundle, num_tokens)
    capacity = await measure_capacity(bundle, server, work, _CAPACITY_SECONDS * seconds, seed)
    rows: list[Row] = []
    for number, share in enumerate(SHARES):
        settings = settings_of(
            bundle, server.url, share * capacity, seconds, num_tokens, seed + number
        )
        rows.append(await measure_rate(bundle.name, server, work, share, settings))
    return rows


async def measure_capacity(
    bundle: Bundle, server: ServerProcess, work: Work, seconds: float, seed: int
) -> float:
    """Requests per second in a closed loop."""
    texts = [job.text for job in draw_jobs("classify", 256, seed)]
    num_clients = _CLIENTS[bundle.manifest.family]
    async with http_clients(work, texts, server.port, num_clients) as clients:
        await drive(clients, texts, 0)  # warm-up
        sample = await drive(clients, texts, seconds)
    return sample.requests / sample.seconds


def settings_of(
    bundle: Bundle, url: str, rate: float, seconds: float, num_tokens: int, seed: int
) -> Settings:
    """A run at a rate, in requests per second."""
    return Settings(
        url=url,
        scenario="generate" if bundle.manifest.family == "causal" else "classify",
        model=bundle.name,
        rate=rate,
        duration=seconds,
        seed=seed,
        max_new_tokens=num_tokens,
        timeout=_TIMEOUT,
        drain_timeout=_DRAIN_TIMEOUT,
        max_in_flight=_MAX_IN_FLIGHT,
    )


async def measure_rate(
    model: str, server: ServerProcess, work: Work, share: float, settings: Settings
) -> Row:
    """Offers one rate."""
    cpu = server.cpu_seconds()
    report = make_report(settings, await offer(settings, work, server.port))
    cpu = server.cpu_seconds() - cpu
    return summarize(model, share, report, cpu, server.resident_bytes())


def arrivals(settings: Settings) -> tuple[tuple[Job, float], ...]:
    """What a run sends, each with its time in seconds.

    Raises:
        LoadTestError: that is nothing.
    """
    schedule = poisson_schedule(settings.rate, settings.duration, settings.seed)
    if not schedule:
        raise LoadTestError("the run is too short for a single request; raise --seconds")
    jobs = draw_jobs(settings.scenario, len(schedule), settings.seed)
    return tuple(zip(jobs, schedule, strict=True))


async def offer(settings: Settings, work: Work, port: int) -> Run:
    """Sends what `arrivals` says."""
    jobs, schedule = zip(*arrivals(settings), strict=True)
    limits = Limits(settings.timeout, settings.drain_timeout, settings.max_in_flight)
    async with AsyncExitStack() as stack:
        sender = Sender(work, port)

        async def send(job: Job, on_token: Callable[[], None]) -> None:
            await sender(job.text, on_token)

        stack.push_async_callback(sender.aclose)
        return await Runner(send, limits).run(jobs, schedule, settings.duration)


def summarize(
    model: str, share: float, report: Report, cpu_seconds: float, resident_bytes: int
) -> Row:
    """Summarizes one rate, with the server's CPU time and memory."""
    (latencies,) = report.kinds.values()
    whole, first = latencies.end_to_end, latencies.time_to_first_token
    return Row(
        model=model,
        share=share,
        offered=report.offered_rate,
        achieved=report.achieved_rate,
        requests=report.requests,
        failed=report.failed,
        p50_ms=None if whole is None else whole.p50,
        p99_ms=_p99(whole),
        first_token_p99_ms=_p99(first),
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
