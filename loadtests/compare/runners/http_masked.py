"""Our server in a process of its own, and /fill-mask over HTTP."""

import asyncio
import json
import random
import time
from contextlib import ExitStack

from loadtests.checkpoints import MASK, masked_words
from loadtests.compare.runners import ours
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work
from loadtests.connection import Connection, post
from loadtests.errors import LoadTestError
from loadtests.server_process import running_server

_OK = 200
_NUM_SPECIAL = 2

prepare = ours.prepare


def open_runner(setup: Setup) -> Runner:
    """Starts the server."""
    with ExitStack() as stack:
        server = stack.enter_context(running_server(ours.models(setup), **ours.settings(setup)))
        return _Server(server.port, setup.seed, stack.pop_all())


class _Server:
    def __init__(self, port: int, seed: int, stack: ExitStack) -> None:
        self._port = port
        self._words = masked_words()
        self._rng = random.Random(seed)
        self._stack = stack

    def run(self, work: Work) -> float:
        texts = [self._text(work.length) for _ in range(work.batch)]
        request = post("/fill-mask", json.dumps({"inputs": texts}).encode())
        return asyncio.run(self._send(request, work.repeats))

    def close(self) -> None:
        self._stack.close()

    def _text(self, num_tokens: int) -> str:
        words = self._rng.choices(self._words, k=num_tokens - _NUM_SPECIAL)
        words[len(words) // 2] = MASK
        return " ".join(words)

    async def _send(self, request: bytes, repeats: int) -> float:
        """The mean time of a request, after one that is not counted."""
        connection = await Connection.open(self._port)
        try:
            await self._answer(connection, request)
            started = time.perf_counter()
            for _ in range(repeats):
                await self._answer(connection, request)
            return (time.perf_counter() - started) / repeats
        finally:
            connection.close()

    async def _answer(self, connection: Connection, request: bytes) -> None:
        reply = await connection.send(request)
        if reply.status != _OK:
            raise LoadTestError(
                f"a request failed: {reply.status} {reply.body[-200:].decode(errors='replace')}"
            )
