"""How a model writes calls and reasoning, from its checkpoint's ``response_template``.

transformers 5 keeps it in ``tokenizer_config.json`` and parses replies by it: for each field of a
reply, what opens and closes it, and how its content is read. A field may have patterns, which match
more than one text; nobody can write by those, so they are left alone.
"""

import re
from collections.abc import Mapping
from typing import Any

from maskdial.causal.tools.format import ARGUMENTS, KEY, NAME, VALUE, ArgumentList, ToolFormat
from maskdial.causal.tools.marks import ThinkingMarks

_REASONING = ("reasoning_content", "reasoning", "thinking")
_NAME_GROUP = re.compile(r"\(\?P<name>[^()]+\)$")
# What may stand in a pattern that matches one text only, besides the escapes of punctuation
_LITERAL = re.compile(r"(?:[^\\.^$*+?{}\[\]|()]|\\[^\w\s])*")


def calls_of(template: Mapping[str, Any] | None) -> ToolFormat | None:
    """The format of calls; None if the template has none, or only a pattern to find them by.

    Args:
        template: the ``response_template``.
    """
    field = _fields(template).get("tool_calls")
    if not isinstance(field, dict) or field.get("content") != "json":
        return None
    transform = field.get("transform")
    function = transform.get("function") if isinstance(transform, dict) else None
    begin, end = _opening(field), field.get("close")
    options = field.get("content_args")
    arguments = _arguments(options) if options else None
    if begin is None or not isinstance(end, str) or (options and arguments is None):
        return None
    if function == "{content}" and arguments is None:
        call = f'{begin}{{"name": "{NAME}", "arguments": {ARGUMENTS}}}{end}'
    elif function == {"name": "{name}", "arguments": "{content}"} and begin.endswith(NAME):
        written = ARGUMENTS if arguments is None else f"{{{ARGUMENTS}}}"
        call = f"{begin}{written}{end}"
    else:
        return None
    found = ToolFormat(call, arguments, separator="" if field.get("repeats") else None)
    return None if found.problem() else found


def thinking_of(template: Mapping[str, Any] | None) -> ThinkingMarks | None:
    """The marks of reasoning; None if the template has none, or only a pattern to find them by.

    Args:
        template: the ``response_template``.
    """
    fields = _fields(template)
    for name in _REASONING:
        match fields.get(name):
            case {"open": str(begin), "close": str(end)} if begin.strip() and end.strip():
                return ThinkingMarks(begin.strip(), end.strip())
    return None


def _fields(template: Mapping[str, Any] | None) -> Mapping[str, Any]:
    fields = None if template is None else template.get("fields")
    return fields if isinstance(fields, dict) else {}


def _opening(field: dict[str, Any]) -> str | None:
    """The text before a call's content, with ``$NAME`` for a group of that name at its end."""
    if isinstance(field.get("open"), str):
        return str(field["open"])
    pattern = field.get("open_pattern")
    if not isinstance(pattern, str):
        return None
    # White space before a call belongs to no field.
    pattern = pattern.removeprefix(r"\s*")
    group = _NAME_GROUP.search(pattern)
    literal = pattern if group is None else pattern[: group.start()]
    if not _LITERAL.fullmatch(literal):
        return None
    return re.sub(r"\\(.)", r"\1", literal) + ("" if group is None else NAME)


def _arguments(options: object) -> ArgumentList | None:
    """The notation of arguments whose keys are bare and whose strings have a mark on both sides."""
    match options:
        case {"unquoted_keys": True, "string_delims": [[str(begin), str(end)]]} if begin == end:
            return ArgumentList(f"{KEY}:{VALUE}", ",", begin)
    return None
