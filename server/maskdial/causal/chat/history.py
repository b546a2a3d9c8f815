"""The messages of a conversation in the form that a model's chat template reads."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from maskdial.causal.chat.message import ChatMessage, ToolCall
from maskdial.causal.tools import ReplyFormat, ToolFormat
from maskdial.causal.tools.format import ARGUMENTS, ID, INDEX, KEY, NAME, VALUE, split_pattern


def render_messages(
    messages: Sequence[ChatMessage], reply_format: ReplyFormat
) -> list[Mapping[str, Any]]:
    """The messages as mappings, for `ChatTemplate.render`.

    Call ids get the form that the template takes. A turn with several calls becomes several turns
    where the template writes one call a turn. Past calls become text of the content where the
    template does not write any, and so do those whose arguments are no JSON object.
    """
    form = reply_format.calls
    if form is not None and not form.parallel and not form.untold:
        messages = [*_one_call_each(messages)]
    calls = [call for message in messages for call in message.tool_calls]
    names = {call.call_id: call.name for call in calls}
    ids = {call.call_id: _call_id(call, index, form) for index, call in enumerate(calls)}
    return [_render(message, reply_format, names, ids) for message in messages]


def _one_call_each(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """The messages, with a turn for each call and its result behind it."""
    results = {each.tool_call_id: each for each in messages if each.role == "tool"}
    moved: set[str] = set()
    for message in messages:
        if message.role == "tool" and message.tool_call_id in moved:
            continue
        if len(message.tool_calls) < 2:
            yield message
            continue
        for index, call in enumerate(message.tool_calls):
            one = dataclasses.replace(message, tool_calls=(call,))
            yield one if index == 0 else dataclasses.replace(one, content="", reasoning="")
            if call.call_id in results:
                moved.add(call.call_id)
                yield results[call.call_id]


def _render(
    message: ChatMessage,
    reply_format: ReplyFormat,
    names: Mapping[str, str],
    ids: Mapping[str, str],
) -> Mapping[str, Any]:
    form = reply_format.calls
    content, reasoning = message.content, message.reasoning
    if reply_format.harmony and message.tool_calls and content and reasoning:
        # gpt-oss's template takes one of them.
        content, reasoning = "", f"{reasoning}\n\n{content}"
    rendered: dict[str, Any] = {"role": message.role, "content": content}
    if reasoning:
        # Each template reads it under one of these names.
        rendered |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
    if message.tool_call_id:
        rendered["tool_call_id"] = ids.get(message.tool_call_id) or _short_id(
            message.tool_call_id, form
        )
        if message.tool_call_id in names:
            rendered["name"] = names[message.tool_call_id]
    calls = [(call, _arguments(call)) for call in message.tool_calls]
    known = [(call, arguments) for call, arguments in calls if arguments is not None]
    # A model's broken call stays in the history as it wrote it.
    texts = [content, *(_as_json(call, None) for call, arguments in calls if arguments is None)]
    if known and form is not None and not form.untold:
        rendered["tool_calls"] = [_render_call(call, form, ids, found) for call, found in known]
    elif known:
        texts.append(_in_content(known, form, ids))
    rendered["content"] = "\n".join(filter(None, texts))
    return rendered


def _render_call(
    call: ToolCall, form: ToolFormat, ids: Mapping[str, str], arguments: Mapping[str, Any]
) -> Mapping[str, Any]:
    function = {
        "name": call.name,
        "arguments": (
            json.dumps(arguments, ensure_ascii=False) if form.text_arguments else arguments
        ),
    }
    return {"id": ids[call.call_id], "type": "function", "function": function}


def _as_json(call: ToolCall, arguments: Mapping[str, Any] | None) -> str:
    """A call as JSON; arguments that are no JSON object as the model wrote them."""
    written = call.arguments if arguments is None else json.dumps(arguments)
    return f'{{"name": {json.dumps(call.name)}, "arguments": {written}}}'


def _in_content(
    calls: Sequence[tuple[ToolCall, Mapping[str, Any]]],
    form: ToolFormat | None,
    ids: Mapping[str, str],
) -> str:
    """Calls as the model writes them; as JSON where nothing is known of that."""
    if form is None:
        return "\n".join(_as_json(call, arguments) for call, arguments in calls)
    written = []
    for call, arguments in calls:
        index = re.search(r"\d*$", ids[call.call_id])
        fills = {
            NAME: call.name,
            ID: ids[call.call_id],
            INDEX: "" if index is None else index[0],
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
    return notation.separator.join(
        notation.parameter.replace(KEY, key).replace(
            VALUE,
            json.dumps(value, ensure_ascii=False) if isinstance(value, str) else as_text(value),
        )
        for key, value in arguments.items()
    )


def _arguments(call: ToolCall) -> Mapping[str, Any] | None:
    """The arguments of a call; None if they are no JSON object."""
    try:
        # Unlike json.loads, it refuses half of a surrogate pair, which no tokenizer takes.
        arguments = from_json(call.arguments.strip() or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


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
