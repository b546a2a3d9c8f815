"""Redaction: which parts of a text a policy replaces, and the strings of JSON that it reads."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from maskdial.policy.placeholders import Placeholders


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a text that is not to be seen: its first character and the one behind it."""

    start: int
    end: int
    label: str
    score: float
    restore: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """A part of a text, and what stands in its place."""

    start: int
    end: int
    text: str


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans in their order; those that overlap are one, with the label of the highest score."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.end, each.label)):
        if span.start == span.end:
            continue
        if joined and span.start < joined[-1].end:
            last = joined[-1]
            best = max(last, span, key=lambda each: each.score)
            restore = last.restore and span.restore
            end = max(last.end, span.end)
            joined[-1] = Span(last.start, end, best.label, best.score, restore)
        else:
            joined.append(span)
    return joined


def changes(text: str, spans: Iterable[Span], placeholders: Placeholders) -> list[Change]:
    """What to change in a text so that none of the spans is seen."""
    return [
        Change(
            each.start,
            each.end,
            placeholders.of(each.label, text[each.start : each.end], restore=each.restore),
        )
        for each in merged(spans)
    ]


def changed(text: str, parts: Sequence[Change], start: int = 0, end: int | None = None) -> str:
    """A part of a text with its changes, none of which it cuts."""
    end = len(text) if end is None else end
    written, read = [], start
    for each in parts:
        if each.start >= start and each.end <= end:
            written += [text[read : each.start], each.text]
            read = each.end
    return "".join([*written, text[read:end]])


class Strings:
    """The texts in the arguments of a call: the strings of their JSON, or all of what is no JSON.

    Args:
        arguments: as the model wrote them.
    """

    def __init__(self, arguments: str) -> None:
        self._arguments = arguments
        try:
            self._content, self._is_json = from_json(arguments.strip() or "{}"), True
        except ValueError:
            self._content, self._is_json = arguments, False
        self.texts: list[str] = []
        self._walk(self._content, self._note)

    def replaced(self, texts: Sequence[str]) -> str:
        """The arguments with other texts in the place of `texts`; unchanged if those are."""
        if list(texts) == self.texts:
            return self._arguments
        new = iter(texts)
        content = self._walk(self._content, lambda _: next(new))
        return json.dumps(content, ensure_ascii=False) if self._is_json else str(content)

    def _note(self, text: str) -> str:
        self.texts.append(text)
        return text

    def _walk(self, content: Any, change: Callable[[str], str]) -> Any:
        match content:
            case str():
                return change(content)
            case list():
                return [self._walk(each, change) for each in content]
            case dict():
                return {change(key): self._walk(each, change) for key, each in content.items()}
            case int() | float() if not isinstance(content, bool):
                # A number may be a card or a telephone number.
                text = json.dumps(content)
                new = change(text)
                return content if new == text else new
            case _:
                return content
