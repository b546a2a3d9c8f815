"""A model whose replies are a script: the server's own engine, with the tokens forced on it.

What the program sent is read, rendered, prefilled and cached as ever; only which token follows is
no longer the weights' choice. A reply is that of the step that the conversation has come to, which
is how many results of tools its prompt has.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from maskdial.causal import prompts
from maskdial.causal.forced_tokens import ForcedTokens
from maskdial.causal.sequence import Sequence as Generated

RESULT = "<tool_response>"  # as Qwen3's template begins one
TOOLS = "\n<tools>"
END = "<|im_end|>"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, as a step of a script."""

    name: str
    arguments: Mapping[str, Any]


Step = Call | str
"""A call, or a text."""


def spelled(step: Step) -> str:
    """A step as the model writes it."""
    if isinstance(step, str):
        return step + END
    call = {"name": step.name, "arguments": dict(step.arguments)}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>{END}"


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that was answered: its step, the tokens of its prompt, and those from the cache."""

    step: int
    num_prompt: int
    sequence: Generated

    @property
    def num_cached(self) -> int:
        return self.sequence.num_cached


class Script:
    """Replies, step by step, and the requests that got them.

    Args:
        steps: of the conversation.
        without_tools: whether prompts without tools belong to the conversation, too; otherwise they
            ask for a title, and get the word "Task".
        result: what a prompt has once for each result of a tool.
    """

    def __init__(
        self, steps: Sequence[Step], *, without_tools: bool = False, result: str = RESULT
    ) -> None:
        self._steps = steps
        self._without_tools = without_tools
        self._result = result
        self.turns: list[Turn] = []

    def step_of(self, prompt: str) -> int | None:
        """The step that a prompt has come to; None if it is not of the conversation."""
        if TOOLS not in prompt and not self._without_tools:
            return None
        return min(prompt.count(self._result), len(self._steps) - 1)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Has every model in this process follow the script."""
        make = prompts._make_sequences

        def scripted(
            request: Any, start: Any, params: Any, grammar: Any, *others: Any
        ) -> tuple[Generated, ...]:
            tokenizer, vocab_size = others[-1].tokenizer, others[-1].manifest.vocab_size
            step = self.step_of(tokenizer.decode(start[0], skip_special_tokens=False))
            text = "Task" + END if step is None else spelled(self._steps[step])
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            forced: Any = Forced(ids, vocab_size)
            sequences = make(request, start, params, forced, *others)
            if step is not None:
                self.turns.append(Turn(step, len(start[0]), sequences[0]))
            return sequences

        with patch.object(prompts, "_make_sequences", scripted):
            yield


class Forced:
    """In the place of a grammar."""

    def __init__(self, ids: Sequence[int], vocab_size: int) -> None:
        self._ids = ids
        self._vocab_size = vocab_size

    def matcher(self, *, first: bool) -> ForcedTokens:
        return ForcedTokens(self._ids, self._vocab_size)


__all__ = ["RESULT", "Call", "Forced", "Script", "Step", "Turn", "spelled"]
