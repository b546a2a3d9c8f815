"""LarkWriter: builds a grammar in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from llguidance import regex_to_lark

from maskdial.grammar.json_text import check_text, json_text
from maskdial.grammar.source import GrammarSource, GrammarValue, lark_source, parse_grammar

# Not Lark, which describes the whole reply there.
ContentKind = Literal["json", "json_schema", "regex"]

ANY_TEXT = r"/(.|\n)*/"


class LarkWriter:
    """Collects rules, terminals and JSON schemas; methods return a reference to what they add.

    Args:
        special_ids: the ids of special tokens, by their text. In literals they stand for the token
            itself, which no ordinary text can spell.
        free_ids: the special tokens that may stand anywhere in free text, as in a reply without a
            grammar.

    Attributes:
        about: what warnings begin with, such as the name of a tool.
    """

    def __init__(self, special_ids: Mapping[str, int], free_ids: Collection[int] = ()) -> None:
        self.about = ""
        self._special_ids = special_ids
        self._free_ids = frozenset(free_ids)
        tags = sorted(special_ids, key=len, reverse=True)
        self._tags = re.compile("|".join(map(re.escape, tags)) or "(?!)")
        self._lines = ["%llguidance {}"]
        self._grammars: list[dict[str, Any]] = []
        self._embedded: dict[str, str] = {}
        self._num_names = 0
        self._warnings: dict[str, None] = {}

    def rule(self, body: str, *, attributes: str = "") -> str:
        """Adds a rule under a new name."""
        return self.define(self.new_name(), body, attributes=attributes)

    def terminal(self, body: str) -> str:
        """Adds a terminal: one lexeme."""
        return self.define(self.new_name().upper(), body)

    def new_name(self) -> str:
        """A name that no rule of the grammar has yet."""
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

    def split(self, text: str) -> tuple[str, str]:
        """The text before the first special token in it, and the rest as a literal; the whole text
        and nothing if there is none.
        """
        tag = self._tags.search(text)
        return (
            (text, "") if tag is None else (text[: tag.start()], self.literal(text[tag.start() :]))
        )

    @property
    def free(self) -> str:
        """Any of the special tokens that free text may contain; empty if there are none."""
        return f"<[{','.join(map(str, sorted(self._free_ids)))}]>" if self._free_ids else ""

    def schema(self, schema: object) -> str:
        """JSON under a schema, with the same limits as on ``/generate``.

        Raises:
            ValidationError: the schema is too large, too deep or invalid.
        """
        return self.embed("json_schema", {"schema": schema})

    def embed(self, kind: ContentKind, value: GrammarValue) -> str:
        """A text under a request's grammar, for which `parse_grammar` explains ``value``.

        Raises:
            ValidationError: the value is no such grammar, or is too large.
        """
        source = parse_grammar(kind, value)
        self.warn(source.warnings)
        if kind == "regex":
            return self._part(source.text, {"lark_grammar": source.text})
        return self._part(source.text, json.loads(source.text)["grammars"][0])

    def text(self, lark: str, place: Literal["json", "plain", "unknown"]) -> str | None:
        """A text under a Lark grammar of its own.

        Args:
            lark: the grammar.
            place: whether the text is within the quotes of a JSON string, or as it is; if nothing
                would tell where it ends, it is ``unknown``.

        Returns:
            None, with a warning, if the grammar cannot be enforced there. It is compiled all the
            same, so that one that is wrong is refused.

        Raises:
            ValidationError: the grammar is too large, or has special tokens in it.
        """
        source = parse_grammar("lark", lark)
        check_text(lark)
        translated = json_text(lark) if place == "json" else lark
        if translated is None or place == "unknown":
            self.warn([": its Lark grammar is not enforced"])
            self._part(source.text, {"lark_grammar": source.text})
            return None
        text = lark_source(translated)
        return self._part(text, {"lark_grammar": text})

    def _part(self, text: str, part: Mapping[str, Any]) -> str:
        """A reference to a grammar of its own."""
        if text not in self._embedded:
            name = f"part_{len(self._embedded)}"
            self._grammars.append({**part, "name": name})
            self._embedded[text] = f"@{name}"
        return self._embedded[text]

    def warn(self, warnings: Iterable[str]) -> None:
        """Adds sentences about constraints that are not enforced."""
        self._warnings |= dict.fromkeys(self.about + each for each in warnings)

    def source(self) -> GrammarSource:
        """The whole grammar, in llguidance's form. It needs a rule ``start``."""
        main = {"name": "calls", "lark_grammar": "\n".join(self._lines)}
        text = json.dumps({"grammars": [main, *self._grammars]}, separators=(",", ":"))
        return GrammarSource(text, tuple(self._warnings))


def quoted(text: str) -> str:
    """A text as a Lark literal; empty for an empty text."""
    # llguidance's lexer takes every character but this control character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def alternatives(bodies: Iterable[str]) -> str:
    """The body of a rule that matches any of some bodies."""
    return " | ".join(f"({body})" if body else '""' for body in bodies)


def containing(text: str) -> str:
    """A regular expression for every text that contains a given one."""
    return f"/(.|\\n)*{regex_to_lark(re.escape(text))}(.|\\n)*/"
