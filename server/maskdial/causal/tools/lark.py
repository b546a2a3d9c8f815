"""LarkWriter: builds a grammar in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llguidance import regex_to_lark

from maskdial.causal.grammar.source import parse_grammar

ANY_TEXT = r"/(.|\n)*/"


class LarkWriter:
    """Collects rules, terminals and JSON schemas; methods return a reference to what they add.

    Args:
        special_ids: the ids of special tokens, by their text. In literals they stand for the token
            itself, which no ordinary text can spell.
    """

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        tags = sorted(special_ids, key=len, reverse=True)
        self._tags = re.compile("|".join(map(re.escape, tags)) or "(?!)")
        self._lines = ["%llguidance {}"]
        self._grammars: list[dict[str, Any]] = []
        self._schemas: dict[str, str] = {}
        self._num_names = 0

    def rule(self, body: str, *, attributes: str = "") -> str:
        """Adds a rule under a new name."""
        return self.define(self.new_name(), body, attributes=attributes)

    def terminal(self, body: str) -> str:
        """Adds a terminal: one lexeme."""
        return self.define(self.new_name().upper(), body)

    def new_name(self) -> str:
        """An unused name."""
        self._num_names += 1
        return f"r{self._num_names}"

    def define(self, name: str, body: str, *, attributes: str = "") -> str:
        """Adds a rule or terminal under a name."""
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """A literal text; empty for an empty text."""
        parts = []
        position = 0
        for tag in self._tags.finditer(text):
            parts.append(quoted(text[position : tag.start()]))
            parts.append(f"<[{self._special_ids[tag[0]]}]>")
            position = tag.end()
        parts.append(quoted(text[position:]))
        return " ".join(filter(None, parts))

    def schema(self, schema: object) -> str:
        """JSON under a schema, with the same limits as on ``/generate``.

        Raises:
            ValidationError: the schema is too large, too deep or invalid.
        """
        source = parse_grammar("json_schema", {"schema": schema})
        if source not in self._schemas:
            name = f"json_{len(self._schemas)}"
            self._grammars.append({**json.loads(source)["grammars"][0], "name": name})
            self._schemas[source] = f"@{name}"
        return self._schemas[source]

    def source(self) -> str:
        """The whole grammar, in llguidance's form. It needs a rule ``start``."""
        main = {"name": "calls", "lark_grammar": "\n".join(self._lines)}
        return json.dumps({"grammars": [main, *self._grammars]}, separators=(",", ":"))


def quoted(text: str) -> str:
    """A text as a Lark literal; empty for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def alternatives(bodies: Iterable[str]) -> str:
    """One of some bodies."""
    return " | ".join(f"({body})" if body else '""' for body in bodies)


def containing(text: str) -> str:
    """A regular expression for every text that contains a given one."""
    return f"/(.|\\n)*{regex_to_lark(re.escape(text))}(.|\\n)*/"
