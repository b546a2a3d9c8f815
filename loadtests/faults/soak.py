"""``python -m loadtests faults soak``: hours of mixed load, and what the server keeps of it."""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests import LoadTestError, add_number
from loadtests.faults.mix import Question, draw_questions, essence, learn_answers
from loadtests.faults.outcome import Outcome, add_clients
from loadtests.faults.slopes import measure, median_slope
from loadtests.kinds import KINDS, SETTINGS, chatting_starters
from loadtests.measurement import Section
from loadtests.report import percentile
from loadtests.server import Client, ServerProcess, running_server

DESCRIPTION = (
    "Serve the starter models under mixed load to all of their routes for a long time; compare "
    "every reply with the one that the same request had alone, and report how memory, file "
    "descriptors and threads develop."
)
_QUESTION = "what a server loses or keeps under mixed load"
_KIND_QUESTION = "what a server keeps of each kind of request"
_SAMPLES = 400  # after the warm-up
_STEPS = 12
_MB = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_number(parser, "--minutes", 60.0, "M")
    add_number(parser, "--warm-up", 30.0, "M", "minutes before these, to fill heap and caches")
    add_clients(parser, 6)
    parser.add_argument(
        "--by-kind",
        action="store_true",
        help="one kind of request after the other, and the slope of memory under each; of the "
        "other options, only --minutes counts, which they share",
    )


def run(args: argparse.Namespace) -> Outcome:
    """Asks for so many minutes."""
    if args.by_kind:
        return _by_kind(60 * args.minutes)
    with running_server({}) as server:
        soak = Soak(server, draw_questions(args.seed), args.seed, 60 * args.warm_up)
        asyncio.run(soak.run(60 * args.minutes, args.clients))
    rows = soak.rows()
    section = Section("soak", _QUESTION, 1, rows, soak.findings())
    return Outcome(section, any(row.errors or row.differing for row in rows))


def _by_kind(seconds: float) -> Outcome:
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(chatting_starters(Path(folder)), collecting=True, **SETTINGS) as server,
    ):
        slopes, failures = [], []
        for kind in KINDS:
            try:
                slopes.append(measure(server, kind, seconds / len(KINDS)))
            except (LoadTestError, OSError) as error:
                failures.append(f"failed: {error}")
    if not slopes:
        raise LoadTestError(f"no kind of request could be measured; {failures[0]}")
    steepest = max(slopes, key=lambda slope: slope.bytes_per_request)
    finding = f"steepest: {steepest.kind}, {steepest.bytes_per_request:.0f} bytes a request"
    section = Section("slopes", _KIND_QUESTION, 1, tuple(slopes), (finding, *failures))
    return Outcome(section, bool(failures))


@dataclass(frozen=True, slots=True)
class Row:
    """One route; latencies in ms."""

    route: str
    requests: int
    errors: int
    differing: int
    p50: float
    p99: float


class Soak:
    """The clients, what they were told, and the samples of the server's resources."""

    def __init__(
        self, server: ServerProcess, questions: Sequence[Question], seed: int, warm_up: float
    ) -> None:
        self._server = server
        self._warm_up = warm_up  # seconds
        self._questions = questions
        self._rng = random.Random(seed)
        self._latencies: dict[str, list[float]] = defaultdict(list)
        self._num_errors: Counter[str] = Counter()
        self._num_differing: Counter[str] = Counter()
        self._samples: list[tuple[float, int, int, int]] = []
        """Seconds from the start, resident bytes, descriptors, threads."""

    async def run(self, seconds: float, num_clients: int) -> None:
        """Asks for so many seconds after the warm-up."""
        interval = seconds / _SAMPLES
        seconds += self._warm_up
        answers = await learn_answers(self._server.port, self._questions)
        started = time.perf_counter()
        clients = [
            asyncio.create_task(self._client(answers, started + seconds))
            for _ in range(num_clients)
        ]
        for number in itertools.count(1):
            at = time.perf_counter() - started
            self._samples.append((at, *self._server.resources()))
            if at >= seconds:
                break
            await asyncio.sleep(max(0.0, started + number * interval - time.perf_counter()))
        await asyncio.gather(*clients)

    async def _client(self, answers: dict[Question, bytes], until: float) -> None:
        client = Client(self._server.port)
        while time.perf_counter() < until:
            question = self._rng.choice(self._questions)
            begun = time.perf_counter()
            try:
                reply = await client.send(question.encode())
            except LoadTestError:
                self._num_errors[question.path] += 1
                continue
            self._latencies[question.path].append(1e3 * (time.perf_counter() - begun))
            self._num_errors[question.path] += not reply.ok
            self._num_differing[question.path] += essence(reply.body) != answers[question]
        client.close()

    def rows(self) -> tuple[Row, ...]:
        """What became of each route's requests."""
        return tuple(
            Row(
                path,
                len(latencies),
                self._num_errors[path],
                self._num_differing[path],
                percentile(sorted(latencies), 50),
                percentile(sorted(latencies), 99),
            )
            for path, latencies in sorted(self._latencies.items())
        )

    def findings(self) -> tuple[str, ...]:
        """How the resources developed after the warm-up."""
        warm = [sample for sample in self._samples if sample[0] >= self._warm_up]
        every = max(1, len(self._samples) // _STEPS)
        steps = ", ".join(f"{held / _MB:.0f}" for _, held, *_ in self._samples[::every])
        (_, first, *before), (ended, last, *after) = warm[0], warm[-1]
        middle = statistics.median(held for _, held, *_ in warm)
        slope = median_slope([(at, held) for at, held, *_ in warm])
        return (
            f"{sum(row.requests for row in self.rows()):,} requests in {ended / 60:.1f} minutes",
            f"resident memory: {first / _MB:.0f} MB after the warm-up, "
            f"{last / _MB:.0f} MB at the end, {3600 * slope / middle:+.2%} an hour",
            f"resident memory from the start, in MB, in equal steps of time: {steps}",
            f"file descriptors: {before[0]} to {after[0]}; threads: {before[1]} to {after[1]}",
        )
