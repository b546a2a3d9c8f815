"""What writing to disk costs running streams: with a folder and without, in turns."""

import argparse
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtests.measurement import Section, median, median_ratio
from loadtests.prefix.asking import Agent, serving
from loadtests.prefix.conversation import Conversation

_STREAMS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds."""

    prefixes: str
    tokens_per_s: float
    server_cpu_ms_per_token: float
    prompt_tokens_read: float
    written_mb: float


@dataclass(frozen=True, slots=True)
class _Round:
    rate: float
    cpu: float
    num_read: float
    written: float


def measure(args: argparse.Namespace, bundle: Path, conversation: Conversation) -> Section:
    """Streams beside an agent with a new conversation in each round, so that blocks are written."""
    folder = args.work / "streams"
    shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, list[_Round]] = {"in memory": [], "on disk, too": []}
    with (
        serving(bundle, args.context) as plain,
        serving(bundle, args.context, prefix_cache_dir=folder) as disk,
    ):
        agents = {"in memory": plain, "on disk, too": disk}
        for number in range(args.rounds + 1):
            new = Conversation.draw(bundle, args.tools // 2, 3, args.seed + 1 + number)
            order = list(agents)[:: 1 if number % 2 else -1]
            for name in order:
                found[name].append(_round(agents[name], new, args.seconds))
    rounds = {name: each[1:] for name, each in found.items()}  # the first one is a warm-up
    rows = tuple(
        Row(
            name,
            median(each.rate for each in those),
            1000 * median(each.cpu for each in those),
            median(each.num_read for each in those),
            median(each.written for each in those) / 1e6,
        )
        for name, those in rounds.items()
    )
    rates = [[each.rate for each in rounds[name]] for name in ("on disk, too", "in memory")]
    cpus = [[each.cpu for each in rounds[name]] for name in ("on disk, too", "in memory")]
    return Section(
        "streams",
        "how many tokens a second do running streams get beside a prompt that is read",
        args.rounds,
        rows,
        (
            f"tokens a second with a folder by those without: {median_ratio(*rates):.3f}",
            f"CPU time a token, likewise: {median_ratio(*cpus):.3f}",
        ),
    )


def _round(agent: Agent, new: Conversation, seconds: float) -> _Round:
    """The rate at which tokens come while prompts are read."""
    end = time.monotonic() + seconds
    read, written = "maskdial_prompt_tokens_total", "maskdial_prefix_disk_written_bytes_total"
    before = agent.counted(read), agent.counted(written)
    generated = agent.counted("maskdial_generation_tokens_total")
    cpu, started = agent.server.cpu_seconds(), time.monotonic()

    def stream(number: int) -> None:
        body: dict[str, Any] = {
            "model": "agent",
            "prompt": "Once",
            "max_tokens": 200,
            "ignore_eos": True,
            "seed": number,
        }
        while time.monotonic() < end:
            agent.http.post("/v1/completions", json=body).raise_for_status()

    def converse() -> None:
        for body in new.bodies():
            if time.monotonic() < end:
                agent.ask(body, max_tokens=1)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(_STREAMS)]
    threads.append(threading.Thread(target=converse))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed, used = time.monotonic() - started, agent.server.cpu_seconds() - cpu
    num_tokens = agent.counted("maskdial_generation_tokens_total") - generated
    return _Round(
        num_tokens / elapsed,
        used / max(num_tokens, 1),
        agent.counted(read) - before[0],
        agent.counted(written) - before[1],
    )
