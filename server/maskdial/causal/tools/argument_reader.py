"""ArgumentReader: turns the arguments of a call into JSON text while they are generated."""

import ast
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from maskdial.causal.tools.arguments import named_types, raw_kind
from maskdial.causal.tools.format import ArgumentList, split_pattern
from maskdial.causal.tools.notation import json_from
from maskdial.causal.tools.scanner import MismatchError, Reader, Scanner, Taker

_CDATA, _CDATA_END = "<![CDATA[", "]]>"
# Values of Python that are written otherwise in JSON; numbers are the same in both
_PYTHON: Mapping[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "null": type(None),
    "array": (list, tuple),
    "object": dict,
}


class ArgumentReader:
    """Reads the arguments of one call.

    Args:
        text: the reply.
        add: receives pieces of JSON text.
    """

    def __init__(self, text: Scanner, add: Callable[[str], None]) -> None:
        self._input = text
        self._add = add

    def read(
        self, notation: ArgumentList | None, parameters: Mapping[str, Any], *, end: str
    ) -> Reader:
        """Reads the arguments.

        Args:
            notation: how they are written; None for a JSON object.
            parameters: the tool's schema.
            end: the text that follows them, which is not read.
        """
        if notation is None:
            yield from self._json_object()
        else:
            yield from self._list(notation, parameters, end)

    def _json_object(self) -> Reader:
        """A JSON object, passed on unchanged.

        Raises:
            MismatchError: something else follows, or another bracket ends the object; it is not
                read.
        """
        depth, quoted, escaped = 0, False, False
        while True:
            for position, character in enumerate(self._input.text):
                if escaped:
                    escaped = False
                elif quoted:
                    escaped = character == "\\"
                    quoted = character != '"'
                elif not depth:
                    if character == "{":
                        depth = 1
                    elif not character.isspace():
                        raise MismatchError
                elif character == '"':
                    quoted = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    if not depth:
                        is_object = character == "}"
                        self._add(self._input.take(position + is_object))
                        if not is_object:
                            raise MismatchError
                        return
            if depth:  # space before it may turn out to be content
                self._add(self._input.take(len(self._input.text)))
            yield from self._input.wait()

    def _list(self, notation: ArgumentList, parameters: Mapping[str, Any], end: str) -> Reader:
        """Key-value pairs, passed on as a JSON object."""
        before, _, between, *typed, after = split_pattern(notation.parameter)
        after_type = typed[1] if notation.types else ""
        properties = parameters.get("properties", {})
        self._add("{")
        num_arguments = 0
        while not (yield from self._input.at(end)):
            if num_arguments:
                yield from self._input.literal(notation.separator)
            yield from self._input.literal(before)
            key = yield from self._input.word()
            yield from self._input.literal(between)
            self._add(f"{', ' if num_arguments else ''}{json.dumps(key)}: ")
            if notation.types:
                kind = yield from self._input.word()
                yield from self._input.literal(after_type)
                is_text = kind == notation.types["string"]
                schema = {"type": "string"} if is_text else True
                yield from self._unquoted_value(notation, schema, {}, after)
            elif notation.quote:
                stops = (after or notation.separator)[:1] + end[:1]
                value = yield from self._quoted_value(notation.quote, stops)
                self._add(json_from(value, notation.quote))
                yield from self._input.literal(after)
            else:
                schema = properties.get(key, True)
                yield from self._unquoted_value(notation, schema, parameters, after)
            num_arguments += 1
        self._add("}")

    def _unquoted_value(
        self, notation: ArgumentList, schema: object, parameters: Mapping[str, Any], end: str
    ) -> Reader:
        kind = raw_kind(schema, parameters)
        if kind == "text" and not notation.cdata:
            self._add('"')
            yield from self._input.copy_argument(end, lambda text: self._add(_escaped(text)))
            self._add('"')
            return
        parts: list[str] = []
        yield from self._input.copy_argument(end, parts.append)
        value = "".join(parts)
        if notation.cdata and value.startswith(_CDATA) and value.endswith(_CDATA_END):
            value = value[len(_CDATA) : -len(_CDATA_END)]
        if kind == "text":
            self._add(json.dumps(value, ensure_ascii=False))
            return
        self._add(
            _json_or_text(value, named_types(schema, parameters), only_null=kind == "text_or_null")
        )

    def _quoted_value(self, quote: str, stops: str) -> Taker:
        """A value whose strings have quotes, up to a character of ``stops`` outside of it."""
        depth, position, quoted = 0, 0, ""
        while True:
            while position < len(self._input.text):
                character = self._input.text[position]
                if quoted:
                    if quote == '"' and character == "\\":
                        position += 2
                    elif self._input.text.startswith(quoted, position):
                        position, quoted = position + len(quoted), ""
                    elif quoted.startswith(self._input.text[position : position + len(quote)]):
                        break
                    else:
                        position += 1
                elif self._input.text.startswith(quote, position) or (
                    quote == '"' and character == "'"
                ):
                    quoted = character if quote == '"' else quote
                    position += len(quoted)
                elif quote.startswith(self._input.text[position : position + len(quote)]):
                    break
                elif depth == 0 and character in stops:
                    return self._input.take(position)
                else:
                    depth += (character in "{[(") - (character in "}])")
                    position += 1
            yield from self._input.wait()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_or_text(value: str, types: Collection[str], *, only_null: bool) -> str:
    """A value without quotes as JSON text: itself if it is JSON, otherwise a string.

    What the schema has as another type may be written as in Python: Qwen3.5's template and others
    show a model its own past calls so.
    """
    try:
        parsed = json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        read = None if only_null else _from_python(value, types)
        return json.dumps(value, ensure_ascii=False) if read is None else read
    if only_null and parsed is not None:
        return json.dumps(value, ensure_ascii=False)
    return value


def _refuse(constant: str) -> NoReturn:
    """Raises: ValueError: NaN and infinities are no JSON, though `json` reads them."""
    raise ValueError(constant)


def _from_python(value: str, types: Collection[str]) -> str | None:
    """A constant, list or dictionary of Python as JSON text; None if it is of none of the types."""
    try:
        parsed = ast.literal_eval(value.strip())
        kinds = (_PYTHON[each] for each in types if each in _PYTHON)
        if any(isinstance(parsed, kind) for kind in kinds):
            written = json.dumps(parsed, ensure_ascii=False, allow_nan=False)
            written.encode()  # fails on half of a surrogate pair, which no reply can have
            return written
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    return None
