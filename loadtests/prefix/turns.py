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
    body, folder = conversation.last(), args.work / "turns"
    shutil.rmtree(folder, ignore_errors=True)
    room = {"prefix_cache_dir": folder, "prefix_cache_bytes": 4 * 2**30}
    cold, memory, disk = list[Answer](), list[Answer](), list[Answer]()
    with serving(bundle, args.context, **room) as agent:
        agent.ask({"messages": [{"role": "user", "content": "Hello"}]})  # what a first pass takes
        cold.append(agent.ask(body))
        memory += [agent.ask(body) for _ in range(args.rounds)]
        agent.wait_until_written()
        blocks = agent.disk()["bytes"]
    for _ in range(args.rounds):
        with serving(bundle, args.context, **room) as agent:
            agent.ask({"messages": [{"role": "user", "content": "Hello"}]})
            disk.append(agent.ask(body))
    answers = {"nowhere: computed": cold, "memory": memory, "disk, after a restart": disk}
    rows = tuple(_least(name, found) for name, found in answers.items())
    bits = {answer.bits for found in answers.values() for answer in found}
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
            ("the cold prompt is read once; the least of the rounds otherwise",),
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
