"""Keywords of JSON Schema that no grammar enforces: they are taken out, and named."""

from collections.abc import Callable, Mapping
from typing import Any

from maskdial.grammar.key_pattern import looks_around

# Formats of strings that llguidance enforces. All others are annotations, as JSON Schema says.
FORMATS = frozenset(
    {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
)
# Keywords that constrain values and cannot be enforced while a text is written.
NOT_ENFORCED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"}
    | {"propertyNames", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
)
_NO_MEANING = frozenset({"deprecated", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary"})
_NO_MEANING |= {"contentSchema"}
_NUMBERS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"}
)
# No text is so long, so a higher maximum is none. llguidance reads 32 bits.
_MAX_COUNT = 2**31 - 1
_IN_PLACE = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef"})


def drop_not_enforced(schema: dict[str, Any], report: Callable[[str], None]) -> None:
    """Takes out of one schema, not of those in it, what llguidance does not know.

    Args:
        schema: changed in place.
        report: receives a sentence for each constraint that is lost.
    """
    _close(schema, "unevaluatedProperties", "additionalProperties", ())
    _close(schema, "unevaluatedItems", "items", ("additionalItems", "contains"))
    for keyword in [key for key in schema if key in NOT_ENFORCED]:
        if not _is_void(keyword, schema):
            report(f"{keyword} is not enforced")
    for keyword in (NOT_ENFORCED | _NO_MEANING) & schema.keys():
        del schema[keyword]
    if "format" in schema and schema["format"] not in FORMATS:
        if _may_be_string(schema):
            report(f"format {str(schema['format'])[:40]!r} is not enforced")
        del schema["format"]
    if isinstance(schema.get("pattern"), str) and looks_around(schema["pattern"]):
        report(f"pattern {schema.pop('pattern')[:40]!r} is not enforced")
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        for pattern in filter(looks_around, list(patterns)):
            del patterns[pattern]
            report(f"patternProperties {pattern[:40]!r} is not enforced")
    for keyword in _NUMBERS & schema.keys():
        value = schema[keyword]
        if isinstance(value, float) and value.is_integer():
            value = schema[keyword] = int(value)
        if isinstance(value, int) and value > _MAX_COUNT and keyword.startswith("max"):
            del schema[keyword]


def _close(schema: dict[str, Any], keyword: str, plain: str, others: tuple[str, ...]) -> None:
    """Takes ``unevaluated...`` for ``additional...`` where they mean the same."""
    if keyword in schema and not schema.keys() & {plain, *others, *_IN_PLACE}:
        schema[plain] = schema.pop(keyword)


def _is_void(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword excludes nothing."""
    value = schema[keyword]
    match keyword:
        case "uniqueItems":
            maximum = schema.get("maxItems")
            return value is False or (isinstance(maximum, int | float) and maximum <= 1)
        case "not":
            return value is False
        case "if":
            return not schema.keys() & {"then", "else"}
        case "then" | "else":
            return "if" not in schema or value in (True, {})
        case "minContains" | "maxContains":
            return True  # "contains" is named
        case "contains":
            return bool(schema.get("minContains") == 0 and "maxContains" not in schema)
        case "propertyNames" | "unevaluatedItems" | "unevaluatedProperties":
            return bool(value is True or value == {})
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return bool(value == {})
    return False


def _may_be_string(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", "string")
    return "string" in (types if isinstance(types, list) else [types])
