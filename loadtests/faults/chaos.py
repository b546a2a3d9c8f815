"""``python -m loadtests faults chaos``: mixed load through broken connections, and other faults."""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
import psutil

from loadtests import LoadTestError, add_number, count
from loadtests.faults.mix import Question, draw_questions, essence, learn_answers
from loadtests.faults.outcome import Outcome, add_clients, busy_gauges
from loadtests.faults.proxy import FaultyProxy
from loadtests.measurement import Section
from loadtests.server import Client, Reply, ServerProcess, running_server
from maskdial.registry.catalog import STARTER_FOLDER

DESCRIPTION = (
    "Serve the starter models to clients behind a proxy that cuts, delays and repeats what they "
    "send, while the server is stopped for moments, its child processes are killed, a model comes "
    "and goes, and clients leave; then compare every complete reply with the one that the same "
    "request had alone, and the server's access log with what the clients saw. MASKDIAL_* "
    "variables configure the rest."
)
_QUESTION = "what is lost, doubled or wrong under faults"
_KEY = "loadtests-chaos"
_SETTLE_SECONDS = 8.0
_CLIENT_TIMEOUT = 60.0
_IMPATIENT_SHARE = 0.1
_DEADLINE_SHARE = 0.1
# What a client may be told that asks in good faith.
_EXPECTED = frozenset({200, 408, 429, 503, 504})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_number(parser, "--seconds", 300, "N")
    parser.add_argument(
        "--requests", type=count, metavar="N", help="end sooner, after so many (default: never)"
    )
    add_clients(parser, 16)


def run(args: argparse.Namespace) -> Outcome:
    """Lets everything go wrong."""
    records = Records()
    with running_server({}, on_line=records.read, log_format="json", admin_key=_KEY) as server:
        chaos = Chaos(server, draw_questions(args.seed), args.seed)
        asyncio.run(chaos.run(args.seconds, args.clients, args.requests))
    row = chaos.row(records)
    section = Section("chaos", _QUESTION, 1, (row,), chaos.findings(records))
    failed = row.differing or row.unexpected or row.missing or row.doubled or row.busy
    return Outcome(section, bool(failed))


@dataclass(frozen=True, slots=True)
class Row:
    """All requests. ``missing``: complete replies without a record in the access log, or with
    another status there; ``doubled``: requests with more records than the proxy's repeats explain;
    ``busy``: gauges that are not back at zero.
    """

    requests: int
    replies: int
    ok: int
    differing: int
    unexpected: int
    records: int
    missing: int
    doubled: int
    busy: int


class Records:
    """The server's access log: the statuses of each request, by its id."""

    def __init__(self) -> None:
        self.statuses: dict[str, list[int | None]] = {}
        self.num_tracebacks = 0

    def read(self, line: str) -> None:
        """Takes a line of the log."""
        self.num_tracebacks += "Traceback" in line
        try:
            record = json.loads(line)
        except ValueError:
            return
        if "request_id" in record:
            self.statuses.setdefault(record["request_id"], []).append(record.get("status"))


