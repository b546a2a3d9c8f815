"""``python -m loadtests overhead``: a model over HTTP against its engine in this process."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from uvicorn.loops.auto import auto_loop_factory

from loadtests import count, positive
from loadtests.closed_loop import Throughput, drive, http_clients, work_of
from loadtests.engines import load_served
from loadtests.measurement import (
    Section,
    add_report_options,
    load_averages,
    take_turns,
    write_reports,
)
from loadtests.server import ServerProcess, running_server
from loadtests.texts import draw_jobs
from maskdial.models.served import ServedModel

DESCRIPTION = (
    "Serve each bundle in a process of its own and drive it over HTTP, alternating with the same "
    "bundle's engine in this process: generators with streams, classifiers with one text per "
    "request. MASKDIAL_* variables configure both sides where no flag here does."
)
_NUM_TEXTS = 512
_QUESTION = "throughput over HTTP against the bare engine, in turns"

_NOTES = (
    "cpu: microseconds of CPU time per unit, over all cores, of the bare engine's process, of the "
    "server's, and of the load generator's, which shares the cores with the server",
    "cpu ratio: CPU time of the bare engine divided by that of server and load generator together; "
    "other processes disturb it less than the throughput",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--bundle",
        type=Path,
        required=True,
        action="append",
        dest="bundles",
        metavar="PATH",
        help="bundle to serve; repeat for several",
    )
    parser.add_argument(
        "--streams",
        type=count,
        default=8,
        metavar="N",
        help="concurrent streams of a generator (default: %(default)s)",
    )
    parser.add_argument(
        "--clients",
        type=count,
        default=32,
        metavar="N",
        help="concurrent requests to a classifier (default: %(default)s)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=count,
        default=64,
        metavar="N",
        help="tokens per stream (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=60.0,
        metavar="S",
        help="measuring time per bundle (default: %(default)s)",
    )
    parser.add_argument(
        "--round-seconds",
        type=positive,
        default=4.0,
        metavar="S",
        help="length of one turn; requests open at its end count in part (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the texts (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=count, metavar="N", help="threads per pass (default: the server's)"
    )
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 0."""
    facts = {"load": load_averages(), "threads": args.threads, "seed": args.seed}
    sections = [section_of([_measure(path, args) for path in args.bundles])]
    sections[0].show(Console())
    write_reports(args, sections, facts)
    return 0


@dataclass(frozen=True, slots=True)
class Row:
    """One model: medians over the rounds; ratios are taken within each round."""

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
        server: serves the same bundle and nothing else.
        num_clients: concurrent requests.
        num_tokens: tokens per generated text.
        seconds: time for all rounds.
        round_seconds: how long each side is driven per round.
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
    """The report over several models."""
    findings = tuple(
        f"{row.model}: over HTTP {row.ratio:.1%} of the bare engine's {row.unit} per second "
        f"({row.ratio_min:.1%} to {row.ratio_max:.1%}), by CPU time {row.cpu_ratio:.1%}"
        for row in rows
    )
    rounds = min(row.rounds for row in rows)
    return Section("overhead", _QUESTION, rounds, tuple(rows), findings, _NOTES)


def summarize(
    model: str,
    unit: str,
    num_clients: int,
    bare: Sequence[Throughput],
    http: Sequence[Throughput],
) -> Row:
    """Summarizes the rounds of one model."""
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


def settings_of(threads: int | None) -> dict[str, Any]:
    """Settings of both sides, so that they do the same work.

    A checkpoint's own defaults are off: over HTTP they would apply, to the bare engine not.
    """
    settings: dict[str, Any] = {"generation_config": "off"}
    return settings if threads is None else settings | {"threads": threads}


def _measure(path: Path, args: argparse.Namespace) -> Row:
    settings = settings_of(args.threads)
    name = path.resolve().name
    with running_server({name: path}, **settings) as server:
        model = load_served(name, path, settings)
        causal = model.bundle.manifest.task == "generate"
        # The same loop as the server's. No progress spinner: its thread would slow the engine down.
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            try:
                return runner.run(
                    measure(
                        model,
                        server,
                        num_clients=args.streams if causal else args.clients,
                        num_tokens=args.max_new_tokens,
                        seconds=args.seconds,
                        round_seconds=args.round_seconds,
                        seed=args.seed,
                    )
                )
            finally:
                model.stop()
