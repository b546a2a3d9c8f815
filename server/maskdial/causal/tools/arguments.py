"""Grammars of arguments that are written as key-value pairs, not as a JSON object.

llguidance enforces JSON schemas on JSON only. Objects, arrays and unions are therefore translated
here as far as a notation differs from JSON; the JSON parts of it are left to llguidance. A keyword
that cannot be translated is refused, or reported if it only narrows values; ``format`` is an
annotation, as in JSON Schema itself.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from llguidance import regex_to_lark

from maskdial.causal.tools.format import JSON_TYPES, KEY, VALUE, ArgumentList, split_pattern
from maskdial.causal.tools.lark import ANY_TEXT, LarkWriter, alternatives, containing, quoted
from maskdial.errors import ValidationError
from maskdial.grammar.json_text import within_lines
from maskdial.grammar.subschemas import resolve

_KEY = re.compile(r"[\w.$-]{1,64}")
# Keywords that are not translated here: without the first, a value would be another one.
_REFUSED = frozenset({"allOf", "patternProperties", "prefixItems"})
_NOT_ENFORCED = frozenset({"minProperties", "maxProperties"})
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"format", "$schema", "$id", "$comment", "$defs", "definitions"}
)
_JSON_TYPES: dict[type, set[str]] = {
    str: {"string"},
    int: {"integer", "number"},
    float: {"number"},
    bool: {"boolean"},
    type(None): {"null"},
    list: {"array"},
    dict: {"object"},
}
_SCALARS = ["string", "number", "boolean", "null"]
_MAX_ITEMS = 1000

RawKind = Literal["text", "text_or_null", "json"]


def raw_kind(schema: object, root: Mapping[str, Any]) -> RawKind:
    """How to read a value without quotes: as text, as text except for ``null``, or as JSON.

    Grammar and parser share this rule.
    """
    types = named_types(schema, root)
    if types == {"string"}:
        return "text"
    return "text_or_null" if types == {"string", "null"} else "json"


def named_types(schema: object, root: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema names, references followed; ``any`` where it names none."""
    return _types(schema, root, set())


def _types(schema: object, root: Mapping[str, Any], seen: set[str]) -> set[str]:
    """The JSON types that a schema names, or ``any``.

    Each reference is followed once; ``seen`` collects them.
    """
    if not isinstance(schema, Mapping):
        return {"any"}
    if "$ref" in schema and not _beside("$ref", schema):
        reference = str(schema["$ref"])
        if reference in seen:
            return set()
        seen.add(reference)
        return _types(resolve(reference, root), root, seen)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and not _beside(key, schema):
            parts = [_types(part, root, seen) for part in schema[key]]
            return set[str]().union(*parts)
    if {"$ref", "anyOf", "oneOf", "allOf", "not", "if"} & schema.keys():
        return {"any"}
    if "const" in schema or "enum" in schema:
        if _beside("enum" if "enum" in schema else "const", schema) - {"type"}:
            return {"any"}
        texts = all(isinstance(value, str) for value in _constants(schema))
        return {"string"} if texts else {"any"}
    kind = schema.get("type", "any")
    return set(kind) if isinstance(kind, list) else {str(kind)}


def _beside(keyword: str, schema: Mapping[str, Any]) -> set[str]:
    """The other constraints of a schema with a keyword."""
    return set(schema) - _ANNOTATIONS - {keyword}


def _constants(schema: Mapping[str, Any]) -> list[Any]:
    """The values of ``const`` or ``enum`` that are of the schema's type."""
    values = [schema["const"]] if "const" in schema else schema["enum"]
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    if types and isinstance(values, list):
        values = [value for value in values if _JSON_TYPES[type(value)] & set(types)]
    if not isinstance(values, list) or not values:
        raise ValidationError("enum must be a list of values of the schema's type")
    return values


