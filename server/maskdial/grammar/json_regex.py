"""Texts that one terminal of a grammar matches, as they are within the quotes of a JSON string.

llguidance's lexer reads bytes, takes what goes on as long as it can, and never goes back. All
escapes begin with a backslash, so a lexeme that may have one within could not end before another.
Therefore escapes are lexemes of their own, and what is between them is one:
``/[^x]*/`` becomes ``(/[^x"\\\\...]+/ | ESCAPE)*``. That is the same language only where no lexeme
can take what a later one needs, which is checked here.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

ESCAPED = [*map(chr, range(32)), '"', "\\"]
"""The characters that a JSON string cannot have as themselves."""
_PLAIN = r'[^"\\\x00-\x1f]'
_ANY = (1 << 256) - 1
_MAX_TEXT = 128 * 1024

# One sign of a regular expression, but for a class.
_SIGNS = re.compile(
    r"""
    (?P<set> \\[dswDSW]|\\[pP](?:\{[^}]*\}|.)|\.)
  | (?P<code> \\x[0-9a-fA-F]{2}|\\[xuU]\{[0-9a-fA-F]+\}|\\u[0-9a-fA-F]{4}|\\[afnrtv])
  | (?P<escape> \\[^a-zA-Z0-9<>])
  | (?P<open> \((?!\?)|\(\?(?::|P?<\w+>))
  | (?P<close> \))
  | (?P<bar> \|)
  | (?P<quantifier> [*+?]|\{\d*,?\d*\})
  | (?P<refused> \\|\(\?|\^|\$)
  | (?P<character> .)
    """,
    re.VERBOSE | re.DOTALL,
)

SignKind = Literal["open", "close", "bar", "quantifier", "item"]


class NotTranslatableError(Exception):
    """Something that cannot be said of the text in JSON, or not exactly."""


@dataclass(frozen=True, slots=True)
class Item:
    """A part of a terminal.

    Attributes:
        text: in Lark; a regular expression's source if ``free``.
        first: the bytes with which it may begin, as bits; a backslash does not count.
        open: the bytes that may go on with its last lexeme, or be taken in place of what follows.
        free: it matches no character that has to be escaped.
        nullable: it may be empty.
        escaped: of a set, the characters in it that have to be escaped.
        plain: of such a set, the other characters.
    """

    text: str
    first: int
    open: int
    free: bool
    nullable: bool = False
    escaped: tuple[str, ...] = ()
    plain: str = ""

    @property
    def lark(self) -> str:
        """The expression as a terminal of Lark."""
        return f"/{self.text}/" if self.free and self.text else self.text or '""'

    @property
    def escapes(self) -> str:
        """A lexeme for the escapes of a set."""
        return f"/{'|'.join(re.escape(spelled(each)) for each in self.escaped)}/"

    def __post_init__(self) -> None:
        if len(self.text) > _MAX_TEXT:  # terminals that have each other twice double it each time
            raise NotTranslatableError


Sign = tuple[SignKind, str | Item]

_EMPTY = Item("", 0, 0, True, nullable=True)


def signs(pattern: str, flags: str) -> Iterator[Sign]:
    """The signs of a regular expression in Rust's syntax.

    Raises:
        NotTranslatableError: a flag, an assertion, or what llguidance refuses in any case.
    """
    if set(flags) - {"i", "s", "u"}:
        raise NotTranslatableError
    place = 0
    while place < len(pattern):
        if pattern[place] == "[":
            end = _class_end(pattern, place)
            yield "item", _set(pattern[place:end], flags)
            place = end
            continue
        sign = _SIGNS.match(pattern, place)
        assert sign is not None
        place = sign.end()
        if sign["refused"]:
            raise NotTranslatableError
        if sign["open"] or sign["close"] or sign["bar"]:
            yield ("open" if sign["open"] else "close" if sign["close"] else "bar"), sign[0]
        elif sign["quantifier"]:
            yield "quantifier", sign[0]
        else:
            yield "item", _set(sign[0], flags)


def matches(pattern: str, flags: str, character: str) -> bool:
    """Whether a set of a regular expression has a character that has to be escaped.

    Raises:
        NotTranslatableError: as `signs`.
    """
    items = (content for _, content in signs(pattern, flags) if isinstance(content, Item))
    return any(character in item.escaped for item in items)


def literal(text: str, *, ignores_case: bool = False) -> Iterator[Sign]:
    """The signs of a text."""
    yield "open", "("
    for character in text:
        yield "item", _set(f"\\x{{{ord(character):x}}}", "i" if ignores_case else "")
    yield "close", ")"


def item_of(given: Iterable[Sign]) -> Item:
    """What signs match together.

    Raises:
        NotTranslatableError: a lexeme could take what a later one needs.
    """
    reader = _Reader([*given])
    item = reader.alternatives()
    if not reader.ended:
        raise NotTranslatableError  # a bracket that nothing opened
    return item


def spelled(text: str) -> str:
    """A text as it is within a JSON string's quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


class _Reader:
    def __init__(self, given: Sequence[Sign]) -> None:
        self._signs = given
        self._place = 0

    @property
    def ended(self) -> bool:
        return self._place == len(self._signs)

    def _next(self) -> SignKind | None:
        return None if self.ended else self._signs[self._place][0]

    def alternatives(self) -> Item:
        """Up to a bracket that closes, or the end."""
        options = [self._sequence()]
        while self._next() == "bar":
            self._place += 1
            options.append(self._sequence())
        return _alternatives(options)

    def _sequence(self) -> Item:
        parts: list[Item] = []
        while self._next() in ("open", "item"):
            kind, content = self._signs[self._place]
            self._place += 1
            if isinstance(content, Item):
                item = content
            else:
                assert kind == "open"
                item = self.alternatives()
                if self._next() != "close":
                    raise NotTranslatableError
                self._place += 1
            while self._next() == "quantifier":
                quantifier = self._signs[self._place][1]
                assert isinstance(quantifier, str)
                item = _repeated(item, quantifier)
                self._place += 1
            parts.append(item)
        return _sequence(parts)


def _sequence(parts: Sequence[Item]) -> Item:
    chunks: list[Item] = []
    for part in parts:
        if chunks and chunks[-1].free and part.free:
            chunks[-1] = _joined(chunks[-1], part)
        else:
            chunks.append(part)
    if len(chunks) <= 1:
        return chunks[0] if chunks else _EMPTY
    first, reached = 0, True
    unfinished = 0  # bytes that something before would take
    for chunk in chunks:
        if unfinished & chunk.first:
            raise NotTranslatableError
        first |= chunk.first if reached else 0
        reached = reached and chunk.nullable
        unfinished = chunk.open | (unfinished if chunk.nullable else 0)
        if chunk.nullable:
            unfinished |= chunk.first
    text = " ".join(_grouped(chunk) for chunk in chunks)
    return Item(text, first, unfinished, False, all(chunk.nullable for chunk in chunks))


def _joined(left: Item, right: Item) -> Item:
    """Two lexemes that follow each other as a single one."""
    exact = not left.open & right.first
    unfinished = right.open | (left.open if right.nullable else 0) if exact else _ANY
    first = left.first | (right.first if left.nullable else 0)
    return Item(left.text + right.text, first, unfinished, True, left.nullable and right.nullable)


def _alternatives(options: Sequence[Item]) -> Item:
    if len(options) == 1:
        return options[0]
    first = unfinished = 0
    free = all(option.free for option in options)
    exact = True
    for option in options:
        exact = exact and not first & option.first
        first |= option.first
        unfinished |= option.open
    nullable = any(option.nullable for option in options)
    unfinished |= first if nullable else 0
    if free:
        text = "(?:" + "|".join(option.text for option in options) + ")"
        return Item(text, first, unfinished if exact else _ANY, True, nullable)
    if not exact:
        raise NotTranslatableError
    return Item(" | ".join(map(_grouped, options)), first, unfinished, False, nullable)


def _repeated(item: Item, quantifier: str) -> Item:
    if item.free and not item.text:
        return item
    nullable = item.nullable or quantifier in "*?" or quantifier[1:2] in ("0", ",")
    again = quantifier != "?"
    if item.plain:  # what is between them is one lexeme
        text = f"/{item.plain}+/ | {item.escapes}" if quantifier in "*+" else item.text
        unfinished = 0 if re.fullmatch(r"\{\d+\}", quantifier) else item.first
        return Item(f"({text}){quantifier}", item.first, unfinished, False, nullable)
    exact = not (again and item.open & item.first)
    unfinished = item.open | item.first
    if item.free:
        text = item.text if _is_one(item.text) else f"(?:{item.text})"
        return Item(text + quantifier, item.first, unfinished if exact else _ANY, True, nullable)
    if not exact:
        raise NotTranslatableError
    return Item(f"({item.text}){quantifier}", item.first, unfinished, False, nullable)


def _is_one(regex: str) -> bool:
    """Whether a quantifier would be of the whole expression."""
    return len(regex) == 1 or (regex[0] == "[" and _class_end(regex, 0) == len(regex))


def _grouped(item: Item) -> str:
    return item.lark if item.free or not item.text else f"({item.text})"


@lru_cache(maxsize=2048)
def _set(atom: str, flags: str) -> Item:
    """A character of a set, or its escape."""
    if len(atom) == 1 and atom != "." and atom not in ESCAPED and "i" not in flags:
        return Item(re.escape(atom).replace("/", r"\/"), 1 << atom.encode()[0], 0, True)
    inner = atom
    if atom == ".":
        inner = r"\s\S" if "s" in flags else r"[^\n]"
    elif len(atom) == 1:
        inner = f"\\x{{{ord(atom):x}}}"
    case = "(?i:{})" if "i" in flags else "{}"
    members = _bits(case.format(f"[{inner}]"))
    found = tuple(each for each in ESCAPED if members >> ord(each) & 1)
    plain = case.format(f"[[{inner}]&&{_PLAIN}]")
    bits = _bits(plain)
    if not found:
        return Item(plain, bits, 0, True)
    item = Item("", bits, 0, False, escaped=found, plain=plain if bits else "")
    return replace(item, text=f"/{plain}/ | {item.escapes}" if bits else item.escapes)


def _bits(regex: str) -> int:
    """The bytes with which a text of a regular expression may begin; 0 if there is no such text.

    Raises:
        NotTranslatableError: llguidance refuses it.
    """
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_lark(f"start: /{regex}/"), log_level=0)
    if matcher.is_error():
        raise NotTranslatableError
    return int.from_bytes(matcher.compute_bitmask()[:32], "little")


def _class_end(pattern: str, start: int) -> int:
    """Where a class ends; classes may have classes in them."""
    depth, place = 0, start
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place += 1
        elif character == "[":
            depth += 1
            place += pattern.startswith("^", place + 1)
            place += pattern.startswith("]", place + 1)  # the first one is itself
        elif character == "]":
            depth -= 1
            if not depth:
                return place + 1
        place += 1
    raise NotTranslatableError  # llguidance says that it is not closed


class _Bytes:
    """A vocabulary of all bytes."""

    tokens: tuple[bytes, ...] = (*(bytes([each]) for each in range(256)), b"<end>")
    special_token_ids = (256,)
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=1)
def _bytes() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))
