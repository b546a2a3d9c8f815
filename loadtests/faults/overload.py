"""``python -m loadtests faults overload``: five times what the server can do."""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from loadtests import LoadTestError, add_number
from loadtests.closed_loop import capacity
from loadtests.faults.outcome import Outcome
from loadtests.measurement import Section, median
from loadtests.open_loop import poisson_schedule
from loadtests.report import percentile
from loadtests.server import Connection, ServerProcess, post, running_server
from loadtests.texts import draw_jobs

DESCRIPTION = (
    "Find how many requests a second the starter models answer, offer them a multiple of that, and "
    "report what is refused, how long what is accepted takes, whether health checks are answered "
    "meanwhile, and how soon a request is as fast again as before. MASKDIAL_* variables configure "
    "the rest."
)
_QUESTION = "requests far above capacity"
_NOTES = (
    "latencies in ms, from the scheduled start; ready: GET /health/ready ten times a second; back: "
    "seconds after the last request was sent, until one takes at most twice the median before",
)
_CALIBRATION_SECONDS = 5.0
_CLIENTS = 16
_HEALTH = b"GET /health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_REFUSALS = (429, 503)  # the queue is full, or there are too many connections
_TIMEOUT = 120.0
_RECOVERY_TIMEOUT = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_number(parser, "--times", 5.0, "X")
    add_number(parser, "--seconds", 60, "N", "length of the overload")


def run(args: argparse.Namespace) -> Outcome:
    """Offers both routes more than they can do."""
    with running_server({}) as server:
        rows = asyncio.run(_measure(server, args))
    section = Section("overload", _QUESTION, 1, rows, (), _NOTES)
    return Outcome(section, any(row.lost for row in rows))


@dataclass(frozen=True, slots=True)
class Row:
    """One route. Rates are a second; ``refused`` is by 429 or 503, ``lost`` is without a reply, or
    with another error.
    """

    route: str
    capacity: float
    offered: float
    answered: float
    refused: float
    lost: int
    before_p50: float
    answered_p50: float
    answered_p99: float
    refused_p99: float
    ready_p99: float
    back: float


async def _measure(server: ServerProcess, args: argparse.Namespace) -> tuple[Row, ...]:
    rows = []
    for path, scenario in (("/fill-mask", "classify"), ("/generate", "generate")):
        texts = [job.text for job in draw_jobs(scenario, 100, args.seed)]
        requests = [post(path, json.dumps(_body(path, text)).encode()) for text in texts]
        rows.append(await _overload(server.port, path, requests, args))
    return tuple(rows)


def _body(path: str, text: str) -> dict[str, object]:
    if path == "/fill-mask":
        return {"inputs": f"{text} [MASK]"}
    return {"inputs": text, "parameters": {"max_new_tokens": 16, "ignore_eos": True}}


async def _overload(
    port: int, path: str, requests: Sequence[bytes], args: argparse.Namespace
) -> Row:
    alone = [await _timed(port, requests[0]) for _ in range(20)]
    before = median(took for _, took in alone)
    most = await capacity(port, requests, _CLIENTS, _CALIBRATION_SECONDS)
    times = poisson_schedule(args.times * most, args.seconds, args.seed)
    health: list[float] = []
    checking = asyncio.create_task(_check_health(port, health))
    outcomes = await _offer(port, requests, times)
    back = await _recovery(port, requests[0], 2 * before)
    checking.cancel()
    answered = sorted(took for status, took in outcomes if status == 200)
    refused = sorted(took for status, took in outcomes if status in _REFUSALS)
    return Row(
        path,
        most,
        len(times) / args.seconds,
        len(answered) / args.seconds,
        len(refused) / args.seconds,
        len(outcomes) - len(answered) - len(refused),
        before,
        percentile(answered, 50),
        percentile(answered, 99),
        percentile(refused, 99) if refused else 0.0,
        percentile(sorted(health), 99),
        back,
    )


async def _offer(
    port: int, requests: Sequence[bytes], times: Sequence[float]
) -> list[tuple[int, float]]:
    """Sends requests at their times, each on a connection of its own, as strangers do."""
    started = time.perf_counter()
    sending = []
    for request, at in zip(itertools.cycle(requests), times, strict=False):
        await asyncio.sleep(started + at - time.perf_counter())
        sending.append(asyncio.create_task(_timed(port, request, since=started + at)))
    return await asyncio.gather(*sending)


async def _timed(port: int, request: bytes, *, since: float | None = None) -> tuple[int, float]:
    """A request's status, 0 without a reply, and its time in ms."""
    started = time.perf_counter() if since is None else since
    try:
        async with asyncio.timeout(_TIMEOUT):
            connection = await Connection.open(port)
            try:
                status = (await connection.send(request)).status
            finally:
                connection.close()
    except (LoadTestError, OSError, TimeoutError):
        status = 0
    return status, 1e3 * (time.perf_counter() - started)


async def _check_health(port: int, took: list[float]) -> None:
    while True:
        status, milliseconds = await _timed(port, _HEALTH)
        took.append(milliseconds if status == 200 else 1e3 * _TIMEOUT)
        await asyncio.sleep(0.1)


async def _recovery(port: int, request: bytes, enough: float) -> float:
    started = time.perf_counter()
    while time.perf_counter() - started < _RECOVERY_TIMEOUT:
        status, took = await _timed(port, request)
        if status == 200 and took <= enough:
            break
    return time.perf_counter() - started
