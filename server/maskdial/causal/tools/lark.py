"""LarkWriter: puts a grammar together in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from llguidance import regex_to_lark

from maskdial.causal.grammar.source import GrammarValue, parse_grammar

# Not Lark, which could name special tokens here.
ContentKind = Literal["json", "json_schema", "regex"]

ANY_TEXT = r"/(.|\n)*/"


class LarkWriter:
    """Collects rules, terminals and JSON schemas; its methods return how to refer to them.

    Args:
        special_ids: special tokens, by their text, that literals are made of: a model that writes
            one writes a token that no ordinary text can spell.
    """

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._special_ids = special_ids
        tags = sorted(special_ids, key=len, reverse=True)
        self._tags = re.compile("|".join(map(re.escape, tags)) or "(?!)")
        self._lines = ["%llguidance {}"]
        self._grammars: list[dict[str, Any]] = []
        self._embedded: dict[str, str] = {}
        self._num_names = 0

    def rule(self, body: str, *, attributes: str = "") -> str:
        """Adds a rule under a new name."""
        return self.define(self.new_name(), body, attributes=attributes)

    def terminal(self, body: str) -> str:
        """Adds a terminal, which the lexer reads as one."""
        return self.define(self.new_name().upper(), body)

    def new_name(self) -> str:
        """A name that no rule has."""
        self._num_names += 1
        return f"r{self._num_names}"

    def define(self, name: str, body: str, *, attributes: str = "") -> str:
        """Adds a rule or terminal under a name."""
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """A text, in which special tokens are the tokens themselves; empty for no text."""
        parts = []
        position = 0
        for tag in self._tags.finditer(text):
            parts.append(quoted(text[position : tag.start()]))
            parts.append(f"<[{self._special_ids[tag[0]]}]>")
            position = tag.end()
        parts.append(quoted(text[position:]))
        return " ".join(filter(None, parts))

    def schema(self, schema: object) -> str:
        """JSON under a schema, as ``/generate`` takes one.

        Raises:
            ValidationError: the schema is too large or no schema.
        """
        return self.embed("json_schema", {"schema": schema})

    def embed(self, kind: ContentKind, value: GrammarValue) -> str:
        """A text under a request's grammar, for which `parse_grammar` explains ``value``.

        Raises:
            ValidationError: the value is no such grammar, or is too large.
        """
        source = parse_grammar(kind, value)
        if source not in self._embedded:
            name = f"part_{len(self._embedded)}"
            part = {"lark_grammar": source}
            if kind != "regex":
                part = json.loads(source)["grammars"][0]
            self._grammars.append({**part, "name": name})
            self._embedded[source] = f"@{name}"
        return self._embedded[source]

    def source(self) -> str:
        """The grammar, whose rule ``start`` was defined, in llguidance's form."""
        main = {"name": "calls", "lark_grammar": "\n".join(self._lines)}
        return json.dumps({"grammars": [main, *self._grammars]}, separators=(",", ":"))


def quoted(text: str) -> str:
    """A text as a literal of Lark; empty for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def alternatives(bodies: Iterable[str]) -> str:
    """Any of some bodies."""
    return " | ".join(f"({body})" if body else '""' for body in bodies)


def containing(text: str) -> str:
    """A regular expression for any text that contains a text."""
    return f"/(.|\\n)*{regex_to_lark(re.escape(text))}(.|\\n)*/"
