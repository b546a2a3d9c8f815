"""The messages of a conversation in the form that a model's chat template reads."""

import dataclasses
import hashlib
import json
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from string import digits
from typing import Any, Literal

from pydantic_core import from_json

from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.causal.chat.template import BREAKPOINT
from maskdial.causal.tools import ReplyFormat, ToolFormat
from maskdial.causal.tools.format import ARGUMENTS, ID, INDEX, KEY, NAME, VALUE, split_pattern


def render_messages(
    messages: Sequence[ChatMessage], reply_format: ReplyFormat
) -> list[Mapping[str, Any]]:
    """The messages as mappings, for `ChatTemplate.render`.

    Call ids get the form that the template takes. A turn with several calls becomes several turns
    where the template writes one call a turn. Past calls become text of the content where the
    template does not write any, and so do those whose arguments are no JSON object, unless they
    have a result, which templates write behind calls only: these have what can be read of them.
    """
    form = reply_format.calls
    if form is not None and not form.parallel and not form.untold:
        messages = [*_one_call_each(messages)]
    answered, ids, rendered = _answered(messages), list[list[str]](), list[Mapping[str, Any]]()
    with_results = set(answered.values())
    num_calls = 0
    for index, message in enumerate(messages):
        ids.append([])
        for call in message.tool_calls:
            ids[-1].append(_call_id(call, num_calls, form))
            num_calls += 1
        asked = None
        if index in answered:
            turn, place = answered[index]
            asked = messages[turn].tool_calls[place].name, ids[turn][place]
        arguments = [
            _arguments(call, partly=(index, place) in with_results)
            for place, call in enumerate(message.tool_calls)
        ]
        rendered.append(_render(message, reply_format, ids[-1], arguments, asked))
    return rendered


def _answered(messages: Sequence[ChatMessage]) -> dict[int, tuple[int, int]]:
    """The call that each result belongs to, by their places: of the nearest turn before it that has
    its id, as some models and clients number the calls of each turn anew.
    """
    found: dict[int, tuple[int, int]] = {}
    calls: dict[str, deque[tuple[int, int]]] = {}
    for index, message in enumerate(messages):
        if message.role == "tool":
            places = calls.get(message.tool_call_id)
            if places:
                found[index] = places[0] if len(places) == 1 else places.popleft()
        for call in message.tool_calls:
            calls[call.call_id] = deque()
        for place, call in enumerate(message.tool_calls):
            calls[call.call_id].append((index, place))
    return found


