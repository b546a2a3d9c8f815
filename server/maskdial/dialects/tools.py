"""Tools, as several dialects have them in their bodies."""

from collections.abc import Collection
from typing import Any

from pydantic import Field

from maskdial.dialects.lenient import Lenient
from maskdial.http.ignored import note_tool, noted


class FunctionBody(Lenient):
    """A function that the model may call. Its arguments satisfy the schema, ``strict`` or not."""

    habits = frozenset({"cache_control", "strict"})
    within = "tools.function"

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the arguments. Default: there are none."
    )


def left_out(tools: object, kinds: Collection[str]) -> object:
    """A list of tools without those of other kinds, which the provider would run: they are noted,
    or refused where unknown fields are.
    """
    if not isinstance(tools, list) or noted() is None:
        return tools
    kept = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            note_tool(kind)
        else:
            kept.append(tool)
    return kept
