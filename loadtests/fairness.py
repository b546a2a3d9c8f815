"""``python -m loadtests fairness``: polite clients beside one that sends ten times as much, or
beside a batch.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console

from loadtests import add_number, add_seed
from loadtests.measurement import Section, add_report_options, load_averages, write_reports
from loadtests.open_loop import poisson_schedule
from loadtests.report import percentile
from loadtests.server import Connection, post, running_server
from loadtests.texts import draw_jobs

DESCRIPTION = (
    "Serve the starter models to nine clients with a key each, and then to a tenth as well, which "
    "sends ten times as many texts as each of them, as fast as it is answered, or has a batch "
    "answered (--beside batch); report the nine's latencies. MASKDIAL_* variables configure the "
    "rest."
)
_QUESTION = "latency of nine clients, alone and beside a tenth"
_NOTES = (
    "alone and beside take turns; latencies in ms, of the nine only, from the scheduled start; "
    "greedy: bodies of 64 texts, or of 8 prompts with 4 texts each, 4 of them open at a time; "
    "batch: OpenAI's Batch API, bodies as the nine's; its lines a second, beside them",
)
_NUM_POLITE = 9
_NUM_GREEDY = 4
_NUM_TOKENS = 24
_NUM_LINES = 20_000  # of a batch, which is cancelled at the end of a turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--beside",
        choices=("greedy", "batch"),
        default="greedy",
        help="what the tenth client does (default: %(default)s)",
    )
    add_number(parser, "--seconds", 10, "N", "length of a turn")
    add_number(parser, "--rounds", 3, "N", "turns of each")
    add_number(parser, "--rate", 1.0, "R", "requests a second of each polite client")
    add_seed(parser, "texts and times")
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 1 if a polite request failed."""
    facts = {"load": load_averages(), "seed": args.seed}
    rows = asyncio.run(_measure(args))
    section = Section("fairness", _QUESTION, args.rounds, rows, tuple(map(_finding, rows)), _NOTES)
    section.show(Console())
    write_reports(args, [section], facts)
    return 1 if any(row.errors for row in rows) else 0


@dataclass(frozen=True, slots=True)
class Row:
    """One route; ``errors`` and latencies are the polite clients'."""

    route: str
    requests: int
    errors: int
    alone_p50: float
    alone_p99: float
    beside_p50: float
    beside_p99: float
    p99_ratio: float
    batch_lines: float


def _finding(row: Row) -> str:
    return (
        f"{row.route}: beside the other, the polite ones' p99 is {row.p99_ratio:.2f} times "
        f"that alone ({row.errors} errors)"
    )


def _bodies(route: str, texts: Sequence[str], num_inputs: int) -> list[bytes]:
    """Requests of so many texts each."""
    supply = itertools.cycle(texts)
    bodies = []
    for _ in texts:
        body: dict[str, object] = {"inputs": list(itertools.islice(supply, num_inputs))}
        if route == "/generate":
            copies = 4 if num_inputs > 1 else 1
            body["parameters"] = {
                "max_new_tokens": _NUM_TOKENS,
                "temperature": 0.8,
                "ignore_eos": True,
                "n": copies,
            }
        bodies.append(json.dumps(body).encode())
    return bodies


class _Batch:
    """A batch of one client.

    Args:
        port: of the server.
        key: the client's.
        path: what its lines are for.
        bodies: theirs.
    """

    def __init__(self, port: int, key: str, path: str, bodies: Sequence[bytes]) -> None:
        self._url = f"http://127.0.0.1:{port}/v1"
        self._key = key
        self._path = path
        self._content = "".join(
            f'{{"custom_id": "{number}", "method": "POST", "url": "{path}", "body": '
            f"{body.decode()}}}\n"
            for number, body in enumerate(bodies)
        )
        self._file_id = self._id = ""

    async def begin(self) -> None:
        """Has it answered from the beginning, and waits until that begins."""
        if not self._file_id:
            form = {"files": {"file": ("in.jsonl", self._content)}, "data": {"purpose": "batch"}}
            self._file_id = (await self._ask("POST", "/files", **form))["id"]
        window = {"endpoint": self._path, "completion_window": "24h"}
        reply = await self._ask("POST", "/batches", json={"input_file_id": self._file_id} | window)
        self._id = reply["id"]
        while reply["status"] == "validating":
            await asyncio.sleep(0.1)
            reply = await self._ask("GET", f"/batches/{self._id}")

    async def num_done(self) -> int:
        """Its lines that have answers on the disk."""
        reply = await self._ask("GET", f"/batches/{self._id}")
        return int(reply["request_counts"]["completed"])

    async def cancel(self) -> None:
        """Ends it."""
        await self._ask("POST", f"/batches/{self._id}/cancel")

    async def _ask(self, method: str, path: str, **content: Any) -> Any:
        async with httpx.AsyncClient(headers={"x-api-key": self._key}, timeout=60) as client:
            reply = await client.request(method, self._url + path, **content)
            return reply.raise_for_status().json()


