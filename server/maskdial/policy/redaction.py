"""Redaction: which parts of a text a policy replaces, and the strings of JSON that it reads."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pydantic_core import from_json

from maskdial.policy.placeholders import Placeholders

_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*(?:(")|\\?$)|-?\d[\d.eE+-]*', re.DOTALL)
_KEY = re.compile(r"\s*:")
_JSON_BEGINS = ("{", "[", '"')


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
    """The texts in JSON that a model wrote, perhaps not to its end: strings, with the keys of
    objects, and numbers, as one may be a card's. Of another text, all of it.

    Args:
        text: as the model wrote it.
        names: keys that a schema has, which say nothing.
    """

    def __init__(self, text: str, names: Collection[str] = ()) -> None:
        self._text = text
        found: list[re.Match[str]] = []
        if text.lstrip()[:1] in _JSON_BEGINS:
            found += (each for each in _LITERAL.finditer(text) if not _is_named(each, names))
        self._places = [match.span() for match in found]
        self.texts = [_read(match) for match in found] if found else [text]
        """A text without any string is one: it may be another than JSON."""

    def replaced(self, texts: Sequence[str]) -> str:
        """The text with others in the place of `texts`; all else stays as it is."""
        if not self._places:
            return texts[0]
        parts = []
        for (start, end), old, new in zip(self._places, self.texts, texts, strict=True):
            if new != old:
                parts.append(Change(start, end, json.dumps(new, ensure_ascii=False)))
        return changed(self._text, parts)


def _is_named(match: re.Match[str], names: Collection[str]) -> bool:
    """Whether a literal is a key of these names."""
    return _KEY.match(match.string, match.end()) is not None and _read(match) in names


def _read(match: re.Match[str]) -> str:
    """The text of a literal, of which the end may be missing."""
    literal = match.group()
    if not literal.startswith('"'):
        return literal
    whole = literal if match[1] else literal + '"'
    try:
        return str(from_json(whole))
    except ValueError:  # an escape that is cut, or none of JSON's
        return literal.strip('"')
