"""A soak with a disk limit that is reached: bytes stay under it, and nothing grows."""

import argparse
import contextlib
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from loadtests.measurement import Section
from loadtests.prefix.asking import Agent, serving
from loadtests.prefix.conversation import Conversation

_CONVERSATIONS = 12
_TOOLS = 600  # tokens
_TURNS = 3
_SAMPLES = 12
_MEMORY_BLOCKS, _DISK_BLOCKS = 40, 90  # what a conversation has is a dozen or more
_MOST_GROWTH = 32 * 2**20  # bytes of memory in the second half


@dataclass(frozen=True, slots=True)
class Row:
    """The server at a moment."""

    minute: float
    requests: int
    resident_mb: float
    files: int
    threads: int
    disk_mb: float
    limit_mb: float
    num_files: int
    from_disk: float


def measure(args: argparse.Namespace, bundle: Path) -> tuple[Section, bool]:
    """The section, and whether every bound held and every answer was the first one's."""
    rng = random.Random(args.seed)
    folder = args.work / "soak"
    shutil.rmtree(folder, ignore_errors=True)
    drawn = [
        list(Conversation.draw(bundle, _TOOLS, _TURNS, number).bodies())
        for number in range(_CONVERSATIONS)
    ]
    block = _block_bytes(args, bundle)
    limit = _DISK_BLOCKS * block
    room = {"prefix_cache_bytes": _MEMORY_BLOCKS * block, "prefix_cache_disk_bytes": limit}
    answers: dict[tuple[int, int], str] = {}
    wrong, over, rows, requests = 0, 0.0, list[Row](), 0
    started = time.monotonic()
    seconds = args.minutes * 60
    with serving(bundle, args.context, prefix_cache_dir=folder, **room) as agent:
        due = 0.0
        while (elapsed := time.monotonic() - started) < seconds:
            number = rng.randrange(_CONVERSATIONS)
            turn = rng.randrange(len(drawn[number]))
            answer = agent.ask(drawn[number][turn], max_tokens=3)
            wrong += answers.setdefault((number, turn), answer.bits) != answer.bits
            requests += 1
            over = max(over, _size(folder) - limit)
            if elapsed >= due:
                rows.append(_sample(agent, elapsed, requests, folder, limit))
                due += seconds / _SAMPLES
        rows.append(_sample(agent, seconds, requests, folder, limit))
    middle = rows[len(rows) // 2]
    grown = (rows[-1].resident_mb - middle.resident_mb) * 1e6
    files = rows[-1].files - middle.files
    # A block that is being written, under another name, is beyond the limit for a moment.
    held = not wrong and over <= 2 * block and grown <= _MOST_GROWTH and files <= 2
    return (
        Section(
            "soak",
            "do the bytes on disk stay under their limit, and does nothing grow",
            1,
            tuple(rows),
            (
                f"{wrong} of {requests} answers differ from the first one to the same request",
                f"most bytes beyond the limit: {max(over, 0) / 1e6:.2f} MB",
                f"in the second half: {grown / 1e6:+.1f} MB of memory, {files:+d} open files",
            ),
            (f"a block has about {block / 1e6:.2f} MB",),
        ),
        held,
    )


def _block_bytes(args: argparse.Namespace, bundle: Path) -> int:
    """What a block takes on disk, with the states that it may have."""
    folder = args.work / "soak-block"
    shutil.rmtree(folder, ignore_errors=True)
    body = next(Conversation.draw(bundle, _TOOLS, 1, 99).bodies())
    with serving(bundle, args.context, prefix_cache_dir=folder) as agent:
        agent.ask(body)
        agent.wait_until_written()
        disk = agent.disk()
    shutil.rmtree(folder)
    return int(disk["bytes"] / max(disk["blocks"], 1))


def _size(folder: Path) -> int:
    """Bytes of all files; one may go while they are counted."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _sample(agent: Agent, elapsed: float, requests: int, folder: Path, limit: int) -> Row:
    resident, files, threads = agent.server.resources()
    hits = agent.counted("maskdial_prefix_cache_hits_total")
    from_disk = agent.counted("maskdial_prefix_cache_disk_hits_total")
    return Row(
        elapsed / 60,
        requests,
        resident / 1e6,
        files,
        threads,
        _size(folder) / 1e6,
        limit / 1e6,
        sum(1 for _ in folder.iterdir()),
        from_disk / max(hits, 1),
    )
