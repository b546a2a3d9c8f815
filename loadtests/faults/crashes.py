"""``python -m loadtests faults crashes``: the server is killed while clients ask it."""

import argparse
import asyncio
import random
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from loadtests import LoadTestError, add_number
from loadtests.faults.mix import Question, draw_questions, essence, learn_answers
from loadtests.faults.outcome import Outcome, add_clients
from loadtests.measurement import Section
from loadtests.server import Client, running_server, spawn_server
from maskdial.bundle.bundle import hash_files
from maskdial.registry.catalog import STARTER_FOLDER

DESCRIPTION = (
    "Serve copies of the starter models to clients that repeat what was not answered, kill the "
    "server (SIGKILL) at random moments and start it again at the same address; then report "
    "requests without a reply, replies that differ from those that the same requests had alone, "
    "the times until it was ready, and files that have changed. MASKDIAL_* variables configure the "
    "rest."
)
_QUESTION = "what is lost when the server is killed"
_MOMENTS = (0.0, 4.0)
"""Seconds after it is ready that it is killed."""
_EARLY_MOMENTS = (0.1, 1.5)
_EARLY_EVERY = 4
"""Every so many times, it is killed once more so soon after the start of its process."""
_RETRY_SECONDS = 0.05
_PATIENCE = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_number(parser, "--times", 50, "N")
    add_clients(parser, 16)


def run(args: argparse.Namespace) -> Outcome:
    """Kills the server again and again."""
    with tempfile.TemporaryDirectory() as folder:
        models = {
            path.name: Path(shutil.copytree(path, Path(folder) / path.name))
            for path in sorted(STARTER_FOLDER.iterdir())
            if path.is_dir()
        }
        crashes = Crashes(models, args.seed)
        asyncio.run(crashes.run(args.times, args.clients))
        row = crashes.row()
    failed = bool(row.lost or row.differing or row.changed_files)
    return Outcome(Section("crashes", _QUESTION, 1, (row,), ()), failed)


@dataclass(frozen=True, slots=True)
class Row:
    """All requests. ``retries``: attempts that ended without a reply; ``lost``: requests that had
    none in two minutes; ``ready_*``: seconds from a start to readiness, first of an idle machine,
    then of the restarts, with the clients trying.
    """

    kills: int
    requests: int
    retries: int
    lost: int
    differing: int
    changed_files: int
    first_ready_s: float
    ready_p50_s: float
    ready_max_s: float


class Crashes:
    """The server's lives, the clients, and what came of them."""

    def __init__(self, models: Mapping[str, Path], seed: int) -> None:
        self._models = models
        self._rng = random.Random(seed)
        self._questions = draw_questions(seed)
        self._hashes = self._hash()
        self._ready_seconds: list[float] = []
        self._num_kills = self._num_requests = self._num_retries = 0
        self._num_lost = self._num_differing = 0

    async def run(self, times: int, num_clients: int) -> None:
        """Kills the server so many times, while the clients ask."""
        port = _free_port()
        with ExitStack() as stack:
            server = stack.enter_context(running_server(self._models, port=port))
            self._ready_seconds.append(server.ready_seconds)
            answers = await learn_answers(port, self._questions)
            finished = asyncio.Event()
            clients = [
                asyncio.create_task(self._client(port, answers, finished))
                for _ in range(num_clients)
            ]
            for number in range(times):
                await asyncio.sleep(self._rng.uniform(*_MOMENTS))
                server.process.kill()
                self._num_kills += 1
                stack.close()
                if number % _EARLY_EVERY == 0:
                    await self._kill_early(port)
                server = await asyncio.to_thread(
                    stack.enter_context, running_server(self._models, port=port)
                )
                self._ready_seconds.append(server.ready_seconds)
            finished.set()
            await asyncio.gather(*clients)

    async def _kill_early(self, port: int) -> None:
        process = spawn_server(self._models, port=port)
        await asyncio.sleep(self._rng.uniform(*_EARLY_MOMENTS))
        process.kill()
        await asyncio.to_thread(process.communicate)
        self._num_kills += 1

    async def _client(
        self, port: int, answers: Mapping[Question, bytes], finished: asyncio.Event
    ) -> None:
        client = Client(port)
        while not finished.is_set():
            question = self._rng.choice(self._questions)
            self._num_requests += 1
            until = time.perf_counter() + _PATIENCE
            while not await self._is_answered(client, question, answers[question]):
                self._num_retries += 1
                if time.perf_counter() > until:
                    self._num_lost += 1
                    break
                await asyncio.sleep(_RETRY_SECONDS)
        client.close()

    async def _is_answered(self, client: Client, question: Question, answer: bytes) -> bool:
        try:
            reply = await client.send(question.encode())
        except LoadTestError:
            return False
        self._num_differing += reply.ok and essence(reply.body) != answer
        return reply.ok

    def _hash(self) -> list[Mapping[str, str]]:
        folders = self._models.values()
        return [hash_files(each, [path.name for path in each.iterdir()]) for each in folders]

    def row(self) -> Row:
        """The counts; call it while the bundles are there."""
        first, *restarts = self._ready_seconds
        changed = sum(
            len(before.items() ^ after.items())
            for before, after in zip(self._hashes, self._hash(), strict=True)
        )
        return Row(
            self._num_kills,
            self._num_requests,
            self._num_retries,
            self._num_lost,
            self._num_differing,
            changed,
            first,
            statistics.median(restarts),
            max(restarts),
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
