"""Our server in a process of its own, over HTTP."""

import asyncio
import json
import random
import time
from contextlib import ExitStack

from loadtests import LoadTestError
from loadtests.checkpoints import MASK, causal_words, masked_words
from loadtests.closed_loop import Work as Streams
from loadtests.compare.peers import Runner, Times, decode_seconds, num_lead, ours
from loadtests.compare.setup import Setup
from loadtests.compare.work import Work
from loadtests.server import Connection, count_tokens, post, running_server

_NUM_SPECIAL = 2
prepare = ours.prepare


def open_runner(setup: Setup) -> Runner:
    """Starts the server."""
    kind = _Generate if setup.model.family == "causal" else _FillMask
    with ExitStack() as stack:
        server = stack.enter_context(running_server(ours.models(setup), **ours.settings(setup)))
        return kind(server.port, setup, stack.pop_all())


class _Generate:
    """Streams of /generate."""

    def __init__(self, port: int, setup: Setup, stack: ExitStack) -> None:
        self._port = port
        self._words = causal_words(setup.model.num_words)
        self._rng = random.Random(setup.seed)
        self._stack = stack

    def run(self, work: Work) -> float:
        num_tokens = 1 if work.kind == "prefill" else work.repeats + num_lead(work)
        streams = asyncio.run(self._generate(work, num_tokens))
        if work.kind == "prefill":
            return streams[0][1] - streams[0][0]
        return decode_seconds(streams, work.repeats)

    def close(self) -> None:
        self._stack.close()

    async def _generate(self, work: Work, num_tokens: int) -> list[Times]:
        return await asyncio.gather(
            *(self._read(work.length, num_tokens) for _ in range(work.batch))
        )

    async def _read(self, length: int, num_tokens: int) -> Times:
        text = "".join(self._rng.choices(self._words, k=length))
        work = Streams(num_tokens)
        connection = await Connection.open(self._port)
        times = [time.perf_counter()]

        def note(data: bytes) -> None:
            times.extend([time.perf_counter()] * count_tokens(data))

        try:
            work.check(await connection.send(work.request(text), note))
        finally:
            connection.close()
        return times


class _FillMask:
    """/fill-mask with one mask per text."""

    def __init__(self, port: int, setup: Setup, stack: ExitStack) -> None:
        self._port = port
        self._words = masked_words()
        self._rng = random.Random(setup.seed)
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
        if not reply.ok:
            raise LoadTestError(f"a request failed: {reply}")
