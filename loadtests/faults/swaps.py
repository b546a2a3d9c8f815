"""``python -m loadtests faults swaps``: a model is replaced while requests come in."""

import argparse
import asyncio
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from loadtests import LoadTestError, add_bundles, add_number
from loadtests.faults.outcome import Outcome, add_clients
from loadtests.measurement import Section
from loadtests.server import Client, ServerProcess, post, running_server
from loadtests.texts import draw_jobs
from maskdial.bundle.bundle import Bundle, load_bundle, read_manifests, write_manifest

DESCRIPTION = (
    "Serve a bundle, replace it by a copy with another version while clients send requests, and "
    "report failed requests, differing replies, memory, file descriptors and threads. MASKDIAL_* "
    "variables configure the rest."
)
_QUESTION = "requests lost, and resources kept, when a model is replaced under load"
_NOTES = (
    "before: after 4 swaps and 0.4 times as many requests; after: after another 0.2 times; both "
    "are the least within 5 seconds; every reply to a text is compared with the first one to it",
)
_NAME = "live"
_KEY = "loadtests"
_WARMING_SWAPS = 4
_NUM_TEXTS = 50
_NUM_TOKENS = 8
_SETTLE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_LOAD_TIMEOUT = 120.0
_MB = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_bundles(parser, "bundle to serve, a classifier or a generator")
    add_number(parser, "--requests", 10000, "N", "requests")
    add_number(parser, "--swaps", 20, "N", "replacements")
    add_clients(parser, 8)


def run(args: argparse.Namespace) -> Outcome:
    """Replaces each model."""
    bundles = [load_bundle(path.resolve().name, path) for path in args.bundles]
    rows = tuple(
        asyncio.run(measure(bundle, args.requests, args.swaps, args.clients, args.seed))
        for bundle in bundles
    )
    section = Section("swaps", _QUESTION, 1, rows, tuple(map(_finding, rows)), _NOTES)
    return Outcome(section, any(row.errors or row.differing for row in rows))


@dataclass(frozen=True, slots=True)
class Row:
    """One model; megabytes are 1e6 bytes."""

    model: str
    requests: int
    swaps: int
    errors: int
    differing: int
    seconds: float
    slowest_ms: float
    before_mb: float
    after_mb: float
    files_before: int
    files_after: int
    threads_before: int
    threads_after: int


def _finding(row: Row) -> str:
    change = 100 * (row.after_mb / row.before_mb - 1)
    return (
        f"{row.model}: {row.requests:,} requests during {row.swaps} swaps, {row.errors} errors, "
        f"{row.differing} differing replies; memory {change:+.1f}%"
    )


class Load:
    """Clients that ask one model, and what they were told."""

    def __init__(self, port: int, bodies: Sequence[bytes]) -> None:
        self.num_requests = 0
        self.num_errors = 0
        self.num_differing = 0
        self.slowest = 0.0
        self.first_error = ""
        self._port = port
        self._requests = [post(f"/models/{_NAME}", body) for body in bodies]
        self._replies: dict[int, bytes] = {}
        self._answered = asyncio.Condition()

    async def run(
        self, num_clients: int, num_requests: int, swaps: Coroutine[Any, Any, None] | None = None
    ) -> None:
        """Sends requests until so many are answered and the swaps are over.

        Raises:
            LoadTestError: a swap failed.
        """
        last, numbers = self.num_requests + num_requests, itertools.count()
        swapping = asyncio.create_task(swaps or asyncio.sleep(0))

        async def ask_on() -> None:
            client = Client(self._port)
            while self.num_requests < last or not swapping.done():
                await self._ask(client, next(numbers) % len(self._requests))
            client.close()

        await asyncio.gather(*(ask_on() for _ in range(num_clients)))
        await swapping

    async def reached(self, num_requests: int) -> None:
        """Waits until so many requests are answered."""
        async with self._answered:
            await self._answered.wait_for(lambda: self.num_requests >= num_requests)

    async def _ask(self, client: Client, number: int) -> None:
        started = time.perf_counter()
        try:
            reply = await client.send(self._requests[number])
        except LoadTestError as error:
            self._fail(str(error))
        else:
            if not reply.ok:
                self._fail(str(reply))
            elif self._replies.setdefault(number, reply.body) != reply.body:
                self.num_differing += 1
        self.slowest = max(self.slowest, time.perf_counter() - started)
        async with self._answered:
            self.num_requests += 1
            self._answered.notify_all()

    def _fail(self, message: str) -> None:
        self.num_errors += 1
        self.first_error = self.first_error or message


