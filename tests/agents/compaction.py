"""A model that reads a file of notes until the prompt is too long, and then sums up.

Of Claude Code and opencode, which do not know the context, only the error tells it. Codex is told
its size. Each has to ask for a summary by itself, and to go on from there.
"""

import random
from collections.abc import Sequence

from tests.agents.script import RESULT, TOOLS, Call, Script, Step

SMALL_CONTEXT = 34_000
"""Tokens. A first prompt has up to 16,000, and the notes, which are read twice, some 13,000: an
agent shows part of a longer file only."""
CODEX_CONTEXT = 16_000
"""Tokens: more than its first prompt has, and less than that and the notes."""
SUMMARY = "The notes were read; what is left is to mend calc.py."
_ASKS = ("create a detailed summary", "anchored summary", "CONTEXT CHECKPOINT COMPACTION")
"""What Claude Code, opencode and Codex have in the last message when they ask for a summary."""


def notes() -> str:
    """The file, of some 13,000 tokens."""
    words = ("alpha", "river", "stone", "cloud", "plain", "forest", "window", "delta")
    chance = random.Random(0)
    return "".join(" ".join(chance.choices(words, k=12)) + "\n" for _ in range(600))


class CompactingScript(Script):
    """Reads the notes, however often it is asked to go on, until it is asked for a summary. In a
    conversation with the summary, it does the task.

    Attributes:
        num_summaries: requests for a summary.
    """

    def __init__(self, read_notes: Call, steps: Sequence[Step]) -> None:
        summary = f"<analysis>Notes.</analysis>\n<summary>\n{SUMMARY}\n</summary>"
        super().__init__([read_notes, *steps, summary])
        self.num_summaries = 0

    def step_of(self, prompt: str) -> int | None:
        last = prompt.rpartition("<|im_start|>user\n")[2]
        if any(ask in last for ask in _ASKS):
            self.num_summaries += 1
            return len(self._steps) - 1
        if TOOLS not in prompt:
            return None
        _, summed_up, after = prompt.partition(SUMMARY)
        return min(1 + after.count(RESULT), len(self._steps) - 2) if summed_up else 0
