"""Regular expressions of a schema: which keys one matches, and one for all keys but some."""

import re
from collections.abc import Collection, Iterable
from itertools import product

from llguidance import regex_to_lark
from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema

_MAX_NAME = 60  # characters; the expression is nested once for each
_MAX_NAMES = 1000  # characters, of all together; compiling it takes 0.1 ms for each
_DIGITS = "0123456789"
_WORD = _DIGITS + "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_"
_PLAIN_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_AROUND = re.compile(r"\(\?<?[=!]")
_REFERENCES = frozenset("bBk123456789")
_MAX_DEPTH = 20
_MAX_WORD = 200  # characters
_NUM_PROBED = 16
_MAX_PROBED = 40  # characters
# Keys that a schema hardly names one by one.
_PROBES = ("", "a", "Zq", "q7x-", "_0", "é", "7", "x y", "A.b/c", "$ref", "\n", "key_of_no_meaning")


def words_of(pattern: str, limit: int) -> list[str] | None:
    """All texts that an anchored regular expression matches.

    Args:
        pattern: such as ``^(a|b[0-9])$``.
        limit: how many there may be.

    Returns:
        The texts in order; None if there are more, or the expression has parts that this function
        does not read, or is not anchored at both ends.
    """
    if not pattern.startswith("^") or not pattern.endswith("$") or len(pattern) > 1000:
        return None
    try:
        reader = _Reader(pattern[1:-1], limit)
        words = reader.alternatives(0)
        return None if reader.rest or len(words) > limit else list(words)
    except _UnreadableError:
        return None


def looks_around(pattern: str) -> bool:
    """Whether an expression has look-around, a word boundary or a backreference, which no automaton
    reads.
    """
    position, in_class = 0, False
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 1
            if not in_class and pattern[position : position + 1] in _REFERENCES:
                return True
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif _AROUND.match(pattern, position):
            return True
        position += 1
    return False


def matches_every_key(patterns: Iterable[str]) -> bool:
    """Whether some expressions seem to match every key: they do match a dozen different ones.

    Only short ones are tried, which are cheap to compile.
    """
    short = [pattern for pattern in patterns if len(pattern) <= _MAX_PROBED and "{" not in pattern]
    searchers = [_searcher(pattern) for pattern in short[:_NUM_PROBED]]
    return all(any(_found(each, probe) for each in searchers) for probe in _PROBES)


def all_but(names: Collection[str]) -> str | None:
    """A regular expression for every text but the given ones; None if it would be too large."""
    if sum(map(len, names)) > _MAX_NAMES or any(len(name) > _MAX_NAME for name in names):
        return None
    return f"^{_all_but(sorted(set(names)))}$"


def _all_but(names: list[str]) -> str:
    """Texts that differ from all names, which are sorted."""
    by_first: dict[str, list[str]] = {}
    for name in names:
        if name:
            by_first.setdefault(name[0], []).append(name[1:])
    if not by_first:
        return "(?s:.+)" if names else "(?s:.*)"
    firsts = "".join(map(_literal, by_first))
    options = [rf"[^{firsts}](?s:.*)"]
    options += [f"{_literal(first)}{_all_but(rest)}" for first, rest in by_first.items()]
    return f"(?:{'|'.join(options)}){'' if '' in names else '?'}"


def _literal(character: str) -> str:
    plain = character.isascii() and character.isalnum()
    return character if plain else rf"\x{{{ord(character):x}}}"


def _searcher(pattern: str) -> SchemaValidator | None:
    """The expression as Rust's regex crate reads it, in linear time; None if it does not."""
    try:
        ascii_only = regex_to_lark(pattern, use_ascii="dw").replace(r"\/", "/")
        return SchemaValidator(core_schema.str_schema(pattern=ascii_only))
    except (SchemaError, ValueError):
        return None


def _found(searcher: SchemaValidator | None, text: str) -> bool:
    if searcher is None:
        return False
    try:
        searcher.validate_python(text)
    except ValidationError:
        return False
    return True


class _UnreadableError(Exception):
    """The expression has a part that is not read, or matches too much."""


class _Reader:
    """Reads an expression of literals, classes, groups, alternatives and counts."""

    def __init__(self, text: str, limit: int) -> None:
        self.rest = text
        self._limit = limit

    def alternatives(self, depth: int) -> dict[str, None]:
        """Texts of everything up to a closing bracket or the end."""
        if depth > _MAX_DEPTH:
            raise _UnreadableError
        found = self._sequence(depth)
        while self._take("|"):
            if not depth:  # then each anchor belongs to one alternative only
                raise _UnreadableError
            found |= self._sequence(depth)
            self._check(found)
        return found

    def _sequence(self, depth: int) -> dict[str, None]:
        found = {"": None}
        while self.rest and self.rest[0] not in "|)":
            part = self._counted(self._atom(depth))
            found = dict.fromkeys(a + b for a, b in product(found, part))
            self._check(found)
        return found

    def _check(self, found: Collection[str]) -> None:
        if len(found) > self._limit or any(len(word) > _MAX_WORD for word in found):
            raise _UnreadableError

    def _take(self, text: str) -> bool:
        if not self.rest.startswith(text):
            return False
        self.rest = self.rest[len(text) :]
        return True

    def _next(self) -> str:
        if not self.rest:
            raise _UnreadableError
        character, self.rest = self.rest[0], self.rest[1:]
        return character

    def _atom(self, depth: int) -> dict[str, None]:
        character = self._next()
        if character == "(":
            if not self._take("?:") and self.rest.startswith("?"):
                raise _UnreadableError
            found = self.alternatives(depth + 1)
            if not self._take(")"):
                raise _UnreadableError
            return found
        if character == "[":
            return dict.fromkeys(self._class())
        if character == "\\":
            return dict.fromkeys(self._escape())
        if character in ".^$*+?{}]":
            raise _UnreadableError
        return {character: None}

    def _escape(self) -> str:
        character = self._next()
        if character == "d":
            return _DIGITS
        if character == "w":
            return _WORD
        if character in _PLAIN_ESCAPES:
            return _PLAIN_ESCAPES[character]
        if character.isalnum():
            raise _UnreadableError
        return character

    def _class(self) -> str:
        found = ""
        if self.rest[:1] in ("^", "]"):
            raise _UnreadableError
        while not self._take("]"):
            character = self._next()
            if character in "[&~":
                raise _UnreadableError
            members = self._escape() if character == "\\" else character
            if self.rest.startswith("-") and not self.rest.startswith("-]"):
                self._next()
                last = self._next()
                last = self._escape() if last == "\\" else last
                if len(members) != 1 or len(last) != 1 or not 0 <= ord(last) - ord(members) < 256:
                    raise _UnreadableError
                members = "".join(map(chr, range(ord(members), ord(last) + 1)))
            found += members
        return found

    def _counted(self, part: dict[str, None]) -> dict[str, None]:
        if self._take("?"):
            counts = (0, 1)
        elif matched := re.match(r"\{(\d{1,3})(?:,(\d{1,3}))?\}", self.rest):
            self._take(matched[0])
            counts = (int(matched[1]), int(matched[2] or matched[1]))
        else:
            return part
        if self.rest[:1] in ("?", "+", "*", "{"):
            raise _UnreadableError
        once, found = {"": None}, dict[str, None]()
        for count in range(counts[1] + 1):
            if count >= counts[0]:
                found |= once
            if count == counts[1]:
                break
            once = dict.fromkeys(a + b for a, b in product(once, part))
            self._check(once)
        return found
