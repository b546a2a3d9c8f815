"""Our server in a process of its own, and streams over HTTP."""

import asyncio
import json
import random
import time
from contextlib import ExitStack

from loadtests.checkpoints import causal_words
from loadtests.compare.runners import ours
from loadtests.compare.runners.streams import Times, decode_seconds, num_lead
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work
from loadtests.connection import Connection, post
from loadtests.errors import LoadTestError
from loadtests.server_process import running_server

_OK = 200
_EVENT = b'data: {"index"'

prepare = ours.prepare


def open_runner(setup: Setup) -> Runner:
    """Starts the server."""
    with ExitStack() as stack:
        server = stack.enter_context(running_server(ours.models(setup), **ours.settings(setup)))
        return _Server(server.port, setup, stack.pop_all())


class _Server:
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
        """When the request was sent, and when each token came."""
        text = "".join(self._rng.choices(self._words, k=length))
        parameters = {"max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"inputs": text, "parameters": parameters, "stream": True}
        request = post("/generate", json.dumps(body).encode())
        connection = await Connection.open(self._port)
        times = [time.perf_counter()]

        def note(data: bytes) -> None:
            times.extend([time.perf_counter()] * data.count(_EVENT))

        try:
            reply = await connection.send(request, note)
        finally:
            connection.close()
        if reply.status != _OK or len(times) != 1 + num_tokens:
            raise LoadTestError(
                f"a stream ended after {len(times) - 1} tokens: "
                f"{reply.status} {reply.body[-200:].decode(errors='replace')}"
            )
        return times
