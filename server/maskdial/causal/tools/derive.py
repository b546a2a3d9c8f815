"""Finds a model's `ToolFormat` in its chat template.

The template renders one call and two calls with unique names, ids and arguments; the text around
them is the format. llama.cpp finds formats in the same way. A template runs thirty times at
most, in its sandbox, and what it writes is read in linear time.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from maskdial.causal.chat.template import ChatTemplate
from maskdial.causal.tools.format import (
    ARGUMENTS,
    ID,
    INDEX,
    JSON_TYPES,
    KEY,
    NAME,
    TYPE,
    VALUE,
    ArgumentList,
    ToolFormat,
)
from maskdial.causal.tools.known import known_format
from maskdial.causal.tools.marks import AnswerMarks, ThinkingMarks
from maskdial.causal.tools.probe import (
    CONTENT,
    FIRST,
    SECOND,
    TOOLS,
    USER,
    ProbeCall,
    named_by_id,
    try_render,
)

# Two calls of a few words each are no longer, in characters.
_MAX_CALLS = 4000
_LONG_ID = "call_0123456789abcdef01234567"
# Characters around a number that tell it from others
_CONTEXT = 16
_NUMBERED_ID = f"functions.{NAME}:{INDEX}"
_PYTHON_TAG = "<|python_tag|>"
_NUMBERS = {"zkey_a": 735191, "zkey_b": 846272}


def derive_format(template: ChatTemplate, *, end_tokens: Collection[str] = ()) -> ToolFormat | None:
    """The format in which a model writes calls; None if its template does not support tools.

    Args:
        template: the model's chat template, which may not exist.
        end_tokens: the texts of the end-of-sequence tokens.
    """
    if not template.exists or not _knows_tools(template):
        return None
    marks, answer = ThinkingMarks.derive(template), AnswerMarks.derive(template)
    plain = try_render(template, [USER, {"role": "assistant", "content": CONTENT}], tools=TOOLS)
    if plain is None or plain.count(CONTENT) != 1:
        return None
    for text_arguments, calls in (
        (False, (FIRST, SECOND)),
        (True, (FIRST, SECOND)),
        # Kimi K2's template writes a call's id, of which its name is a part.
        (False, named_by_id()),
    ):
        probe = _Probe(template, text_arguments, tuple(end_tokens), marks, answer, plain)
        found = _derive(probe, *calls)
        if found is not None and found.problem() is None:
            source = template.tool_source or ""
            if not found.trigger and _PYTHON_TAG in source:
                # Llama 3.x writes it before the calls of its built-in tools, and sometimes others.
                found = dataclasses.replace(found, optional_tag=_PYTHON_TAG)
            return found
    return known_format(template.tool_source or "")


def _knows_tools(template: ChatTemplate) -> bool:
    text = try_render(template, [USER], tools=TOOLS, add_generation_prompt=True)
    return text is not None and all(call.name in text for call in (FIRST, SECOND))


def _derive(probe: "_Probe", first: ProbeCall, second: ProbeCall) -> ToolFormat | None:
    one = probe.calls(first)
    if one is None or one.count(first.name) != 1:
        return None
    arguments = None
    if _json_object(one, first) is None:
        arguments = _argument_list(probe)
        if arguments is None:
            return None
    pattern = _pattern(one, [first], arguments)
    if pattern is None:
        return None
    short_ids = ID in pattern or probe.calls(dataclasses.replace(first, call_id=_LONG_ID)) is None
    two = probe.calls(first, second)
    both = None if two is None else _pattern(two, [first, second], arguments)
    parts = _split(*_numbered(pattern, both))
    if parts is None:
        return None
    by_id = _NUMBERED_ID in parts.call
    return ToolFormat(
        call=parts.call,
        arguments=arguments,
        section_begin=parts.section_begin,
        separator=parts.separator,
        section_end=parts.section_end,
        short_ids=short_ids and not by_id,
        text_arguments=probe.text_arguments,
        id_form=_NUMBERED_ID if by_id else "",
    )


def _numbered(one: str, two: str | None) -> tuple[str, str | None]:
    """The patterns of one call and of two, with ``$INDEX`` for a number that runs."""
    if two is None:
        return one, two
    for number in re.finditer(r"(?<![\w$])\d+(?!\w)", one):
        left, right = one[: number.start()][-_CONTEXT:], one[number.end() :][:_CONTEXT]
        # What surrounds the calls stands around the first number or the last, not around both.
        left, right = re.split(r"\s*[\[(]\s*", left)[-1], right[: _CONTEXT // 2]
        names = [f"{left}{int(number[0]) + step}{right}" for step in (0, 1)]
        if [two.count(each) for each in names] == [1, 1]:
            for each in names:
                two = two.replace(each, f"{left}{INDEX}{right}")
            return f"{one[: number.start()]}{INDEX}{one[number.end() :]}", two
    return one, two


@dataclass(frozen=True)
class _Probe:
    """Renders calls and strips the turn around them.

    ``plain`` is a conversation whose last turn has the same header and end, and no calls.
    """

    template: ChatTemplate
    text_arguments: bool
    end_tokens: tuple[str, ...]
    marks: ThinkingMarks | None
    answer: AnswerMarks | None
    plain: str

    def calls(self, *calls: ProbeCall) -> str | None:
        """The calls of one turn as the template writes them, or None if it refuses."""
        turn = {"role": "assistant", "content": "", "tool_calls": [*map(self._as_openai, calls)]}
        text = try_render(self.template, [USER, turn], tools=TOOLS)
        if text is None:
            return None
        before, after = self.plain.split(CONTENT)
        start = len(_common_prefix(before, text))
        # Two different tags may begin alike; keep whole tags.
        for bracket, closing in (("<", ">"), ("[", "]")):
            unclosed = text.rfind(bracket, 0, start)
            if unclosed > text.rfind(closing, 0, start):
                start = unclosed
        body = text[start:]
        body = (body if body.endswith(after) else body.removesuffix(self._end)).removesuffix(after)
        body = body.strip()
        if self.marks is not None and body.startswith(self.marks.begin):
            body = body.partition(self.marks.end)[2].strip()
        # An answer of no text, in its marks.
        if self.answer is not None:
            body = body.removeprefix(self.answer.begin).removeprefix(self.answer.end).strip()
        while ends := [end for end in self.end_tokens if end and body.endswith(end)]:
            body = body.removesuffix(ends[0]).strip()
        return body if 0 < len(body) <= _MAX_CALLS else None

    @cached_property
    def _end(self) -> str:
        """What every rendering ends with, such as a turn's end and the next one's beginning."""
        user = try_render(self.template, [USER], tools=TOOLS) or ""
        end = _common_suffix(user, self.plain.split(CONTENT)[1])
        # Different tags may end alike; keep whole tags.
        return end[end.find("<") :] if "<" in end else ""

    def _as_openai(self, call: ProbeCall) -> dict[str, Any]:
        arguments = json.dumps(call.arguments) if self.text_arguments else dict(call.arguments)
        function = {"name": call.name, "arguments": arguments}
        return {"id": call.call_id, "type": "function", "function": function}


def _json_object(text: str, call: ProbeCall) -> str | None:
    """A call's arguments as a JSON object within a text."""
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
    """The notation of arguments, from calls with numbers, with strings and without arguments."""
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
    if found is None or value is None:
        return None
    begin, end, separator = found
    if not value[2].startswith(middle):
        typed = _types(probe, middle, value[2])
        if typed is None:
            return None
        around_type, types = typed
        return ArgumentList(f"{begin}{KEY}{around_type}{VALUE}{end}", separator, types=types)
    quote = value[2].removeprefix(middle)
    python = f"{first}{middle}True" in truth
    # The parser reads Python's quotes and JSON's alike.
    quote = '"' if quote == "'" else quote
    cdata = not quote and _wraps_markup(probe, f"{first}{middle}")
    return ArgumentList(f"{begin}{KEY}{middle}{VALUE}{end}", separator, quote, python, cdata)