class _Route:
    """One route under load: the polite clients' latencies, and the other client."""

    def __init__(
        self, path: str, port: int, keys: Sequence[str], seed: int, *, has_batch: bool
    ) -> None:
        scenario, num_inputs = ("classify", 64) if path == "/classify" else ("generate", 8)
        texts = [job.text for job in draw_jobs(scenario, 200, seed)]
        *polite, greedy = keys
        self._port = port
        self._polite = [
            [post(path, body, {"x-api-key": key}) for body in _bodies(path, texts, 1)]
            for key in polite
        ]
        self._greedy = [
            post(path, body, {"x-api-key": greedy}) for body in _bodies(path, texts, num_inputs)
        ]
        self._batch: _Batch | None = None
        if has_batch:
            bodies = itertools.islice(itertools.cycle(_bodies(path, texts, 1)), _NUM_LINES)
            self._batch = _Batch(port, greedy, path, list(bodies))
        self.num_errors = 0
        self.batch_lines: list[float] = []
        """What a batch has got a second, in each turn."""

    async def turn(self, seconds: float, rate: float, seed: int, *, beside: bool) -> list[float]:
        """Ascending latencies of the polite clients in ms."""
        num_greedy = _NUM_GREEDY if beside and self._batch is None else 0
        flood = [asyncio.create_task(self._flood()) for _ in range(num_greedy)]
        if beside and self._batch is not None:
            await self._batch.begin()
        if beside:
            await asyncio.sleep(1.0)  # the queue is full when the polite clients come
        num_before = await self._num_done(beside=beside)
        started = time.perf_counter()
        each = (
            self._client(requests, poisson_schedule(rate, seconds, seed + number), started)
            for number, requests in enumerate(self._polite)
        )
        latencies = [one for found in await asyncio.gather(*each) for one in found]
        if beside and self._batch is not None:
            num_done = await self._num_done(beside=beside) - num_before
            self.batch_lines.append(num_done / (time.perf_counter() - started))
            await self._batch.cancel()
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        return sorted(latencies)

    async def _num_done(self, *, beside: bool) -> int:
        return await self._batch.num_done() if beside and self._batch is not None else 0

    async def _client(
        self, requests: Sequence[bytes], times: Sequence[float], started: float
    ) -> list[float]:
        async def send(request: bytes, at: float) -> float:
            await asyncio.sleep(started + at - time.perf_counter())
            connection = await Connection.open(self._port)
            reply = await connection.send(request)
            connection.close()
            self.num_errors += not reply.ok
            return 1e3 * (time.perf_counter() - started - at)

        sent = zip(itertools.cycle(requests), times, strict=False)
        return await asyncio.gather(*(send(*each) for each in sent))

    async def _flood(self) -> None:
        connection = await Connection.open(self._port)
        try:
            for request in itertools.cycle(self._greedy):
                await connection.send(request)
        finally:
            connection.close()


async def _measure(args: argparse.Namespace) -> tuple[Row, ...]:
    keys = [f"loadtests-{number}" for number in range(_NUM_POLITE + 1)]
    with tempfile.NamedTemporaryFile("w") as file:
        file.writelines(f"{key}:{key}\n" for key in keys)
        file.flush()
        with (
            tempfile.TemporaryDirectory() as folder,
            running_server({}, api_key_file=file.name, batch_dir=folder) as server,
        ):
            rows = []
            for path in ("/classify", "/generate"):
                has_batch = args.beside == "batch"
                route = _Route(path, server.port, keys, args.seed, has_batch=has_batch)
                rows.append(await _measure_route(route, path, args))
            return tuple(rows)


async def _measure_route(route: _Route, path: str, args: argparse.Namespace) -> Row:
    await route.turn(2.0, args.rate, args.seed, beside=False)
    turns: dict[bool, list[list[float]]] = {False: [], True: []}
    for number in range(args.rounds):
        for beside in (False, True) if number % 2 else (True, False):
            seed = args.seed + 100 * number
            turns[beside].append(await route.turn(args.seconds, args.rate, seed, beside=beside))
    alone, near = [sorted(itertools.chain(*turns[beside])) for beside in (False, True)]
    return Row(
        path,
        len(alone) + len(near),
        route.num_errors,
        percentile(alone, 50),
        percentile(alone, 99),
        percentile(near, 50),
        percentile(near, 99),
        percentile(near, 99) / percentile(alone, 99),
        statistics.median(route.batch_lines or [0.0]),
    )
