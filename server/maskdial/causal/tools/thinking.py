"""ThinkingMarks: the tags around a model's reasoning."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.tools.probe import CONTENT, REASONING, USER, try_render

_TAG = r"(?:<[^<>\s]{1,40}>|\[[A-Z_/]{1,40}\]|◁[^◁▷]{1,40}▷)"
_BEFORE = re.compile(rf"({_TAG})\s*$")
_AFTER = re.compile(rf"^\s*({_TAG})")
# For templates that drop the reasoning of past turns and do not open the next turn's.
_PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<reasoning>", "</reasoning>"),
)


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """The tags around a model's reasoning, such as ``<think>`` and ``</think>``.

    ``special_ids`` has the token ids of those that are special tokens.
    """

    begin: str
    end: str
    special_ids: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def derive(cls, template: ChatTemplate) -> "ThinkingMarks | None":
        """Finds the marks in a chat template; None if it has none.

        The template renders the reasoning of a past turn. If it shows none, the marks are searched
        in its generation prompt, then in its source.

        Args:
            template: the model's chat template, which may not exist.
        """
        if not template.exists:
            return None
        return _from_history(template) or _from_prompt(template) or _from_source(template)

    def with_special(self, special_tokens: Mapping[str, int]) -> "ThinkingMarks":
        """The same marks for a tokenizer with these special tokens: token ids by text."""
        tags = special_tokens.keys() & {self.begin, self.end}
        return ThinkingMarks(self.begin, self.end, {tag: special_tokens[tag] for tag in tags})

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends with the opening mark, so that the reply begins as reasoning."""
        return prompt.rstrip().endswith(self.begin)

    def left_open_by(self, text: str) -> bool:
        """Whether a text that is to be continued ends within reasoning."""
        return text.rfind(self.begin) > text.rfind(self.end)


def _from_history(template: ChatTemplate) -> ThinkingMarks | None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        turn = {"role": "assistant", "content": CONTENT, key: REASONING}
        text = try_render(template, [USER, turn])
        if text is None or REASONING not in text:
            continue
        before, after = text.split(REASONING, 1)
        begin, end = _BEFORE.search(before), _AFTER.search(after)
        # Other tags are turn headers.
        if begin and end and re.search("think|reason", begin[1], re.IGNORECASE):
            return ThinkingMarks(begin[1], end[1])
    return None


def _from_prompt(template: ChatTemplate) -> ThinkingMarks | None:
    text = try_render(template, [USER], add_generation_prompt=True)
    for begin, end in _PAIRS:
        if text is not None and re.search(rf"{re.escape(begin)}\s*({re.escape(end)}\s*)?$", text):
            return ThinkingMarks(begin, end)
    return None


def _from_source(template: ChatTemplate) -> ThinkingMarks | None:
    source = template.source or ""
    for begin, end in _PAIRS:
        if begin in source and end in source:
            return ThinkingMarks(begin, end)
    return None