def _wraps_markup(probe: _Probe, before: str) -> bool:
    """Whether texts with markup in them are within CDATA; ``before``: up to the first value."""
    markup = "<zvalue & another>\n"
    text = probe.calls(dataclasses.replace(FIRST, arguments={next(iter(_NUMBERS)): markup}))
    return text is not None and f"{before}<![CDATA[{markup}]]>" in text


def _types(probe: _Probe, number: str, string: str) -> tuple[str, dict[str, str]] | None:
    """What stands between a key and its value, with ``$TYPE``, and the words for the types.

    Args:
        probe: renders calls.
        number: what stands there before a number.
        string: what stands there before a string.
    """
    begin, end = _common_prefix(number, string), _common_suffix(number, string)
    begin, end = re.sub(r"\w+$", "", begin), re.sub(r"^\w+", "", end)
    values = {"boolean": True, "null": None, "object": {"zkey_z": 1}, "array": [1]}
    key = next(iter(_NUMBERS))
    around = {"number": number, "string": string}
    for kind, value in values.items():
        text = probe.calls(dataclasses.replace(FIRST, arguments={key: value}))
        written = None if text is None else text.partition(key)[2].partition(end)
        if written is None or not written[1]:
            return None
        around[kind] = written[0] + end
    words = {kind: text[len(begin) : len(text) - len(end)] for kind, text in around.items()}
    assert words.keys() == JSON_TYPES
    return (f"{begin}{TYPE}{end}", words) if begin and end else None


def _between(text: str, words: Sequence[str]) -> list[str] | None:
    """The texts before, between and after some words, or None if they are not there in order."""
    parts = []
    for word in words:
        part, found, text = text.partition(word)
        if not found:
            return None
        parts.append(part)
    return [*parts, text]


def _parameter(before: str, between: str, after: str, nothing: str) -> tuple[str, str, str] | None:
    """What begins, ends and separates arguments, from the texts around two of them.

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
    # Splits that yield the same text are equivalent; one at a tag reads best.
    return next((each for each in found if each[0].startswith("<")), found[-1] if found else None)


def _pattern(text: str, calls: Sequence[ProbeCall], arguments: ArgumentList | None) -> str | None:
    """A text with placeholders for the names, ids and arguments of its calls."""
    for call in calls:
        written = _written(call, arguments, text)
        if written is None or text.count(call.name) != 1:
            return None
        text = text.replace(written, ARGUMENTS).replace(call.name, NAME)
        text = text.replace(call.call_id, ID)
    return text


def _written(call: ProbeCall, arguments: ArgumentList | None, text: str) -> str | None:
    """A call's arguments as they appear in a text."""
    if arguments is None:
        return _json_object(text, call)
    quotes = (arguments.quote, "'") if arguments.quote == '"' else (arguments.quote,)
    for quote in quotes:
        written = arguments.separator.join(
            arguments.parameter.replace(KEY, key)
            .replace(TYPE, arguments.types.get("string", ""))
            .replace(VALUE, f"{quote}{value}{quote}")
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
    """Tells the text around every call from the text around all of them."""
    places = list(re.finditer(r"\$(NAME|ARGUMENTS|ID|INDEX)", one))
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
    # Different tags may begin or end alike; keep whole tags.
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
