"""The closed loop: clients that each send the next request when the last is answered."""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from loadtests import LoadTestError
from loadtests.server import Connection, Reply, count_tokens, post
from maskdial.bundle.bundle import Bundle


@dataclass(frozen=True, slots=True)
class Work:
    """What a model is asked for: a greedy stream of so many tokens; with 0, a classification."""

    num_tokens: int

    @classmethod
    def of(cls, bundle: Bundle, num_tokens: int) -> "Work":
        """Chooses by the model's task.

        Raises:
            LoadTestError: the model neither generates nor classifies.
        """
        task = bundle.manifest.task
        if task not in ("generate", "classify"):
            raise LoadTestError(
                f"the task of {bundle.path} is {task}; this needs generate or classify"
            )
        return cls(num_tokens if task == "generate" else 0)

    def request(self, text: str) -> bytes:
        """The HTTP request for a text."""
        if not self.num_tokens:
            return post("/classify", json.dumps({"inputs": text}).encode())
        parameters = {"max_new_tokens": self.num_tokens, "ignore_eos": True}
        body = {"inputs": text, "parameters": parameters, "stream": True}
        return post("/generate", json.dumps(body).encode())

    def check(self, reply: Reply) -> None:
        """Raises LoadTestError if the request failed or tokens are missing."""
        num_events = count_tokens(reply.body)
        if not reply.ok or num_events != self.num_tokens:
            raise LoadTestError(f"a reply ended after {num_events} tokens: {reply}")


async def capacity(port: int, requests: Sequence[bytes], num_clients: int, seconds: float) -> float:
    """Requests a second that clients get answered, whatever the replies say."""
    supply = itertools.cycle(requests)
    started = time.perf_counter()

    async def client() -> int:
        connection = await Connection.open(port)
        num_answered = 0
        while time.perf_counter() - started < seconds:
            await connection.send(next(supply))
            num_answered += 1
        connection.close()
        return num_answered

    numbers = await asyncio.gather(*(client() for _ in range(num_clients)))
    return sum(numbers) / (time.perf_counter() - started)