async def measure(
    bundle: Bundle, num_requests: int, num_swaps: int, num_clients: int, seed: int
) -> Row:
    """Serves a bundle and replaces it under load.

    Raises:
        LoadTestError: the server did not start, or refused to load a version.
    """
    bodies = _bodies(bundle, seed)
    with (
        two_versions(bundle) as folder,
        running_server({}, model_dir=folder, admin_key=_KEY) as server,
    ):
        load = Load(server.port, bodies)
        await _swap(server.url, 0)
        warming = _swaps(server.url, load, num_requests // 5, _WARMING_SWAPS)
        await load.run(num_clients, num_requests // 5, warming)
        # A version's memory grows with the largest batch that it meets, so both ends meet as many.
        await load.run(num_clients, num_requests // 5)
        before = await _settled(server)
        load.slowest, warmed, started = 0.0, load.num_requests, time.perf_counter()
        swaps = _swaps(server.url, load, num_requests, num_swaps)
        await load.run(num_clients, num_requests, swaps)
        seconds, asked = time.perf_counter() - started, load.num_requests - warmed
        await load.run(num_clients, num_requests // 5)
        after = await _settled(server)
    if load.first_error:
        Console(stderr=True).print(f"first error: {load.first_error}", markup=False)
    return Row(
        model=bundle.name,
        requests=asked,
        swaps=num_swaps,
        errors=load.num_errors,
        differing=load.num_differing,
        seconds=seconds,
        slowest_ms=load.slowest * 1e3,
        before_mb=before[0] / _MB,
        after_mb=after[0] / _MB,
        files_before=before[1],
        files_after=after[1],
        threads_before=before[2],
        threads_after=after[2],
    )


@contextmanager
def two_versions(bundle: Bundle) -> Iterator[Path]:
    """A folder with a bundle twice, as ``0`` and ``1``: alike but for the name of its source."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            copy = Path(folder) / str(number)
            shutil.copytree(bundle.path, copy, ignore=shutil.ignore_patterns("*.full.*"))
            (manifest,) = read_manifests(bundle.name, copy)
            source = f"{manifest.source} ({number})"
            write_manifest(copy, manifest.model_copy(update={"source": source}))
        yield Path(folder)


def _bodies(bundle: Bundle, seed: int) -> list[bytes]:
    parameters = {}
    if bundle.manifest.task == "generate":
        parameters = {"max_new_tokens": _NUM_TOKENS, "do_sample": False}
    elif bundle.manifest.task != "classify":
        raise LoadTestError(f"{bundle.path} neither generates nor classifies")
    return [
        json.dumps({"inputs": job.text, "parameters": parameters}).encode()
        for job in draw_jobs("classify", _NUM_TEXTS, seed)
    ]


async def _swaps(url: str, load: Load, num_requests: int, num_swaps: int) -> None:
    """Replaces the model at even distances of the requests."""
    first = load.num_requests
    for number in range(num_swaps):
        due = first + (number + 1) * num_requests // (num_swaps + 1)
        await load.reached(due)
        await _swap(url, number % 2)


async def _swap(url: str, version: int) -> None:
    body = {"model": _NAME, "path": str(version)}
    headers = {"x-api-key": _KEY}
    async with httpx.AsyncClient(base_url=url, timeout=_LOAD_TIMEOUT, trust_env=False) as client:
        reply = await client.post("/models/load", json=body, headers=headers)
    if not reply.is_success:
        raise LoadTestError(f"a version was not loaded: {reply.text}")


async def _settled(server: ServerProcess) -> tuple[int, int, int]:
    """The least memory, files and threads within a time in which nothing is asked."""
    deadline = time.perf_counter() + _SETTLE_SECONDS
    samples: list[tuple[int, int, int]] = []
    while not samples or time.perf_counter() < deadline:
        samples.append(server.resources())
        await asyncio.sleep(_POLL_SECONDS)
    memory, files, threads = map(min, zip(*samples, strict=True))
    return memory, files, threads
