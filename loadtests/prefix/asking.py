"""Asking a server for the next message of a conversation."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests import LoadTestError
from loadtests.server import ServerProcess, running_server

MODEL = "agent"
_TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came for a request.

    Attributes:
        first_token: seconds to it.
        cpu: seconds of the server's processor time until the end.
        num_prompt: tokens of the prompt.
        num_cached: those that came from the prefix cache.
        bits: the text with the log-probabilities of its tokens, as JSON has them.
    """

    first_token: float
    cpu: float
    num_prompt: int
    num_cached: int
    bits: str


class Agent:
    """A client of one server."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=_TIMEOUT, trust_env=False)

    def ask(self, body: Mapping[str, Any], max_tokens: int = 5) -> Answer:
        """Sends a request, and reads its stream."""
        sent = {
            "model": MODEL,
            "max_tokens": max_tokens,
            "seed": 1,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 5,
            "stream_options": {"include_usage": True},
        }
        cpu, started, first = self.server.cpu_seconds(), time.perf_counter(), 0.0
        bits, usage = [], dict[str, Any]()
        with self.http.stream("POST", "/v1/chat/completions", json={**body, **sent}) as reply:
            if reply.status_code != httpx.codes.OK:
                reply.read()
                raise LoadTestError(f"the server refuses a request: {reply.text[:500]}")
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    first = first or time.perf_counter() - started
                    bits.append((choice.get("delta"), choice.get("logprobs")))
        return Answer(
            first,
            self.server.cpu_seconds() - cpu,
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            json.dumps(_written(bits)),
        )

    def tokens(self, body: Mapping[str, Any]) -> list[int]:
        """The prompt of a request."""
        reply = self.http.post("/tokenize", json={"model": MODEL, **body}).json()
        return list(reply["tokens"])

    def counted(self, name: str) -> float:
        """A counter or gauge of `/metrics`, over all labels."""
        lines = self.http.get("/metrics").text.splitlines()
        found = (line for line in lines if line.startswith((f"{name} ", f"{name}{{")))
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def disk(self) -> dict[str, Any]:
        """What the server says of its prefixes on disk."""
        info: dict[str, Any] = self.http.get("/info").json()["prefix_disk"]
        return info

    def wait_until_written(self) -> None:
        """Until no block was written for a second."""
        written = -1.0
        while (now := self.counted("maskdial_prefix_disk_written_bytes_total")) != written:
            written = now
            time.sleep(1.0)


def _written(events: list[tuple[Any, Any]]) -> list[Any]:
    """Deltas without the first one's role, and log-probabilities."""
    return [
        (
            {name: value for name, value in (delta or {}).items() if name != "role" and value},
            None if logprobs is None else logprobs.get("content"),
        )
        for delta, logprobs in events
    ]


@contextmanager
def serving(bundle: Path, context: int, **settings: Any) -> Iterator[Agent]:
    """An agent, and a server of its own until the end of the block."""
    models = {MODEL: bundle}
    with running_server(models, timeout=600.0, max_context=context, **settings) as server:
        agent = Agent(server)
        try:
            yield agent
        finally:
            agent.http.close()
