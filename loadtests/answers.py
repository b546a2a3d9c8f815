"""``python -m loadtests answers``: requests of which a share were answered before.

Servers with and without ``--answer-cache-bytes`` get the same requests in turns, one text each:
nobody has asked for the first of them, and of the others a share repeats texts of a round before.
What the server's process spends on a request is told beside what clients see of it, as that is the
same on a machine with other work.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from loadtests import LoadTestError, add_number, add_seed
from loadtests.measurement import (
    Section,
    add_report_options,
    load_averages,
    machine,
    median,
    median_ratio,
    take_turns,
    write_reports,
)
from loadtests.server import Connection, ServerProcess, post, running_server
from maskdial.registry.catalog import STARTER_FOLDER

DESCRIPTION = "Measure requests for vectors or classes of texts that were asked for before."
_ROUTES = {"classify": "/classify", "embed": "/embed"}
_SHARES = {"off": None, "0%": 0.0, "50%": 0.5, "100%": 1.0}
_WORDS = "the old house by a river had no door and its roof was made of tin".split()  # noqa: SIM905


@dataclass(frozen=True, slots=True)
class Row:
    """Requests of which a share was answered before; medians over rounds.

    Attributes:
        answered: the share; off: the server keeps no answers.
        cpu_ms: what the server's process takes for a request.
        request_ms: what a client waits for one.
        per_second: requests that all clients got answered.
        times_off: the processor time, relative to that without the cache.
    """

    answered: str
    cpu_ms: float
    request_ms: float
    per_second: float
    times_off: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="DIR",
        default=STARTER_FOLDER / "sentiment",
        help="bundle for classify or embed (default: the starter sentiment)",
    )
    add_number(parser, "--words", 40, "N", "words of a text")
    add_number(parser, "--clients", 8, "N", "requests at a time")
    add_number(parser, "--requests", 200, "N", "of a round")
    add_number(parser, "--seconds", 60.0, "S", "measuring time")
    add_seed(parser, "texts")
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 0."""
    manifest = json.loads((args.bundle / "maskdial.json").read_text(encoding="utf-8"))
    if manifest["task"] not in _ROUTES:
        raise LoadTestError(f"the task of {args.bundle} is {manifest['task']}, not classify, embed")
    models = {"model": args.bundle}
    with (
        running_server(models) as off,
        running_server(models, answer_cache_bytes=2**28) as on,
    ):
        section = asyncio.run(_measure(off, on, _ROUTES[manifest["task"]], args))
    console = Console()
    section.show(console)
    console.print(f"{machine()}, load {load_averages()}")
    write_reports(args, [section], {"seed": args.seed})
    return 0


@dataclass(frozen=True, slots=True)
class _Round:
    cpu: float  # seconds of a request
    request: float
    per_second: float


class _Texts:
    """Texts of so many words: new ones, and those ``told`` at first."""

    def __init__(self, seed: int, num_words: int, count: int) -> None:
        self._rng = random.Random(seed)
        self._num_words = num_words
        self.told = [self._new() for _ in range(count)]

    def draw(self, share: float) -> list[str]:
        """As many, of which the share was told."""
        return [
            self._rng.choice(self.told) if self._rng.random() < share else self._new()
            for _ in self.told
        ]

    def _new(self) -> str:
        return " ".join(self._rng.choice(_WORDS) for _ in range(self._num_words))


async def _measure(
    off: ServerProcess, on: ServerProcess, path: str, args: argparse.Namespace
) -> Section:
    texts = _Texts(args.seed, args.words, args.requests)
    for server in (off, on):
        await _ask(server, path, texts.told, args.clients)
    turns = {}
    for name, share in _SHARES.items():
        server = off if share is None else on
        turns[name] = partial(_round, server, path, texts, share or 0.0, args)
    rounds = await take_turns(turns, args.seconds)
    rows = [
        Row(
            name,
            median(each.cpu * 1e3 for each in of),
            median(each.request * 1e3 for each in of),
            median(each.per_second for each in of),
            median_ratio((each.cpu for each in of), (each.cpu for each in rounds["off"])),
        )
        for name, of in rounds.items()
    ]
    findings = [
        f"{row.answered} answered before: {row.times_off:.2f} times the processor time without"
        for row in rows[1:]
    ]
    question = f"{path} with texts of {args.words} words, {args.clients} clients"
    return Section("answers", question, len(rounds["off"]), tuple(rows), tuple(findings))


async def _round(
    server: ServerProcess, path: str, texts: _Texts, share: float, args: argparse.Namespace
) -> _Round:
    drawn = texts.draw(share)
    cpu, began = server.cpu_seconds(), time.perf_counter()
    times = await _ask(server, path, drawn, args.clients)
    seconds = time.perf_counter() - began
    spent = server.cpu_seconds() - cpu
    return _Round(spent / len(drawn), median(times), len(drawn) / seconds)


async def _ask(
    server: ServerProcess, path: str, texts: Sequence[str], num_clients: int
) -> list[float]:
    """Seconds of each request."""
    waiting, times = iter(texts), list[float]()

    async def client() -> None:
        connection = await Connection.open(server.port)
        for text in waiting:
            start = time.perf_counter()
            reply = await connection.send(post(path, json.dumps({"inputs": text}).encode()))
            times.append(time.perf_counter() - start)
            if not reply.ok:
                raise LoadTestError(f"a request failed: {reply}")
        connection.close()

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return times
