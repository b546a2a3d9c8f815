"""A request's grammar, checked and translated for llguidance."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from llguidance import LLMatcher, regex_to_lark

from maskdial.errors import ValidationError
from maskdial.grammar.schema import enforceable

# Requests may send the first four; the server writes structural ones itself, for tool calls.
RequestGrammarKind = Literal["json", "json_schema", "regex", "lark"]
GrammarKind = Literal[RequestGrammarKind, "structural"]
GrammarValue = str | dict[str, Any] | bool | None

MAX_SCHEMA_BYTES = 256 * 1024
# Long literals and many rules slow down every mask in proportion.
MAX_TEXT_BYTES = 16 * 1024
# llguidance reads JSON to a depth of 128, which includes its own wrapping.
MAX_SCHEMA_DEPTH = 100

_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'

_NAMES = {
    "json": "JSON schema",
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "lark": "Lark grammar",
    "structural": "grammar of the tool calls",
}


@dataclass(frozen=True, slots=True)
class GrammarRequest:
    """What the text must match: ``value`` is a schema, a regular expression or a Lark grammar.

    ``field`` is what an error about it names; ``warnings`` tell which constraints of schemas in a
    ``structural`` grammar are not enforced.
    """

    kind: GrammarKind
    value: GrammarValue
    field: str = "grammar"
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar in llguidance's format.

    Attributes:
        text: the grammar.
        warnings: a sentence for each constraint of a schema that it does not enforce.
    """

    text: str
    warnings: tuple[str, ...] = ()


def parse_grammar(kind: GrammarKind, value: GrammarValue) -> GrammarSource:
    """Translates a grammar into llguidance's format.

    Args:
        kind: what ``value`` is.
        value: for ``json`` a JSON schema, as an object or as its text, or nothing for any JSON
            object; for ``json_schema`` a schema, or ``{"name", "schema"}`` around one; for
            ``regex`` an expression that matches the whole text, in the syntax of Rust's regex
            crate without assertions, with ``\\d`` and ``\\w`` in ASCII; for ``lark`` a grammar in
            llguidance's dialect; for ``structural`` the output of
            `maskdial.causal.tools.grammar.write_grammar`.

    JSON is generated with at most one space between its parts. ``oneOf`` is treated as ``anyOf``.
    What else of a schema is not enforced is reported; see `maskdial.grammar.schema`.

    Raises:
        ValidationError: the value is not of its kind, or is too large.
    """
    if kind not in get_args(GrammarKind):
        kinds = ", ".join(get_args(GrammarKind))
        raise ValidationError(f"a grammar is one of {kinds}, not {kind!r}")
    if kind == "json" or kind == "json_schema":
        return _parse_schema(kind, value)
    if kind == "structural":
        # Written by the server, from schemas that were checked one by one.
        assert isinstance(value, str)
        return GrammarSource(value)
    text = _require_text(kind, value)
    if kind == "regex":
        # As in the patterns of a JSON schema: otherwise a date may have any Unicode digits.
        text = f"start: /{regex_to_lark(text, use_ascii='dw')}/"
    if not text.strip():
        raise ValidationError("the Lark grammar is empty")
    return GrammarSource(lark_source(text))


def lark_source(text: str) -> str:
    """A Lark grammar in llguidance's format."""
    # llguidance looks ahead while only one byte can follow. In `start: /a+/ /a+/` the first part
    # takes every byte, so it would look ahead without end. The last of several options counts.
    return LLMatcher.grammar_from_lark(text + _NO_FORCING)


def grammar_error(message: str) -> ValidationError:
    """llguidance's message about a grammar that it cannot use, as one sentence."""
    message = re.split(r"<(?:backtrace|non-verbose/|state|grammar)>", message)[0]
    if message.startswith("panic:"):
        message = "it is too large"
    # For a regular expression, the reason follows the expression and a drawing of the place.
    message = re.sub(r"^at .* \(in regex\): ", "", message, flags=re.DOTALL)
    message = message.rpartition("\nerror: ")[2].partition("\n   1 |")[0]
    reason = " ".join(message.split()).rstrip(".")
    reason = reason if len(reason) <= 300 else reason[:300] + "..."
    return ValidationError(f"the grammar cannot be used: {reason or 'it cannot be read'}")


def _require_text(kind: GrammarKind, value: GrammarValue) -> str:
    if not isinstance(value, str):
        raise ValidationError(f"the value of a {kind} grammar must be a string")
    _check_size(kind, value, MAX_TEXT_BYTES)
    return value


def _check_size(kind: GrammarKind, text: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValidationError(f"the {_NAMES[kind]} contains half of a surrogate pair") from error
    if size > limit:
        raise ValidationError(f"the {_NAMES[kind]} has {size} bytes; the limit is {limit}")


def _parse_schema(kind: GrammarKind, value: GrammarValue) -> GrammarSource:
    if isinstance(value, str):
        _check_size(kind, value, MAX_SCHEMA_BYTES)
        value = _read_json(value)
    schema: object = value
    if kind == "json" and (value is None or value == {}):
        schema = {"type": "object"}
    elif kind == "json_schema" and isinstance(value, dict):
        # "schema" is not a keyword of JSON Schema, so this is {"name", "schema"} around one.
        schema = value.get("schema", value)
    if schema is True:
        schema = {}
    if schema is False:
        raise ValidationError("the JSON schema is false, which no value satisfies")
    if not isinstance(schema, dict):
        raise ValidationError("the JSON schema must be an object")
    # llguidance takes options for the layout of the reply here; clients may not set them.
    schema = {key: part for key, part in schema.items() if key != "x-guidance"}
    _check_parts(kind, schema)
    _check_size(kind, _write_json(schema), MAX_SCHEMA_BYTES)
    schema, warnings = enforceable(schema)
    text = _write_json(schema)
    try:
        # At most one space wherever JSON allows white space: a model may write JSON as it was
        # trained to, but cannot fill its reply with blanks.
        source = LLMatcher.grammar_from_json_schema(
            text,
            overrides={
                "item_separator": ",",
                "key_separator": ":",
                "whitespace_pattern": " ",
                "coerce_one_of": True,
            },
        )
    except ValueError as error:
        raise grammar_error(str(error)) from error
    return GrammarSource(source, tuple(warnings))


def _write_json(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValidationError(f"the JSON schema is not valid JSON: {error}") from error


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise ValidationError(f"the JSON schema is not valid JSON: {error}") from error


def _too_deep() -> ValidationError:
    return ValidationError(f"the JSON schema is more than {MAX_SCHEMA_DEPTH} levels deep")


def _check_parts(kind: GrammarKind, schema: dict[str, Any]) -> None:
    """Bounds the depth and each string's length, before anything recursive reads the schema."""
    for part, depth in _walk(schema):
        if depth > MAX_SCHEMA_DEPTH:
            raise _too_deep()
        if isinstance(part, str) and len(part) > MAX_TEXT_BYTES:
            raise ValidationError(
                f"the JSON schema contains a string of {len(part)} characters; "
                f"the limit is {MAX_TEXT_BYTES}"
            )


def _walk(schema: dict[str, Any]) -> Iterator[tuple[object, int]]:
    pending: list[tuple[object, int]] = [(schema, 1)]
    while pending:
        part, depth = pending.pop()
        yield part, depth
        if isinstance(part, dict):
            pending.extend((key, depth) for key in part)
            pending.extend((child, depth + 1) for child in part.values())
        elif isinstance(part, list):
            pending.extend((child, depth + 1) for child in part)
