"""``python -m loadtests keys``: what keys cost, and who gets in while they are exchanged."""

import argparse
import asyncio
import itertools
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from loadtests import LoadTestError, count, positive
from loadtests.measurement import (
    Section,
    add_report_options,
    load_averages,
    median,
    median_ratio,
    take_turns,
    write_reports,
)
from loadtests.server import Connection, ServerProcess, post, running_server

DESCRIPTION = (
    "Serve the starter models with keys (--api-key-file) and without, to clients that each send "
    "the next request when the last is answered, in turns, on the first routes of each dialect. "
    "Then have clients with good keys, with wrong ones, with none and with one that is withdrawn "
    "ask at once, while the file is exchanged and read again (SIGHUP). MASKDIAL_* variables "
    "configure the rest."
)
_NOTES = (
    "requests a second of all clients; chat, responses and messages are refused for want of a chat "
    "template, so theirs is the time of a refusal",
)
_NUM_KEYS = 1000
_SECONDS_BETWEEN = 0.5
_RELOAD_TIMEOUT = 30.0
_GREEDY = {"max_new_tokens": 8, "temperature": 0}
_CHAT = {"model": "hybrid", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
_OPENAI = {"model": "hybrid", "max_tokens": 8, "temperature": 0}
_BODIES: dict[str, object] = {
    "/fill-mask": {"inputs": "The [MASK] sat down."},
    "/classify": {"inputs": "A good film."},
    "/score": {"inputs": "Once upon a time", "model": "hybrid"},
    "/generate": {"inputs": "Once upon", "parameters": _GREEDY},
    "/generate_stream": {"inputs": "Once upon", "parameters": _GREEDY},
    "/tokenize": {"inputs": "Once upon a time", "model": "hybrid"},
    "/v1/completions": {**_OPENAI, "prompt": "Once upon"},
    "/v1/chat/completions": _CHAT,
    "/v1/responses": {"model": "hybrid", "input": "Hi", "max_output_tokens": 8},
    "/v1/messages": _CHAT,
    "/v1/messages/count_tokens": {"model": "hybrid", "messages": _CHAT["messages"]},
    "/v2/repository/index": {},
}
_UNAUTHORIZED = 401


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--seconds",
        type=positive,
        default=5.0,
        metavar="S",
        help="for the turns of each route, and for exchanging keys (default: %(default)s)",
    )
    parser.add_argument(
        "--clients", type=count, default=8, metavar="N", help="of each kind (default: %(default)s)"
    )
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 1 if a status was wrong or a reply lost."""
    facts = {"load": load_averages()}
    with tempfile.TemporaryDirectory() as folder:
        keys = KeyFile(Path(folder) / "keys.txt")
        with running_server({}) as plain, running_server({}, api_key_file=keys.path) as closed:
            speeds = asyncio.run(_measure(plain, closed, keys, args))
            statuses = {row.route: row.status for row in speeds}
            exchange = asyncio.run(Exchange(closed, keys, statuses).run(args.seconds, args.clients))
    sections = [
        Section("keys", "what does a key cost", 1, speeds, tuple(map(_finding, speeds)), _NOTES),
        Section("exchange", "who gets in while keys are exchanged", 1, exchange, (), ()),
    ]
    for section in sections:
        section.show(Console())
    write_reports(args, sections, facts)
    num_wrong = sum(row.wrong for row in speeds) + sum(row.wrong + row.lost for row in exchange)
    return 1 if num_wrong else 0


@dataclass(frozen=True, slots=True)
class Speed:
    """One route: requests a second, and replies with another status than alone."""

    route: str
    status: int
    without_keys: float
    with_keys: float
    ratio: float
    wrong: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Clients of one kind: ``wrong`` counts other statuses than theirs, ``lost`` requests without
    a reply.
    """

    clients: str
    requests: int
    answered: int
    unauthorized: int
    wrong: int
    lost: int


def _finding(row: Speed) -> str:
    return f"{row.route}: {row.ratio:.2f} times the requests a second with keys ({row.wrong} wrong)"


