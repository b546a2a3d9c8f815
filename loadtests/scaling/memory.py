"""Resident memory against slots, context and streams."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from loadtests import LoadTestError
from loadtests.measurement import Section
from loadtests.server import Connection, ServerProcess, post, running_server
from loadtests.texts import draw_jobs
from maskdial.bundle.bundle import Bundle
from maskdial.bundle.manifest import KVLayout
from maskdial.bundle.tokenizer import Tokenizer

_QUESTION = "resident memory against slots, context and streams"
_MB = 1e6
_RETURN_SECONDS = 12.0
_POLL_SECONDS = 0.2

_NOTES = (
    "reserved: the KV cache of all slots at full context; used: the part that the streams' tokens "
    "take; idle: after one stream has ended; busy: while all streams run; after: the least within "
    "12 seconds of their end, with the prefix cache off",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One server; megabytes are 1e6 bytes, ``tokens`` are per stream."""

    model: str
    slots: int
    context: int
    streams: int
    tokens: int
    reserved_mb: float
    used_mb: float
    ready_mb: float
    idle_mb: float
    busy_mb: float
    after_mb: float


async def measure(bundles: Sequence[Bundle], num_tokens: int, seed: int) -> Section:
    """Reads the memory of servers that differ in slots, context and streams.

    Args:
        bundles: the models; masked ones are skipped.
        num_tokens: prompt tokens per stream.
        seed: draws the prompts.

    Raises:
        LoadTestError: none of the models is causal.
    """
    rows = [
        await _read(bundle, bundle.manifest.kv, slots, context, streams, num_tokens, seed)
        for bundle in bundles
        if bundle.manifest.kv is not None
        for slots, context, streams in _cases(bundle.manifest.max_length)
    ]
    if not rows:
        raise LoadTestError("the memory section needs a causal bundle")
    idle = [row.idle_mb for row in rows]
    grown = [(row.busy_mb - row.idle_mb) / row.used_mb for row in rows]
    findings = (
        f"idle servers take {min(idle):.0f} to {max(idle):.0f} MB, with "
        f"{min(row.reserved_mb for row in rows):.0f} to {max(row.reserved_mb for row in rows):.0f} "
        "MB reserved",
        f"streams take {min(grown):.2f} to {max(grown):.2f} times the KV cache of their tokens",
    )
    return Section("memory", _QUESTION, 1, tuple(rows), findings, _NOTES)


def _cases(max_length: int) -> tuple[tuple[int, int, int], ...]:
    """Slots, context and streams; one of them changes from each case to the next."""
    short = max(max_length // 4, 8)
    return ((1, short, 1), (1, max_length, 1), (8, max_length, 1), (8, max_length, 8))


async def _read(
    bundle: Bundle,
    layout: KVLayout,
    slots: int,
    context: int,
    num_streams: int,
    num_tokens: int,
    seed: int,
) -> Row:
    num_tokens = min(num_tokens, context // 2)
    bytes_per_token = layout.bytes_per_token
    requests = _requests(bundle, num_tokens, num_streams, seed)
    with running_server(
        {bundle.name: bundle.path}, slots=slots, max_context=context, prefix_cache_bytes=0
    ) as server:
        ready = server.resident_bytes()
        await _stream(server, requests[:1])
        idle = await _least(server)
        busy = await _stream(server, requests)
        after = await _least(server)
    return Row(
        model=bundle.name,
        slots=slots,
        context=context,
        streams=num_streams,
        tokens=num_tokens,
        reserved_mb=slots * context * bytes_per_token / _MB,
        used_mb=num_streams * num_tokens * bytes_per_token / _MB,
        ready_mb=ready / _MB,
        idle_mb=idle / _MB,
        busy_mb=busy / _MB,
        after_mb=after / _MB,
    )


def _requests(bundle: Bundle, num_tokens: int, count: int, seed: int) -> list[bytes]:
    """Streams that go on for as long as they are read."""
    tokenizer = Tokenizer.from_file(bundle.tokenizer, bundle.manifest.special_tokens)
    requests = []
    for number in range(count):
        text = ""
        for job in draw_jobs("classify", num_tokens, seed + number):
            text += f"{job.text} "
            if len(tokenizer.encode(text)) >= num_tokens:
                break
        parameters = {"truncate": num_tokens, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"inputs": text, "parameters": parameters, "stream": True}
        requests.append(post("/generate", json.dumps(body).encode()))
    return requests


async def _stream(server: ServerProcess, requests: Sequence[bytes]) -> int:
    """The server's memory once every stream has a token; then the streams are closed."""
    async with AsyncExitStack() as stack:
        firsts: list[asyncio.Event] = []
        for request in requests:
            connection = await Connection.open(server.port)
            first = asyncio.Event()
            reading = asyncio.create_task(connection.send(request, partial(_set, first)))
            stack.callback(connection.close)
            stack.callback(reading.cancel)
            firsts.append(first)
        await asyncio.gather(*(first.wait() for first in firsts))
        return server.resident_bytes()


def _set(first: asyncio.Event, _: bytes) -> None:
    first.set()


async def _least(server: ServerProcess) -> int:
    """The least memory within the time in which an idle engine frees its slots' memory."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _RETURN_SECONDS
    least = server.resident_bytes()
    while loop.time() < deadline:
        await asyncio.sleep(_POLL_SECONDS)
        least = min(least, server.resident_bytes())
    return least
