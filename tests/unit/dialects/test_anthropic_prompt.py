"""What of an Anthropic body becomes part of the prompt, and how."""

from typing import Any

import pytest

from maskdial.causal.request import GenerationRequest
from maskdial.dialects.anthropic.body import MessagesBody
from maskdial.http.ignored import Ignored, noting

BILLING = "x-anthropic-billing-header: cc_version=2.1.332.b2c; cc_entrypoint=cli;"


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def read(ignored: Ignored | None, **fields: Any) -> list[Any]:
    """The messages of a body."""
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], **fields}
    with noting(ignored):
        parsed = MessagesBody.model_validate(body)
    return [*parsed.chat(GenerationRequest()).messages]


@pytest.mark.parametrize("system", [BILLING, [text(BILLING)], [text(BILLING), text("You are.")]])
def test_a_line_that_spoils_prefixes_is_left_out_where_the_reply_says_so(system: Any) -> None:
    ignored = Ignored()
    lenient, strict = read(ignored, system=system), read(None, system=system)
    assert list(ignored.fields) == ["system.x-anthropic-billing-header"]
    assert strict[0].content.startswith(BILLING)
    assert not any(BILLING in each.content for each in lenient)
    assert lenient[-1] == strict[-1]


def test_no_other_block_is_left_out() -> None:
    ignored = Ignored()
    system = [text("You are."), text(BILLING)]
    assert read(ignored, system=system) == read(None, system=system)
    assert not ignored.fields


@pytest.mark.parametrize("hint", [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, 7])
def test_hints_for_the_prefix_cache_are_at_the_end_of_messages(hint: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "42"}
    messages = [
        {"role": "user", "content": [text("One", cache_control=hint), text("more")]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
        },
        {"role": "user", "content": [result | {"cache_control": hint}, text("Two")]},
    ]
    found = read(None, messages=messages)
    assert [(each.role, each.ends_prefix) for each in found] == [
        ("user", True),
        ("assistant", False),
        ("tool", True),
        ("user", False),
    ]
    assert not any(each.ends_prefix for each in read(None))