class KeyFile:
    """A file of many keys, and of one that is in every other version of it only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.good = [f"good-{number}" for number in range(_NUM_KEYS)]
        self.withdrawn = "withdrawn"
        self.write(with_withdrawn=True)

    def write(self, *, with_withdrawn: bool) -> None:
        """Replaces the file in one step: the server never finds half of it."""
        keys = [*self.good, self.withdrawn] if with_withdrawn else self.good
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{key}:{key}\n" for key in keys), encoding="utf-8")
        os.replace(new, self.path)


def _request(path: str, key: str | None) -> bytes:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return post(path, json.dumps(_BODIES[path]).encode(), headers)


async def _measure(
    plain: ServerProcess, closed: ServerProcess, keys: KeyFile, args: argparse.Namespace
) -> tuple[Speed, ...]:
    return tuple([await _measure_route(path, plain, closed, keys, args) for path in _BODIES])


async def _measure_route(
    path: str, plain: ServerProcess, closed: ServerProcess, keys: KeyFile, args: argparse.Namespace
) -> Speed:
    alone = await _status(plain.port, _request(path, None))
    found: Counter[int] = Counter()
    # The last of the keys: the comparison reads all of them whichever it is.
    some = keys.good[-args.clients :]
    turn = partial(_turn, seconds=args.seconds / 10, found=found)
    rates = await take_turns(
        {
            "without": partial(turn, plain.port, [_request(path, None)] * args.clients),
            "with": partial(turn, closed.port, [_request(path, key) for key in some]),
        },
        args.seconds,
    )
    without, with_keys = rates["without"], rates["with"]
    return Speed(
        path,
        alone,
        median(without),
        median(with_keys),
        median_ratio(with_keys, without),
        found.total() - found[alone],
    )


async def _status(port: int, request: bytes) -> int:
    connection = await Connection.open(port)
    status = (await connection.send(request)).status
    connection.close()
    return status


async def _turn(
    port: int, requests: Sequence[bytes], *, seconds: float, found: Counter[int]
) -> float:
    """Requests a second of clients that each repeat their own one."""
    started = time.perf_counter()

    async def client(request: bytes) -> int:
        connection = await Connection.open(port)
        number = 0
        while time.perf_counter() - started < seconds:
            found[(await connection.send(request)).status] += 1
            number += 1
        connection.close()
        return number

    numbers = await asyncio.gather(*map(client, requests))
    return sum(numbers) / (time.perf_counter() - started)


class Exchange:
    """All kinds of clients at once, while the file is exchanged again and again.

    Args:
        server: with keys.
        keys: its file.
        statuses: of the replies to good clients, by path.
    """

    def __init__(self, server: ServerProcess, keys: KeyFile, statuses: Mapping[str, int]) -> None:
        self._server = server
        self._keys = keys
        self._statuses = statuses
        self._found: dict[str, Counter[str]] = {}
        self._until = 0.0
        self._withdrawn = {True}
        """Whether the withdrawn key lets in; either, while the file is exchanged."""
        self._num_exchanges = 0

    async def run(self, seconds: float, num_clients: int) -> tuple[Kind, ...]:
        """Asks for so many seconds, with so many clients of each kind."""
        self._until = time.perf_counter() + seconds
        kinds: dict[str, tuple[Sequence[str | None], set[bool]]] = {
            "good": (self._keys.good[:num_clients], {True}),
            "wrong": ([f"wrong-{number}" for number in range(num_clients)], {False}),
            "none": ([None] * num_clients, {False}),
            "withdrawn": ([self._keys.withdrawn] * num_clients, self._withdrawn),
        }
        self._found = {name: Counter() for name in kinds}
        await asyncio.gather(
            self._change(),
            *(
                self._client(name, key, allowed)
                for name, (keys, allowed) in kinds.items()
                for key in keys
            ),
        )
        return tuple(
            Kind(
                f"{name}, {self._num_exchanges} exchanges" if name == "withdrawn" else name,
                *(counts[key] for key in ("requests", "answered", "unauthorized", "wrong", "lost")),
            )
            for name, counts in self._found.items()
        )

    async def _client(self, name: str, key: str | None, allowed: Set[bool]) -> None:
        counts = self._found[name]
        connection = await Connection.open(self._server.port)
        for path in itertools.cycle(_BODIES):
            if time.perf_counter() > self._until:
                break
            if connection.closed:
                connection = await Connection.open(self._server.port)
            counts["requests"] += 1
            before = set(allowed)
            try:
                status = (await connection.send(_request(path, key))).status
            except LoadTestError:
                counts["lost"] += 1
                continue
            let_in = status != _UNAUTHORIZED
            counts["answered" if let_in else "unauthorized"] += 1
            right = not let_in or status == self._statuses[path]
            counts["wrong"] += not right or let_in not in before | allowed
        connection.close()

    async def _change(self) -> None:
        request = _request("/tokenize", self._keys.withdrawn)
        for present in itertools.cycle((False, True)):
            await asyncio.sleep(_SECONDS_BETWEEN)
            if time.perf_counter() > self._until:
                break
            self._withdrawn.update((True, False))
            self._keys.write(with_withdrawn=present)
            self._server.reload()
            async with asyncio.timeout(_RELOAD_TIMEOUT):
                while (await _status(self._server.port, request) != _UNAUTHORIZED) != present:
                    pass
            self._withdrawn.discard(not present)
            self._num_exchanges += 1
