"""The deltas of a reply."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call.

    Attributes:
        index: the call's index in the reply.
        arguments: a piece of the arguments, as JSON text.
        call_id: the call's id, in its first delta only.
        name: the tool's name, in the first delta only.
    """

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


ReplyDelta = ContentDelta | ReasoningDelta | ToolCallDelta


def merged(deltas: Iterable[ReplyDelta]) -> list[ReplyDelta]:
    """The deltas, with neighbors of the same channel joined."""
    joined: list[ReplyDelta] = []
    for delta in deltas:
        both = None if not joined else _join(joined[-1], delta)
        if both is None:
            joined.append(delta)
        else:
            joined[-1] = both
    return joined


def _join(first: ReplyDelta, second: ReplyDelta) -> ReplyDelta | None:
    match first, second:
        case ContentDelta(), ContentDelta():
            return ContentDelta(first.text + second.text)
        case ReasoningDelta(), ReasoningDelta():
            return ReasoningDelta(first.text + second.text)
        case ToolCallDelta(), ToolCallDelta(name=None) if first.index == second.index:
            arguments = first.arguments + second.arguments
            return ToolCallDelta(first.index, arguments, first.call_id, first.name)
    return None
