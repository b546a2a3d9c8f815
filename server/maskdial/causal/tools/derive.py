"""Finds a model's `ToolFormat` in its chat template.

The template renders one call and two, of marked names, ids and arguments. What is between the
marked words is the format. llama.cpp does the same (``common/chat-auto-parser``). A template runs
in its sandbox, at most some twenty times, and what it writes is read in linear time.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from maskdial.causal.chat import ChatTemplate
from maskdial.causal.tools.format import ARGUMENTS, ID, KEY, NAME, VALUE, ArgumentList, ToolFormat
from maskdial.causal.tools.probe import CONTENT, FIRST, SECOND, TOOLS, USER, ProbeCall, try_render
from maskdial.causal.tools.thinking import ThinkingMarks

# Two calls of a few words each are no longer, in characters.
_MAX_CALLS = 4000
_LONG_ID = "call_0123456789abcdef01234567"
_PYTHON_TAG = "<|python_tag|>"
_NUMBERS = {"zkey_a": 735191, "zkey_b": 846272}


def derive_format(
    template: ChatTemplate,
    *,
    special_tokens: Mapping[str, int] | None = None,
    end_tokens: Collection[str] = (),
) -> ToolFormat | None:
    """The format in which a model writes calls; None where its template shows none.

    Args:
        template: the model's chat template, or the absence of one.
        special_tokens: the text of the tokenizer's special tokens, with their ids.
        end_tokens: the text of the end-of-sequence tokens.
    """
    if not template.exists or not _knows_tools(template):
        return None
    marks = ThinkingMarks.derive(template)
    plain = try_render(template, [USER, {"role": "assistant", "content": CONTENT}], tools=TOOLS)
    if plain is None or plain.count(CONTENT) != 1:
        return None
    for text_arguments in (False, True):
        probe = _Probe(template, text_arguments, tuple(end_tokens), marks, plain)
        found = _derive(probe)
        if found is not None and found.problem() is None:
            source = template.source or ""
            if not found.trigger and _PYTHON_TAG in source:
                # Llama 3.x writes it before the calls of its built-in tools, and sometimes others.
                found = dataclasses.replace(found, optional_tag=_PYTHON_TAG)
            return found.with_special(special_tokens or {})
    return None


def _knows_tools(template: ChatTemplate) -> bool:
    text = try_render(template, [USER], tools=TOOLS, add_generation_prompt=True)
    return text is not None and all(call.name in text for call in (FIRST, SECOND))


def _derive(probe: "_Probe") -> ToolFormat | None:
    one = probe.calls(FIRST)
    if one is None or one.count(FIRST.name) != 1:
        return None
    arguments = None
    if _json_object(one, FIRST) is None:
        arguments = _argument_list(probe)
        if arguments is None:
            return None
    first = _pattern(one, [FIRST], arguments)
    if first is None:
        return None
    short_ids = ID in first or probe.calls(dataclasses.replace(FIRST, call_id=_LONG_ID)) is None
    two = probe.calls(FIRST, SECOND)
    second = None if two is None else _pattern(two, [FIRST, SECOND], arguments)
    parts = _split(first, second)
    if parts is None:
        return None
    return ToolFormat(
        call=parts.call,
        arguments=arguments,
        section_begin=parts.section_begin,
        separator=parts.separator,
        section_end=parts.section_end,
        short_ids=short_ids,
        text_arguments=probe.text_arguments,
    )


@dataclass(frozen=True)
class _Probe:
    """Renders calls and cuts out what a template makes of them.

    ``plain`` is a turn without calls, whose header and end are those of a turn with calls.
    """

    template: ChatTemplate
    text_arguments: bool
    end_tokens: tuple[str, ...]
    marks: ThinkingMarks | None
    plain: str

    def calls(self, *calls: ProbeCall) -> str | None:
        """The calls of one turn as the template writes them."""
        turn = {"role": "assistant", "content": "", "tool_calls": [*map(self._as_openai, calls)]}
        text = try_render(self.template, [USER, turn], tools=TOOLS)
        if text is None:
            return None
        before, after = self.plain.split(CONTENT)
        start = len(_common_prefix(before, text))
        # Both may go on with a tag, of which no part is common.
        for bracket, closing in (("<", ">"), ("[", "]")):
            unclosed = text.rfind(bracket, 0, start)
            if unclosed > text.rfind(closing, 0, start):
                start = unclosed
        body = text[start:].removesuffix(after).strip()
        if self.marks is not None and body.startswith(self.marks.begin):
            body = body.partition(self.marks.end)[2].strip()
        while ends := [end for end in self.end_tokens if end and body.endswith(end)]:
            body = body.removesuffix(ends[0]).strip()
        return body if 0 < len(body) <= _MAX_CALLS else None

    def _as_openai(self, call: ProbeCall) -> dict[str, Any]:
        arguments = json.dumps(call.arguments) if self.text_arguments else dict(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        return {"id": call.call_id, "type": "function", "function": function}


def _json_object(text: str, call: ProbeCall) -> str | None:
    """The part of a text that is a call's arguments as a JSON object."""
    key = text.find(next(iter(call.arguments)))
    start = text.rfind("{", 0, max(key, 0))
    if start < 0:
        return None
    try:
        value, length = json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return None
    return text[start : start + length] if value == call.arguments else None


