"""The comparison: a model over HTTP and its engine in this process, in turns."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

from loadtests.connection import Connection
from loadtests.engine.section import Section
from loadtests.engine.turns import take_turns
from loadtests.overhead.closed_loop import Client, Throughput, drive
from loadtests.overhead.work import Work, work_of
from loadtests.scenarios import draw_jobs
from loadtests.server_process import ServerProcess
from maskdial.models.registry import ServedModel

_NUM_TEXTS = 512
_QUESTION = "throughput over HTTP against the bare engine, in turns"
_NOTES = (
    "cpu: microseconds of all cores for one unit: of the bare engine's process, of the server's, "
    "and of the load generator's, which shares the cores with the server",
    "cpu ratio: the bare engine's CPU time in that of server and load generator; what else the "
    "machine does changes it less than the throughput",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One model; medians over the rounds, ratios taken within each round."""

    model: str
    unit: str
    clients: int
    rounds: int
    bare_per_second: float
    http_per_second: float
    ratio_min: float
    ratio: float
    ratio_max: float
    bare_cpu_us: float
    server_cpu_us: float
    client_cpu_us: float
    cpu_ratio: float


async def measure(
    model: ServedModel,
    server: ServerProcess,
    *,
    num_clients: int,
    num_tokens: int,
    seconds: float,
    round_seconds: float,
    seed: int,
) -> Row:
    """Drives a model both ways.

    Args:
        model: loaded in this process, its engine started.
        server: serves the same bundle, and nothing else.
        num_clients: requests that are open at once.
        num_tokens: of each generated text.
        seconds: time for all rounds.
        round_seconds: how long each side is driven in a round.
        seed: draws the texts.
    """
    work = work_of(model.bundle, num_tokens)
    texts = [job.text for job in draw_jobs("classify", _NUM_TEXTS, seed)]
    await model.engine.warm_up()

    async def drive_bare() -> Throughput:
        return await drive([partial(work.run, model)] * num_clients, texts, round_seconds)

    async def drive_http() -> Throughput:
        async with http_clients(work, texts, server.port, num_clients) as clients:
            return await drive(clients, texts, round_seconds, server.cpu_seconds)

    samples = await take_turns({"bare": drive_bare, "http": drive_http}, seconds)
    name = model.bundle.name
    return summarize(name, work.unit, num_clients, samples["bare"], samples["http"])


def section_of(rows: Sequence[Row]) -> Section:
    """The rows of several models, and what they say."""
    findings = tuple(
        f"{row.model}: over HTTP {row.ratio:.1%} of the bare engine's {row.unit} per second "
        f"({row.ratio_min:.1%} to {row.ratio_max:.1%}), by CPU time {row.cpu_ratio:.1%}"
        for row in rows
    )
    rounds = min(row.rounds for row in rows)
    return Section("overhead", _QUESTION, rounds, tuple(rows), findings, _NOTES)


@asynccontextmanager
async def http_clients(
    work: Work, texts: Sequence[str], port: int, num_clients: int
) -> AsyncIterator[list[Client]]:
    """Clients with a connection each; the requests of all texts are made beforehand."""
    requests = {text: work.request(text) for text in texts}
    connections = await asyncio.gather(*(Connection.open(port) for _ in range(num_clients)))

    async def send(connection: Connection, text: str) -> int:
        return work.count(await connection.send(requests[text]))

    try:
        yield [partial(send, connection) for connection in connections]
    finally:
        for connection in connections:
            connection.close()


def summarize(
    model: str,
    unit: str,
    num_clients: int,
    bare: Sequence[Throughput],
    http: Sequence[Throughput],
) -> Row:
    """The measurements of all rounds as one row."""
    bare_cpu = median(1e6 * sample.own_cpu / sample.units for sample in bare)
    server_cpu = median(1e6 * sample.server_cpu / sample.units for sample in http)
    client_cpu = median(1e6 * sample.own_cpu / sample.units for sample in http)
    ratios = [h.per_second / b.per_second for h, b in zip(http, bare, strict=True)]
    return Row(
        model=model,
        unit=unit,
        clients=num_clients,
        rounds=len(ratios),
        bare_per_second=median(sample.per_second for sample in bare),
        http_per_second=median(sample.per_second for sample in http),
        ratio_min=min(ratios),
        ratio=median(ratios),
        ratio_max=max(ratios),
        bare_cpu_us=bare_cpu,
        server_cpu_us=server_cpu,
        client_cpu_us=client_cpu,
        cpu_ratio=bare_cpu / (server_cpu + client_cpu),
    )