class Chaos:
    """The clients, the faults, and what came of them."""

    def __init__(self, server: ServerProcess, questions: Sequence[Question], seed: int) -> None:
        self._server = server
        self._questions = questions
        self._seed = seed
        self._rng = random.Random(seed)
        self._proxy = FaultyProxy(server.port, seed)
        self._until = 0.0
        self._max_requests = sys.maxsize
        self._num_requests = 0
        self._num_differing = 0
        self._example = ""
        self._replies: dict[str, int] = {}
        self._events: Counter[str] = Counter()
        self._busy: list[str] = []
        self._resources: list[tuple[int, int, int]] = []

    async def run(self, seconds: float, num_clients: int, max_requests: int | None = None) -> None:
        """Lets everything go wrong for so long, and then waits until it has settled."""
        self._max_requests = max_requests or sys.maxsize
        answers = await learn_answers(self._server.port, self._questions)
        self._resources.append(self._server.resources())
        await self._proxy.start()
        self._until = time.perf_counter() + seconds
        disturbing = asyncio.create_task(self._disturb())
        clients = (self._client(number, answers) for number in range(num_clients))
        await asyncio.gather(*clients)
        await disturbing
        await self._proxy.stop()
        await asyncio.sleep(_SETTLE_SECONDS)
        self._busy = await busy_gauges(self._server)
        self._resources.append(self._server.resources())

    def _goes_on(self) -> bool:
        return self._num_requests < self._max_requests and time.perf_counter() < self._until

    async def _client(self, number: int, answers: dict[Question, bytes]) -> None:
        client = Client(self._proxy.port)
        for turn in itertools.takewhile(lambda _: self._goes_on(), itertools.count()):
            question = self._rng.choice(self._questions)
            request_id = f"chaos-{self._seed}-{number}-{turn}"
            self._num_requests += 1
            try:
                reply = await self._ask(client, question, request_id)
            except LoadTestError:
                continue
            self._replies[request_id] = reply.status
            # An error event within a stream is a reply, too: that of the time that was up.
            if (
                reply.ok
                and essence(reply.body) != answers[question]
                and b"timeout" not in reply.body
            ):
                self._num_differing += 1
                self._example = self._example or (
                    f"{question.path} {question.body.decode()}: {reply.body.decode()}, "
                    f"alone {answers[question].decode()}"
                )
        client.close()

    async def _ask(self, client: Client, question: Question, request_id: str) -> Reply:
        impatient = self._rng.random() < _IMPATIENT_SHARE
        if self._rng.random() < _DEADLINE_SHARE and not question.path.startswith("/v1"):
            body = {**json.loads(question.body), "timeout": self._rng.uniform(0.001, 0.3)}
            question = Question(question.path, json.dumps(body).encode())
        patience = self._rng.uniform(0, 0.3) if impatient else _CLIENT_TIMEOUT
        return await client.send(question.encode({"x-request-id": request_id}), patience)

    async def _disturb(self) -> None:
        kinds = [self._pause, self._kill_children, self._swap]
        while self._goes_on():
            await asyncio.sleep(self._rng.uniform(1.0, 4.0))
            await self._rng.choice(kinds)()

    async def _pause(self) -> None:
        self._server.process.suspend()
        await asyncio.sleep(self._rng.uniform(0.1, 1.5))
        self._server.process.resume()
        self._events["pauses"] += 1

    async def _kill_children(self) -> None:
        for child in self._server.process.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
            self._events["killed children"] += 1

    async def _swap(self) -> None:
        headers = {"authorization": f"Bearer {_KEY}"}
        path = str(STARTER_FOLDER / "sentiment")
        async with httpx.AsyncClient(
            base_url=self._server.url, headers=headers, timeout=_CLIENT_TIMEOUT
        ) as http:
            await http.post("/models/load", json={"model": "spare", "path": path})
            await http.post("/models/unload", json={"model": "spare"})
        self._events["loads and unloads"] += 1

    def row(self, records: Records) -> Row:
        """The counts."""
        statuses = records.statuses
        ours = {name: found for name, found in statuses.items() if name.startswith("chaos-")}
        repeated = sum(len(found) - 1 for found in ours.values())
        missing = sum(
            status not in statuses.get(name, ()) for name, status in self._replies.items()
        )
        return Row(
            self._num_requests,
            len(self._replies),
            sum(status == httpx.codes.OK for status in self._replies.values()),
            self._num_differing,
            sum(status not in _EXPECTED for status in self._replies.values()),
            sum(map(len, ours.values())),
            missing,
            max(0, repeated - self._proxy.num_repeated),
            len(self._busy),
        )

    def findings(self, records: Records) -> tuple[str, ...]:
        """What happened beside the counts."""
        faults = ", ".join(f"{number} {name}" for name, number in self._proxy.num_faults.items())
        events = ", ".join(f"{number} {name}" for name, number in self._events.items())
        (before, *others), (after, *later) = self._resources
        kept = zip(("file descriptors", "threads"), others, later, strict=True)
        return (
            f"connections: {faults}",
            f"meanwhile: {events}",
            f"resident MB: {before // 1_000_000} to {after // 1_000_000}; "
            + "; ".join(f"{name}: {first} to {last}" for name, first, last in kept),
            f"statuses: {dict(sorted(Counter(self._replies.values()).items()))}; "
            f"tracebacks in the log: {records.num_tracebacks}",
            *([f"first that differs: {self._example}"] if self._example else ()),
        )