def _argument_list(probe: _Probe) -> ArgumentList | None:
    """How arguments are written one by one, from numbers, strings and none at all."""
    one = probe.calls(FIRST)
    numbers = probe.calls(dataclasses.replace(FIRST, arguments=_NUMBERS))
    nothing = probe.calls(dataclasses.replace(FIRST, arguments={}))
    truth = probe.calls(dataclasses.replace(FIRST, arguments={"zkey_a": True}))
    if one is None or numbers is None or nothing is None or truth is None:
        return None
    (first, first_value), (second, second_value) = _NUMBERS.items()
    words = [FIRST.name, first, str(first_value), second, str(second_value)]
    around = _between(numbers, words)
    rest = nothing.partition(FIRST.name)[2]
    if around is None or around[2] != around[4] or FIRST.name not in nothing:
        return None
    _, before, middle, between, _, after = around
    found = _parameter(before, between, after, rest)
    value = _between(one, [FIRST.name, first, FIRST.arguments[first]])
    if found is None or value is None or not value[2].startswith(middle):
        return None
    begin, end, separator = found
    quote = value[2].removeprefix(middle)
    python = f"{first}{middle}True" in truth
    # Python's repr and JSON differ in what they quote with; both are read as one.
    quote = '"' if quote == "'" else quote
    return ArgumentList(f"{begin}{KEY}{middle}{VALUE}{end}", separator, quote, python)


def _between(text: str, words: Sequence[str]) -> list[str] | None:
    """What is before, between and after some words, which must be there in this order."""
    parts = []
    for word in words:
        part, found, text = text.partition(word)
        if not found:
            return None
        parts.append(part)
    return [*parts, text]


def _parameter(before: str, between: str, after: str, nothing: str) -> tuple[str, str, str] | None:
    """What begins, ends and separates arguments, from the text around two of them.

    Args:
        before: from a call's name to the first key.
        between: from the first value to the second key.
        after: from the second value to the end.
        nothing: from the name to the end, of a call without arguments.
    """
    found = []
    for split in range(len(nothing) + 1):
        opening, closing = nothing[:split], nothing[split:]
        if not before.startswith(opening) or not after.endswith(closing):
            continue
        begin, end = before[split:], after[: len(after) - len(closing)]
        gap = len(between) - len(begin) - len(end)
        if gap >= 0 and between.startswith(end) and between.endswith(begin):
            found.append((begin, end, between[len(end) : len(end) + gap]))
    # Several splits may spell the same text; whole tags read best.
    return next((each for each in found if each[0].startswith("<")), found[-1] if found else None)


def _pattern(text: str, calls: Sequence[ProbeCall], arguments: ArgumentList | None) -> str | None:
    """A text with placeholders for the parts of its calls."""
    for call in calls:
        written = _written(call, arguments, text)
        if written is None or text.count(call.name) != 1:
            return None
        text = text.replace(written, ARGUMENTS).replace(call.name, NAME)
        text = text.replace(call.call_id, ID)
    return text


def _written(call: ProbeCall, arguments: ArgumentList | None, text: str) -> str | None:
    """A call's arguments as a text spells them."""
    if arguments is None:
        return _json_object(text, call)
    quotes = (arguments.quote, "'") if arguments.quote == '"' else (arguments.quote,)
    for quote in quotes:
        written = arguments.separator.join(
            arguments.parameter.replace(KEY, key).replace(VALUE, f"{quote}{value}{quote}")
            for key, value in call.arguments.items()
        )
        if written in text:
            return written
    return None


@dataclass(frozen=True)
class _Parts:
    section_begin: str
    call: str
    separator: str | None
    section_end: str


def _split(one: str, two: str | None) -> _Parts | None:
    """Tells what every call has around it from what all of them have."""
    places = list(re.finditer(r"\$(NAME|ARGUMENTS|ID)", one))
    if not places:
        return None
    start, stop = places[0].start(), places[-1].end()
    before, core, after = one[:start], one[start:stop], one[stop:]
    if two is None or two.count(core) != 2:
        return _Parts("", one, None, "")
    first, between, last = two.split(core)
    if first != before or last != after:
        return _Parts("", one, None, "")
    begin = _common_suffix(before, between)
    # Tags may begin alike, or end alike; none is cut in two.
    start = len(before) - len(begin)
    if before.rfind("<", 0, start) > before.rfind(">", 0, start):
        begin = before[before.find(">", start) + 1 or start :]
    end = _common_prefix(after, between[: len(between) - len(begin)])
    if end.rfind("<") > end.rfind(">"):
        end = end[: end.rfind("<")]
    return _Parts(
        before.removesuffix(begin),
        begin + core + end,
        between[len(end) : len(between) - len(begin)],
        after.removeprefix(end),
    )


def _common_prefix(first: str, second: str) -> str:
    pairs = zip(first, second, strict=False)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _common_suffix(first: str, second: str) -> str:
    return _common_prefix(first[::-1], second[::-1])[::-1]
