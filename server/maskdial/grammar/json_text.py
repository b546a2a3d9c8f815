"""Lark grammars of a text, made grammars of that text within the quotes of a JSON string.

In JSON a line feed is written ``\\n`` and a quote ``\\"``, so what a grammar says of these
characters is said of their escapes instead, and the rest stays. A text has one spelling: the short
escape where there is one, ``\\u001f`` in lower case for other control characters, and anything else
as itself.
A terminal with such characters becomes a rule, as `maskdial.grammar.json_regex` explains.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic_core import from_json

from maskdial.errors import ValidationError
from maskdial.grammar.json_regex import (
    Item,
    NotTranslatableError,
    Sign,
    item_of,
    literal,
    matches,
    signs,
    spelled,
)

# The signs of Lark, as llguidance reads them. A comment is never the beginning of an expression.
_SIGNS = re.compile(
    r"""
    (?P<comment> (?:\#|//)[^\n]*)
  | (?P<range> "(?:\\.|[^"\\\n])+"[ \t]*\.\.[ \t]*"(?:\\.|[^"\\\n])+")
  | (?P<string> "(?:\\.|[^"\\\n])*"i?)
  | (?P<regex> /(?:\\.|[^/\\\n])+/[imslux]*)
  | (?P<import> %import[ \t]+common\.(?P<name>\w+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?)
  | (?P<ignore> %ignore\b)
  | (?P<foreign> <[^<>\s]+>|@[\w-]+)
  | (?P<definition> ^[ \t]*[?!]?(?P<defined>_?[a-zA-Z][\w-]*)[ \t]*:)
  | (?P<alias_of> ->[ \t]*[\w-]+)
  | (?P<terminal> _?[A-Z][A-Z0-9_-]*)
  | (?P<rule> [?!]?_?[a-z][a-z0-9_-]*)
  | (?P<quantifier> [*+?]|\{\d*,?\d*\}|~[ \t]*\d+(?:[ \t]*\.\.[ \t]*\d+)?)
  | (?P<open> \() | (?P<close> \)) | (?P<bar> \|) | (?P<optional> [][])
  | (?P<space> \s+)
  | (?P<other> .)
    """,
    re.VERBOSE | re.MULTILINE,
)
_COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
"""Terminals that llguidance imports from ``common``, as Lark's library has them."""
_MAX_SETS = 256
_SETS = re.compile(r"\[(?:\\.|[^]\\])*+|\\.(?:\{[^}]*\}|\w{1,4})?", re.DOTALL)
_LINES = frozenset(_COMMON) - {"WS", "NEWLINE"}
_NO_ESCAPES = frozenset({"DECIMAL", "FLOAT", "SIGNED_FLOAT", "NUMBER", "SIGNED_NUMBER", "_EXP"})


def json_text(lark: str) -> str | None:
    """A Lark grammar of the text of a JSON string, without its quotes.

    Args:
        lark: the grammar of the text itself, in llguidance's dialect.

    Returns:
        The grammar, with each line where it was; None if it has something that cannot be said of
        the text in JSON, as a complement, a schema, or a terminal whose parts take from each other.

    Raises:
        ValidationError: it names special tokens or other grammars, which no text contains.
    """
    check_text(lark)
    if _has_many_sets(lark):
        return None
    try:
        return _Translation(lark).grammar
    except (NotTranslatableError, RecursionError):
        return None


def check_text(lark: str) -> None:
    """Refuses special tokens and references to other grammars.

    Raises:
        ValidationError: it has one.
    """
    for sign in _SIGNS.finditer(lark):
        if sign["foreign"]:
            raise ValidationError(
                f"a Lark grammar of a text cannot have {sign[0][:64]!r}: special tokens and other "
                "grammars are not part of a text"
            )


def _has_many_sets(lark: str) -> bool:
    """Whether a grammar has so many sets of characters that it takes long to ask llguidance what is
    in each of them: it takes about a millisecond.
    """
    found: set[str] = set()
    for sign in _SIGNS.finditer(lark):
        if sign["regex"]:
            found.update(_SETS.findall(sign[0]))
        last = sign[0].rpartition("/")[2] if sign["regex"] else sign[0][-1:]
        if (sign["regex"] or sign["string"]) and "i" in last:
            found.update(sign[0])
    return len(found) > _MAX_SETS


@dataclass(slots=True)
class _Definition:
    """A definition, or a directive: its first sign, and those behind it."""

    begin: re.Match[str] | None
    body: list[re.Match[str]]

    @property
    def name(self) -> str:
        if self.begin is None:
            return ""
        return self.begin["defined"] or self.begin["alias"] or self.begin["name"] or ""

    @property
    def is_terminal(self) -> bool:
        name = self.name.lstrip("_")
        return bool(name) and name == name.upper()

    @property
    def source(self) -> str:
        begin = "" if self.begin is None else self.begin[0]
        return begin + "".join(sign[0] for sign in self.body)


def within_lines(lark: str) -> bool:
    """Whether every lexeme of a Lark grammar ends at a line feed, or is one."""
    if _has_many_sets(lark):
        return False
    for sign in _SIGNS.finditer(lark):
        if sign["other"] or (sign["import"] and sign["name"] not in _LINES):
            return False
        if sign["regex"]:
            end = sign[0].rindex("/")
            try:
                if matches(sign[0][1:end], sign[0][end + 1 :], "\n"):
                    return False
            except NotTranslatableError:
                return False
    return True


class _Translation:
    """Translates one grammar.

    Attributes:
        grammar: the translation.
    """

    def __init__(self, lark: str) -> None:
        self._definitions = list(_definitions(lark))
        self._terminals = {each.name: each for each in self._definitions if each.is_terminal}
        self._rules = {each.name for each in self._definitions} - self._terminals.keys()
        self._items: dict[str, Item | None] = {}
        self.grammar = "".join(map(self._definition, self._definitions))

    def _definition(self, definition: _Definition) -> str:
        begin = definition.begin
        if begin is not None and begin["ignore"]:
            return self._ignored(definition)
        if not definition.is_terminal:
            head = "" if begin is None else begin[0]
            return head + "".join(map(self._of_rule, definition.body))
        item = self._terminal(definition.name)
        if item is None or item.free:
            return definition.source
        lines = "\n" * definition.source.count("\n")
        return f"{self._rule_name(definition.name)}: {item.text}{lines}"

    def _of_rule(self, sign: re.Match[str]) -> str:
        """A sign of a rule's body."""
        if sign["other"]:
            raise NotTranslatableError
        if sign["terminal"]:
            item = self._terminal(sign[0])
            return sign[0] if item is None or item.free else self._rule_name(sign[0])
        if sign["string"]:
            text, ignores_case = _read(sign[0])
            if not ignores_case:
                return f'"{spelled(spelled(text))}"'
        if sign["string"] or sign["regex"] or sign["range"]:
            item = item_of(_signs_of(sign))
            return f"({item.text})" if not item.free else item.lark
        return sign[0]

    def _ignored(self, definition: _Definition) -> str:
        """What is left out: one lexeme, which may be there many times."""
        given = [*self._signs(definition)]
        if item_of(given).free:
            return definition.source
        # Any number of one set: each character may be a lexeme, as there may be many.
        match [content for kind, content in given if kind not in ("open", "close")]:
            case [Item() as item] | [Item() as item, "+" | "*"]:
                options = [item.plain, item.escapes[1:-1]] if item.plain else [item.escapes[1:-1]]
                return f"%ignore /{'|'.join(options)}/" + "\n" * definition.source.count("\n")
        raise NotTranslatableError

    def _rule_name(self, terminal: str) -> str:
        name = f"t_{terminal.lower()}"
        if name in self._rules:
            raise NotTranslatableError
        return name

    def _terminal(self, name: str) -> Item | None:
        """What a terminal matches; None for a number, which has nothing to escape."""
        if name not in self._items:
            definition = self._terminals.get(name)
            if definition is None:
                return None  # llguidance says that there is none
            self._items[name] = None  # llguidance refuses one that has itself in it
            assert definition.begin is not None
            if definition.begin["import"] and definition.begin["name"] in _NO_ESCAPES:
                return None
            self._items[name] = item_of(self._signs(definition))
        return self._items[name]

    def _signs(self, definition: _Definition) -> Iterator[Sign]:
        """The signs of a terminal."""
        if definition.begin is not None and definition.begin["import"]:
            if definition.begin["name"] not in _COMMON:
                raise NotTranslatableError
            yield from signs(_COMMON[definition.begin["name"]], "")
            return
        for sign in definition.body:
            if sign["space"] or sign["comment"]:
                continue
            if sign["terminal"]:
                item = self._terminal(sign[0])
                if item is None:
                    raise NotTranslatableError
                yield "item", item
            elif sign["open"] or sign["close"] or sign["bar"]:
                yield ("open" if sign["open"] else "close" if sign["close"] else "bar"), sign[0]
            elif sign["quantifier"]:
                count = re.sub(r"[~ \t]", "", sign[0]).replace("..", ",")
                yield "quantifier", f"{{{count}}}" if sign[0].startswith("~") else count
            else:
                yield from _signs_of(sign)


def _definitions(lark: str) -> Iterator[_Definition]:
    current = _Definition(None, [])
    for sign in _SIGNS.finditer(lark):
        if sign["definition"] or sign["import"] or sign["ignore"]:
            yield current
            current = _Definition(sign, [])
        else:
            current.body.append(sign)
    yield current


def _signs_of(sign: re.Match[str]) -> Iterator[Sign]:
    """The signs of a string, a range or a regular expression."""
    if sign["string"]:
        text, ignores_case = _read(sign[0])
        yield from literal(text, ignores_case=ignores_case)
    elif sign["regex"]:
        end = sign[0].rindex("/")
        yield "open", "("
        yield from signs(sign[0][1:end], sign[0][end + 1 :])
        yield "close", ")"
    elif sign["range"]:
        first, last = (_read(each)[0] for each in re.findall(r'"(?:\\.|[^"\\])+"', sign[0]))
        if len(first) != 1 or len(last) != 1:
            raise NotTranslatableError
        yield from signs(f"[\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}]", "")
    else:
        raise NotTranslatableError


def _read(string: str) -> tuple[str, bool]:
    """The text of a string, which is written as in JSON, and whether its case does not matter."""
    ignores_case = string.endswith("i")
    try:
        return str(from_json(string.removesuffix("i"))), ignores_case
    except ValueError as error:  # llguidance refuses it, too
        raise NotTranslatableError from error
