"""Marks: what surrounds the reasoning in a reply, and its answer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.tools.probe import CONTENT, REASONING, USER, try_render

_TAG = r"(?:<[^<>\s]{1,40}>|\[[A-Z_/]{1,40}\]|◁[^◁▷]{1,40}▷)"
# A tag alone; before a word, as in Gemma 4's <|channel>thought; or around one, as in Kimi K3's
# <|open|>think<|sep|>.
_MARK = rf"{_TAG}(?:\w{{1,20}}{_TAG}?)?"
_BEFORE = re.compile(rf"({_MARK})\s*$")
_AFTER = re.compile(rf"^\s*({_TAG}(?:\w{{1,20}}{_TAG})?)")
_BOTH = re.compile(rf"({_MARK})\s*({_TAG}(?:\w{{1,20}}{_TAG})?)\s*$")
# A turn's header, where the answer has one after the reasoning.
_HEADER = re.compile(rf"{_TAG}\w+\s*$")
_THINKING = re.compile("think|thought|reason|inner", re.IGNORECASE)
_ANSWERING = re.compile("response|answer|<.content.>", re.IGNORECASE)
# For templates that drop the reasoning of past turns and do not open the next turn's.
_THINKING_PAIRS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<reasoning>", "</reasoning>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
)
_ANSWER_PAIRS = (
    ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ("<|START_TEXT|>", "<|END_TEXT|>"),
    ("", "[END FINAL RESPONSE]"),
)
# Templates do not agree on the name of either.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_SWITCHES: tuple[Mapping[str, bool], ...] = ({}, {"enable_thinking": False}, {"thinking": False})


@dataclass(frozen=True, slots=True)
class _Marks:
    begin: str
    end: str
    special_ids: Mapping[str, int] = field(default_factory=dict)

    def with_special(self, special_tokens: Mapping[str, int]) -> Self:
        """The same marks for a tokenizer with these special tokens: token ids by text."""
        text = "\n".join(getattr(self, each, "") for each in ("begin", "end", "header"))
        tags = {tag: token_id for tag, token_id in special_tokens.items() if tag and tag in text}
        return replace(self, special_ids=tags)


@dataclass(frozen=True, slots=True)
class ThinkingMarks(_Marks):
    """What surrounds a model's reasoning, such as ``<think>`` and ``</think>``.

    Attributes:
        begin: the opening mark.
        end: the closing mark.
        special_ids: the token ids of those tags in them that are special tokens.
        header: the header of a turn, which may follow the reasoning.
    """

    header: str = ""

    @classmethod
    def derive(cls, template: ChatTemplate) -> "ThinkingMarks | None":
        """Finds the marks in a chat template; None if it has none.

        Its generation prompt may open the reasoning, or the template renders that of a past turn.
        If it shows none, the marks are searched in other prompts, then in its source.

        Args:
            template: the model's chat template, which may not exist.
        """
        if not template.exists:
            return None
        return (
            _opened(template)
            or _of_history(template)
            or _of_prompt(template)
            or _of_source(template)
        )

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends with the opening mark, so that the reply begins as reasoning."""
        return prompt.rstrip().endswith(self.begin)

    def left_open_by(self, text: str) -> bool:
        """Whether a text that is to be continued ends within reasoning."""
        return text.rfind(self.begin) > text.rfind(self.end)


@dataclass(frozen=True, slots=True)
class AnswerMarks(_Marks):
    """What surrounds a model's answer, such as ``<|START_RESPONSE|>`` and ``<|END_RESPONSE|>``.

    Either may be missing from a reply; ``begin`` may be empty.
    """

    @classmethod
    def derive(cls, template: ChatTemplate) -> "AnswerMarks | None":
        """Finds the marks in a chat template, around a past answer or in its source; None if it
        has none.
        """
        if not template.exists:
            return None
        text = try_render(template, [USER, {"role": "assistant", "content": CONTENT}])
        if text is not None and text.count(CONTENT) == 1:
            before, after = text.split(CONTENT)
            begin, end = _BEFORE.search(before), _AFTER.search(after)
            if begin and end and _ANSWERING.search(begin[1]):
                return AnswerMarks(_without_header(template, begin[1]), end[1])
        if "<response></response>" in _sources(template):  # which Granite 3.3 is told to write
            return AnswerMarks("<response>", "</response>")
        found = _pair_of(_sources(template), _ANSWER_PAIRS)
        return None if found is None else AnswerMarks(*found)


def _opened(template: ChatTemplate) -> ThinkingMarks | None:
    text = try_render(template, [USER], add_generation_prompt=True)
    pairs = (pair for pair in _THINKING_PAIRS if text and text.rstrip().endswith(pair[0]))
    found = next(pairs, None)
    return None if found is None else ThinkingMarks(*found)


def _without_header(template: ChatTemplate, mark: str) -> str:
    """A mark, without the header of its turn where that belongs to the generation prompt."""
    text = try_render(template, [USER], add_generation_prompt=True) or ""
    header = _HEADER.search(text)
    return mark if header is None else mark.removeprefix(header[0].rstrip())


def _of_history(template: ChatTemplate) -> ThinkingMarks | None:
    for key in _REASONING_KEYS:
        turn = {"role": "assistant", "content": CONTENT, key: REASONING}
        text = try_render(template, [USER, turn])
        if text is None or REASONING not in text:
            continue
        before, after = text.split(REASONING, 1)
        begin, end = _BEFORE.search(before), _AFTER.search(after.partition(CONTENT)[0])
        # Other tags are turn headers.
        if begin and end and _THINKING.search(begin[1]):
            mark = _without_header(template, begin[1])
            header = begin[1].removesuffix(mark)
            return ThinkingMarks(mark, end[1], header=header)
    return None


def _of_prompt(template: ChatTemplate) -> ThinkingMarks | None:
    for variables in _SWITCHES:
        text = try_render(template, [USER], variables=variables, add_generation_prompt=True)
        if text is None:
            continue
        # Reasoning that is over before it begins, in models that may go without any.
        if (both := _BOTH.search(text)) and _THINKING.search(both[1]):
            return ThinkingMarks(both[1], both[2])
    return None


def _of_source(template: ChatTemplate) -> ThinkingMarks | None:
    sources = _sources(template)
    if found := _pair_of(sources, _THINKING_PAIRS):
        return ThinkingMarks(*found)
    # LFM2.5's only cuts past reasoning off at its end; the model begins it.
    ends = (pair for pair in _THINKING_PAIRS if pair[1].startswith("<") and pair[1] in sources)
    found = next(ends, None)
    return None if found is None else ThinkingMarks(*found)


def _pair_of(source: str, pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    return next((pair for pair in pairs if pair[0] in source and pair[1] in source), None)


def _sources(template: ChatTemplate) -> str:
    return f"{template.source or ''}\n{template.tool_source or ''}"