def _one_call_each(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """The messages, with a turn for each call and its results behind it."""
    answered = _answered(messages)
    results = defaultdict[tuple[int, int], list[ChatMessage]](list)
    for index, asked in answered.items():
        results[asked].append(messages[index])
    for index, message in enumerate(messages):
        if index in answered and len(messages[answered[index][0]].tool_calls) > 1:
            continue
        if len(message.tool_calls) < 2:
            yield message
            continue
        for place, call in enumerate(message.tool_calls):
            one = dataclasses.replace(message, tool_calls=(call,))
            yield one if place == 0 else dataclasses.replace(one, content="", reasoning="")
            yield from results[index, place]


def _render(
    message: ChatMessage,
    reply_format: ReplyFormat,
    ids: Sequence[str],
    arguments: Sequence[Mapping[str, Any] | None],
    asked: tuple[str, str] | None,
) -> Mapping[str, Any]:
    """A message as a mapping.

    Args:
        message: the message.
        reply_format: of the model.
        ids: of the message's calls, as the template takes them.
        arguments: theirs; None where they are no JSON object.
        asked: name and id of the call that it is the result of, if it is one.
    """
    form = reply_format.calls
    content, reasoning = message.content, message.reasoning
    if reply_format.harmony and message.tool_calls and content and reasoning:
        # gpt-oss's template takes one of them.
        content, reasoning = "", f"{reasoning}\n\n{content}"
    rendered: dict[str, Any] = {"role": message.role, "content": content}
    if message.ends_prefix:
        rendered[BREAKPOINT] = True
    if reasoning:
        # Each template reads it under one of these names.
        rendered |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
    if asked is not None:
        rendered["name"], rendered["tool_call_id"] = asked
    elif message.tool_call_id:
        rendered["tool_call_id"] = _short_id(message.tool_call_id, form)
    calls = [*zip(message.tool_calls, ids, arguments, strict=True)]
    known = [(call, call_id, read) for call, call_id, read in calls if read is not None]
    # A model's broken call stays in the history as it wrote it.
    texts = [content, *(_as_json(call, None) for call, _, read in calls if read is None)]
    if known and form is not None and not form.untold:
        rendered["tool_calls"] = [_render_call(*each, form) for each in known]
    elif known:
        texts.append(_in_content(known, form))
    rendered["content"] = "\n".join(filter(None, texts))
    return rendered


def _render_call(
    call: ToolCall, call_id: str, arguments: Mapping[str, Any], form: ToolFormat
) -> Mapping[str, Any]:
    function = {
        "name": call.name,
        "arguments": (
            json.dumps(arguments, ensure_ascii=False) if form.text_arguments else arguments
        ),
    }
    return {"id": call_id, "type": "function", "function": function}


def _as_json(call: ToolCall, arguments: Mapping[str, Any] | None) -> str:
    """A call as JSON; arguments that are no JSON object as the model wrote them."""
    written = call.arguments if arguments is None else json.dumps(arguments)
    return f'{{"name": {json.dumps(call.name)}, "arguments": {written}}}'


def _in_content(
    calls: Sequence[tuple[ToolCall, str, Mapping[str, Any]]], form: ToolFormat | None
) -> str:
    """Calls as the model writes them; as JSON where nothing is known of that."""
    if form is None:
        return "\n".join(_as_json(call, arguments) for call, _, arguments in calls)
    written = []
    for call, call_id, arguments in calls:
        fills = {
            NAME: call.name,
            ID: call_id,
            INDEX: call_id[len(call_id.rstrip(digits)) :],
            ARGUMENTS: _written(arguments, form),
        }
        parts = split_pattern(form.call)
        written.append("".join(fills.get(part, part) for part in parts))
    return form.section_begin + (form.separator or "").join(written) + form.section_end


def _written(arguments: Mapping[str, Any], form: ToolFormat) -> str:
    notation = form.arguments
    if notation is None:
        return json.dumps(arguments, ensure_ascii=False)
    as_text = repr if notation.python else json.dumps
    parts, written = split_pattern(notation.parameter), []
    for key, value in arguments.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else as_text(value)
        fills = {KEY: key, VALUE: text}
        written.append("".join(fills.get(part, part) for part in parts))
    return notation.separator.join(written)


def _arguments(call: ToolCall, *, partly: bool) -> Mapping[str, Any] | None:
    """The arguments of a call; None if they are no JSON object.

    ``partly``: those of the beginning of one, and none if they are something else.
    """
    begun: Literal["off", "trailing-strings"] = "trailing-strings" if partly else "off"
    try:
        # Unlike json.loads, it refuses half of a surrogate pair, which no tokenizer takes.
        arguments = from_json(call.arguments.strip() or "{}", allow_partial=begun)
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        return arguments
    return {} if partly else None


def _call_id(call: ToolCall, index: int, form: ToolFormat | None) -> str:
    """A call's id as the template takes it, the same for the call and its result."""
    if form is None or not form.id_form:
        return _short_id(call.call_id, form)
    own = re.escape(form.id_form).replace(re.escape(NAME), re.escape(call.name))
    own = own.replace(re.escape(INDEX), r"\d+")
    return call.call_id if re.fullmatch(own, call.call_id) else form.new_call_id(call.name, index)


def _short_id(call_id: str, form: ToolFormat | None) -> str:
    short = len(call_id) == 9 and call_id.isascii() and call_id.isalnum()
    if form is None or not form.short_ids or short:
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]
