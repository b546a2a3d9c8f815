"""What is read again over a conversation, where templates keep what was thought and drop it."""

import argparse
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.measurement import Section
from loadtests.prefix import peer
from loadtests.prefix.asking import serving
from loadtests.prefix.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Row:
    """A conversation with one server.

    ``read_again`` are the tokens that were computed although an earlier prompt of the conversation
    began with all up to them; ``share`` is theirs of all tokens that were sent.
    """

    server: str
    thinking: str
    requests: int
    sent: int
    computed: int
    read_again: int
    share: float


def measure(
    args: argparse.Namespace, bundles: Mapping[str, Path], conversation: Conversation
) -> Section:
    """Counts for our server, and for llama.cpp if there is a file for it."""
    rows, written = list[Row](), list[str]()
    for thinking, bundle in bundles.items():
        folder = args.work / "shares"
        shutil.rmtree(folder, ignore_errors=True)
        room = {"prefix_cache_dir": folder, "prefix_cache_bytes": 4 * 2**30}
        with serving(bundle, args.context, **room) as agent:
            prompts, cached = [], []
            for body in conversation.bodies():
                prompts.append(agent.tokens(body))
                cached.append(agent.ask(body, max_tokens=1).num_cached)
            agent.wait_until_written()
            written.append(f"thinking {thinking}: {agent.disk()['bytes'] / 1e6:.1f} MB on disk")
        rows.append(_row("maskdial", thinking, prompts, cached))
        if args.gguf is not None:
            rows.append(_row("llama.cpp", thinking, prompts, peer.cached(args, prompts)))
    return Section("shares", "which tokens are read again", 1, tuple(rows), tuple(written))


def _row(
    server: str, thinking: str, prompts: Sequence[Sequence[int]], cached: Sequence[int]
) -> Row:
    sent = sum(map(len, prompts))
    again = 0
    for number, prompt in enumerate(prompts):
        known = max((_common(prompt, other) for other in prompts[:number]), default=0)
        again += max(known - cached[number], 0)
    computed = sent - sum(cached)
    return Row(server, thinking, len(prompts), sent, computed, again, again / sent)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many of the same tokens two prompts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
