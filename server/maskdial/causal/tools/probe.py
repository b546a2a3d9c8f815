"""Conversations of unique words, which are found again in what a chat template renders."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maskdial.causal.chat.template import ChatTemplate
from maskdial.errors import ValidationError

USER = {"role": "user", "content": "Zuserz"}
CONTENT = "Zcontentz"
REASONING = "Zreasoningz"

# A rendering of these few words that is longer is not worth reading.
_MAX_CHARACTERS = 100_000


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A call with unique parts."""

    name: str
    call_id: str
    arguments: Mapping[str, Any]


# Mistral's templates refuse ids that are not 9 letters or digits.
FIRST = ProbeCall("zfirst_tool", "q9Zk3mXw1", {"zkey_a": "zvalue_a", "zkey_b": "zvalue_b"})
SECOND = ProbeCall("zother_tool", "r8Yj4nVu2", {"zkey_c": "zvalue_c", "zkey_d": "zvalue_d"})


def named_by_id() -> tuple[ProbeCall, ProbeCall]:
    """The two calls with ids in Kimi K2's form."""
    first, second = (
        replace(call, call_id=f"functions.{call.name}:{index}")
        for index, call in enumerate((FIRST, SECOND))
    )
    return first, second


_PROPERTIES = {key: {"type": "string"} for call in (FIRST, SECOND) for key in call.arguments}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": call.name,
            "description": "Zdescriptionz",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": []},
        },
    }
    for call in (FIRST, SECOND)
]


def try_render(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = False,
) -> str | None:
    """Renders a conversation; None if the template fails or writes too much."""
    try:
        text = template.render(
            messages,
            tools=tools,
            variables=variables,
            add_generation_prompt=add_generation_prompt,
        )
    except ValidationError:
        return None
    return text if len(text) <= _MAX_CHARACTERS else None
