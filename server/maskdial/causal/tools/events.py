"""What comes of a reply, piece by piece."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the model's thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call.

    Attributes:
        index: which call of the reply, from 0.
        arguments: more of the arguments, as JSON text.
        call_id: its id, in its first delta only.
        name: the tool's name, in its first delta only.
    """

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


ReplyDelta = ContentDelta | ReasoningDelta | ToolCallDelta


def merged(deltas: Iterable[ReplyDelta]) -> list[ReplyDelta]:
    """The deltas, neighbors of one channel joined."""
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
