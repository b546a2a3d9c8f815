"""What a receipt says of a request and of its reply: the SHA-256 of what lasts of them.

JSON counts as what it says, however it is written: keys are sorted, numbers and texts written as
Python's `json` does without spaces. Ids, times and what the cache held differ from one reply to the
next that says the same, and are left out.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_LEAF: dict[str, Any] = {}


def _leaves(*names: str) -> dict[str, Any]:
    return dict.fromkeys(names, _LEAF)


_CACHED = _leaves("cached_tokens")
_USAGE = {
    "prompt_tokens_details": _CACHED,
    "input_tokens_details": _CACHED,
    # Anthropic's counts what the cache did not have.
    **_leaves("cached_tokens", "input_tokens", "cache_read_input_tokens"),
}
_CALLS = {"tool_calls": {"*": _leaves("id"), **_leaves("id")}}
_ITEM = _leaves("id", "call_id")
_TOP = {
    **_leaves("id", "created", "created_at", "completed_at"),
    "output": {"*": _ITEM},
    "usage": _USAGE,
}
_PASSING: dict[str, Any] = {
    **_TOP,
    **_leaves("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"),
    "choices": {"*": {"message": _CALLS, "delta": _CALLS}},
    "content": {"*": _leaves("id")},
    "message": {**_leaves("id"), "usage": _USAGE, **_CALLS},
    # Of events
    **_leaves("item_id"),
    "content_block": _leaves("id"),
    "delta": {"message": _CALLS, "usage": _USAGE},
    "item": _ITEM,
    "response": _TOP,
}
"""Where ids, times and counts of the cache stand in the replies of any dialect; ``*`` is each item
of a list."""

_ID_OR_TIME = re.compile(r"[0-9a-f]{24}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|T\d\d:\d\d:\d\d")


def request_sha256(path: str, body: bytes, seed: int | None) -> str:
    """That of a request with the seed that it was answered with."""
    return _sha256({"path": path, "body": _read(body), "seed": seed})


def reply_sha256(body: bytes) -> str:
    """That of a reply: JSON, a stream of server-sent events, or other bytes."""
    return _sha256(lasting(body))


def lasting(body: bytes) -> Any:
    """What a reply says, without what passes."""
    content = _read(body)
    try:
        if not isinstance(content, str):
            return _without(content, _PASSING)
        events = [[name, _without(_read(data), _PASSING)] for name, data in _events(body)]
    except RecursionError:  # no reply of ours
        return body.decode("utf-8", "backslashreplace")
    # Texts that are streamed together come in any order, each in its own.
    return sorted(events, key=lambda event: _text_of(event[1])) or content


def _sha256(content: object) -> str:
    written = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(written.encode()).hexdigest()


def _read(content: bytes) -> Any:
    """JSON, or the text itself."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return content.decode("utf-8", "backslashreplace")


def _events(stream: bytes) -> Iterator[tuple[str, bytes]]:
    """The name and the data of each event; comments are none."""
    # A carriage return alone ends a line, too: for every reader the same events have to be there.
    for frame in stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        name, data = "", []
        for line in frame.split(b"\n"):
            field, _, value = line.partition(b":")
            if field == b"event":
                name = value.strip().decode("utf-8", "backslashreplace")
            elif field == b"data":
                data.append(value.removeprefix(b" "))
        if data:
            yield name, b"\n".join(data)


def _text_of(event: Any) -> int:
    """Which of the texts that are streamed together an event belongs to."""
    if not isinstance(event, Mapping):
        return 0
    choices = event.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else event
    index = first.get("index") if isinstance(first, Mapping) else None
    return index if isinstance(index, int) else 0


def _without(content: Any, names: Mapping[str, Any]) -> Any:
    """Content without what passes of the fields of a tree of names: a name that a request's schema
    gives, with words of a text, is none of these.
    """
    if isinstance(content, list) and "*" in names:
        return [_without(each, names["*"]) for each in content]
    if not isinstance(content, dict):
        return content
    return {
        name: _without(each, names.get(name, _LEAF))
        for name, each in content.items()
        if not (name in names and names[name] is _LEAF and _passes(each))
    }


def _passes(value: Any) -> bool:
    """Whether a value is a count, a time or a random id."""
    return isinstance(value, int) or (isinstance(value, str) and bool(_ID_OR_TIME.search(value)))
