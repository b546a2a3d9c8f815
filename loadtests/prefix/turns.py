"""The first token of the last turn: cold, from memory, and from disk after a restart."""

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from loadtests.measurement import Section
from loadtests.prefix.asking import Answer, serving
from loadtests.prefix.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Row:
    """The least of some rounds."""

    comes_from: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    server_cpu_s: float


def measure(
    args: argparse.Namespace, bundle: Path, conversation: Conversation
) -> tuple[Section, bool]:
    """The section, and whether all answers had the same bits."""
    body, before = conversation.last()
    read, folder = args.work / "turns-read", args.work / "turns"
    shutil.rmtree(read, ignore_errors=True)
    room = {"prefix_cache_bytes": 4 * 2**30}
    hello = {"messages": [{"role": "user", "content": "Hello"}]}  # has what a first pass takes
    cold, memory, disk = list[Answer](), list[Answer](), list[Answer]()
    with serving(bundle, args.context, **room) as agent:
        agent.ask(hello)
        cold.append(agent.ask(body))
    with serving(bundle, args.context, prefix_cache_dir=read, **room) as agent:
        agent.ask(before)
        agent.wait_until_written()
        blocks = agent.disk()["bytes"]
    for _ in range(args.rounds):
        for answers, first in ((memory, before), (disk, hello)):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(read, folder)
            with serving(bundle, args.context, prefix_cache_dir=folder, **room) as agent:
                agent.ask(first)
                answers.append(agent.ask(body))
    found = {"nowhere: computed": cold, "memory": memory, "disk, after a restart": disk}
    rows = tuple(_least(name, answers) for name, answers in found.items())
    bits = {answer.bits for answers in found.values() for answer in answers}
    return (
        Section(
            "turns",
            "when does the first token of the last turn come",
            args.rounds,
            rows,
            (
                f"answers with their log-probabilities: {len(bits)} of them differ"
                if len(bits) > 1
                else "all answers are equal, with their log-probabilities",
                f"{blocks / 1e6:.0f} MB on disk",
            ),
            (
                "before it, the server has read the request that came before, in memory and on "
                "disk; the cold prompt is read once, and the least of the rounds counts otherwise",
            ),
        ),
        len(bits) == 1,
    )


def _least(name: str, answers: list[Answer]) -> Row:
    return Row(
        name,
        answers[0].num_prompt,
        min(answer.num_cached for answer in answers),
        min(answer.first_token for answer in answers),
        min(answer.cpu for answer in answers),
    )