class ArgumentRules:
    """Writes the grammar of one tool's arguments.

    Args:
        writer: collects the rules.
        notation: how the model writes arguments.
        schema: the tool's parameters, against which references are resolved.
        lark: a grammar of the argument `INPUT`, a text; empty for none.
    """

    def __init__(
        self,
        writer: LarkWriter,
        notation: ArgumentList,
        schema: Mapping[str, Any],
        *,
        lark: str = "",
    ) -> None:
        self._writer = writer
        self._lark = lark
        self._notation = notation
        self._root = schema
        # Objects, arrays and strings are not written as in JSON.
        self._bare = notation.quote not in ("", '"')
        self._references: dict[str, str] = {}

    def arguments(self) -> str:
        """The grammar of ``$ARGUMENTS``.

        Raises:
            ValidationError: the schema has a keyword that cannot be enforced in this notation.
        """
        schema = self._deref(self._root)
        for key in ("anyOf", "oneOf", "allOf", "enum", "const"):
            if key in schema:
                raise self._refused(key)
        return self._object(schema, split_pattern(self._notation.parameter))

    def _object(self, schema: Mapping[str, Any], parameter: list[str]) -> str:
        """Properties in the schema's order; optional ones may be missing."""
        self._check(schema)
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise ValidationError("properties must be an object and required a list")
        parts = {**properties, **{key: {} for key in required if key not in properties}}
        separator = self._writer.literal(self._notation.separator)
        # Built from the last property to the first: ``rest`` may follow it, ``first`` starts at it.
        rest, first = "", ""
        for key, part in reversed(parts.items()):
            item = self._parameter(key, part, parameter)
            begins = f"{item} {rest}".strip()
            optional = key not in required
            options = [begins, first] if optional else [begins]
            first = self._writer.rule(alternatives(options))
            follows = f"{separator} {begins}".strip()
            rest = self._writer.rule(alternatives([follows, rest] if optional else [follows]))
        return first

    def _parameter(self, key: str, schema: object, parameter: list[str]) -> str:
        if not _KEY.fullmatch(key):
            raise ValidationError(
                f"this model's call format takes parameter names of 1 to 64 letters, digits, '_', "
                f"'.', '$' or '-', not {key!r}"
            )
        before, _, between, *typed, after = parameter
        if self._lark and (text := self._grammatical(typed, after)) is not None:
            return f"{self._writer.literal(before + key + between)} {text}"
        if self._notation.types:
            begin = self._writer.literal(before + key + between)
            return f"{begin} ({self._with_type(schema, typed[1], after)})"
        if self._notation.quote:
            value = f"{self._value(schema)} {self._writer.literal(after)}"
        else:
            value = self._unquoted(schema, after)
        return f"{self._writer.literal(before + key + between)} {value}".strip()

    def _grammatical(self, typed: Sequence[str], after: str) -> str | None:
        """A text under the grammar, and what ends it; None if any text will do."""
        writer, mark = self._writer, self._notation.quote
        begin = self._notation.types["string"] + typed[1] if self._notation.types else mark
        end = mark + after
        if self._bare or not mark:
            # A lexeme takes what it can, so only a special token ends every text, and a line feed
            # those that have none in a lexeme.
            before, special = writer.split(end)
            ends = not before if special else before.startswith("\n") and within_lines(self._lark)
            text = writer.text(self._lark, "plain" if ends else "unknown")
        else:
            text = writer.text(self._lark, "json")
        if text is None:
            return None
        return f"{writer.literal(begin)} {text} {writer.literal(end)}"

    def _with_type(self, schema: object, between: str, end: str) -> str:
        """A value after the word for its type, and what ends it."""

        def named(kind: str) -> str:
            word = self._notation.types["number" if kind == "integer" else kind]
            return self._writer.literal(word + between)

        resolved = self._deref(schema)
        for key in ("anyOf", "oneOf"):
            if key in resolved:
                if _beside(key, resolved):
                    raise self._refused(key)
                parts = (self._with_type(part, between, end) for part in resolved[key])
                return self._writer.rule(alternatives(parts))
        options = []
        tail = self._writer.literal(end)
        if "const" in resolved or "enum" in resolved:
            for value in _constants(resolved):
                kind = next(each for each in JSON_TYPES if each in _JSON_TYPES[type(value)])
                text = (
                    self._text_constant(value, end)
                    if kind == "string"
                    else f"{quoted(json.dumps(value, ensure_ascii=False))} {tail}"
                )
                options.append(f"{named(kind)} {text}")
            return alternatives(options)
        kinds = resolved.get("type", sorted(JSON_TYPES))
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            part = {**resolved, "type": kind}
            value = self._text(part, end) if kind == "string" else f"{self._json(part)} {tail}"
            options.append(f"{named(kind)} {value}")
        return alternatives(options)

    def _unquoted(self, schema: object, end: str) -> str:
        """A value without quotes, and what ends it."""
        kind = raw_kind(schema, self._root)
        if kind == "json":
            return f"{self._json(schema)} {self._writer.literal(end)}"
        options = [self._text(part, end) for part in self._strings(schema)]
        if kind == "text_or_null":
            options.append(self._writer.literal("null" + end))
        return self._writer.rule(alternatives(options))

    def _strings(self, schema: object) -> list[Mapping[str, Any]]:
        """The alternatives of a schema that are strings."""
        resolved = self._deref(schema)
        for key in ("anyOf", "oneOf"):
            if key in resolved:
                return [each for part in resolved[key] for each in self._strings(part)]
        return [] if resolved.get("type") == "null" else [resolved]

    def _value(self, schema: object) -> str:
        """A value whose strings have quotes."""
        if isinstance(schema, Mapping) and "$ref" in schema:
            if _beside("$ref", schema):
                return self._whole(schema, "$ref")
            return self._reference(str(schema["$ref"]))
        resolved = self._deref(schema)
        for key in ("anyOf", "oneOf"):
            if key in resolved:
                if _beside(key, resolved):
                    return self._whole(resolved, key)
                return self._writer.rule(alternatives(map(self._value, resolved[key])))
        for key in ("const", "enum"):
            if key in resolved:
                if _beside(key, resolved) - {"type"}:
                    return self._whole(resolved, key)
                return self._writer.rule(alternatives(map(self._constant, _constants(resolved))))
        # Outside JSON, arrays and objects without a schema are not offered.
        types = resolved.get("type", _SCALARS if self._bare else [*_SCALARS, "array", "object"])
        types = types if isinstance(types, list) else [types]
        return self._writer.rule(alternatives(self._typed({**resolved, "type": t}) for t in types))

    def _whole(self, schema: Mapping[str, Any], keyword: str) -> str:
        """A schema that cannot be translated, because a keyword does not stand alone in it."""
        if self._bare:
            raise self._refused(keyword)
        return self._json(schema)

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            # Its body may refer to it.
            self._references[reference] = self._writer.new_name()
            body = self._value(resolve(reference, self._root))
            self._writer.define(self._references[reference], body)
        return self._references[reference]

    def _typed(self, schema: Mapping[str, Any]) -> str:
        kind = schema["type"]
        if self._notation.python and kind == "boolean":
            return '"True" | "False"'
        if self._notation.python and kind == "null":
            return '"None"'
        if self._bare and kind == "object":
            return f'"{{" {self._object(schema, ["", KEY, ":", VALUE, ""])} "}}"'
        if self._bare and kind == "array":
            return self._array(schema)
        if self._bare and kind == "string":
            mark = self._notation.quote
            return f"{self._writer.literal(mark)} {self._text(schema, mark)}"
        return self._json(schema)

    def _array(self, schema: Mapping[str, Any]) -> str:
        self._check(schema)
        minimum, maximum = schema.get("minItems", 0), schema.get("maxItems")
        for bound in (minimum, 0 if maximum is None else maximum):
            if not isinstance(bound, int) or not 0 <= bound <= _MAX_ITEMS:
                raise ValidationError(f"minItems and maxItems must be between 0 and {_MAX_ITEMS}")
        if maximum == 0:
            return '"[" "]"'
        items = self._value(schema.get("items", True))
        if maximum != 1:
            last = "" if maximum is None else maximum - 1
            items += f' ("," {items}){{{max(minimum - 1, 0)},{last}}}'
        return f'"[" {items} "]"' if minimum else f'"[" ({items})? "]"'

    def _text(self, schema: Mapping[str, Any], end: str) -> str:
        """A string without quotes, which must not contain its end, and then this end.

        llguidance's lexer is greedy, so both are one terminal, up to a special token in the end.
        """
        self._check(schema)
        if "const" in schema or "enum" in schema:
            texts = (self._text_constant(each, end) for each in _constants(schema))
            return self._writer.rule(alternatives(texts))
        minimum, maximum = schema.get("minLength", 0), schema.get("maxLength")
        parts = [ANY_TEXT, f"~{containing(end.strip())}"]
        if minimum or maximum is not None:
            parts.append(rf"/(.|\n){{{int(minimum)},{'' if maximum is None else int(maximum)}}}/")
        if "pattern" in schema:
            parts.append(_searched(str(schema["pattern"])))
        text = " & ".join(parts)
        before, special = self._writer.split(end)
        return f"{self._writer.terminal(f'({text}) {quoted(before)}')} {special}".strip()

    def _text_constant(self, value: object, end: str) -> str:
        if not isinstance(value, str) or end.strip() in value:
            raise ValidationError(
                f"the value {value!r} contains {end.strip()!r}, which ends a value"
            )
        return self._writer.literal(value + end)

    def _constant(self, value: object) -> str:
        mark = self._notation.quote
        if self._notation.python and (value is None or isinstance(value, bool)):
            return quoted(repr(value))
        if self._bare and isinstance(value, str):
            return f"{self._writer.literal(mark)} {self._text_constant(value, mark)}"
        if self._bare and isinstance(value, list | dict):
            raise self._refused("enum")
        return quoted(json.dumps(value, ensure_ascii=False))

    def _json(self, schema: object) -> str:
        """A subschema whose value is JSON, with the definitions that it may refer to."""
        if isinstance(schema, Mapping):
            shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            schema = {key: part for key, part in schema.items() if key not in _ANNOTATIONS}
            text = json.dumps({**shared, **schema})
            if other := re.search(r'"\$ref": "(#(?!/(\$defs|definitions)/)[^"]*)"', text):
                raise self._refused(f"$ref: {other[1]}")
            schema = {**shared, **schema} if '"$ref"' in text else schema
        return self._writer.schema(schema)

    def _deref(self, schema: object) -> Mapping[str, Any]:
        """The schema behind references and single-element ``allOf``."""
        for _ in range(20):
            if schema is True:
                return {}
            if not isinstance(schema, Mapping):
                raise ValidationError("every subschema must be an object")
            every = schema.get("allOf")
            if "$ref" in schema and not _beside("$ref", schema):
                schema = resolve(str(schema["$ref"]), self._root)
            elif isinstance(every, list) and len(every) == 1 and not _beside("allOf", schema):
                schema = every[0]
            else:
                return schema
        raise ValidationError("its references form a cycle")

    def _check(self, schema: Mapping[str, Any]) -> None:
        for key in sorted(_REFUSED & schema.keys()):
            if schema[key] is not False:
                raise self._refused(key)
        for key in sorted(_NOT_ENFORCED & schema.keys()):
            self._writer.warn([f": {key} is not enforced"])

    def _refused(self, keyword: str) -> ValidationError:
        return ValidationError(
            f"{keyword!r} cannot be enforced here, because this model's call format is not JSON; "
            "remove it from the schema"
        )


def _searched(pattern: str) -> str:
    """A JSON schema's pattern, which any part of a string may match, for a whole string."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = pattern[begins : len(pattern) - ends]
    if re.search(r"(?<![\\\[])\^|(?<!\\)\$", inner) or ("|" in inner and (begins or ends)):
        raise ValidationError(
            f"pattern {pattern!r} cannot be enforced, because this model's call format is not "
            "JSON; use '^' and '$' only at its ends, and not together with '|'"
        )
    head, tail = "" if begins else r"(.|\n)*", "" if ends else r"(.|\n)*"
    return f"/{head}({regex_to_lark(inner, use_ascii='dw')}){tail}/"
