"""Subschemas: the places of a JSON schema that are schemas themselves, and what refers to them."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from maskdial.errors import ValidationError

IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_LISTS = (*IN_PLACE_LISTS, "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_SHAPES: dict[str, type] = {**dict.fromkeys(_LISTS, list), **dict.fromkeys(_MAPS, dict)}
_SHAPES |= {"required": list}
# Keywords that state nothing about a value.
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
    | {"$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "$vocabulary"}
    | {"$dynamicAnchor", "$recursiveAnchor", "contentMediaType", "contentEncoding"}
    | {"contentSchema"}
)


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Resolves a reference such as ``#/$defs/item``.

    Raises:
        ValidationError: its target does not exist.
    """
    part: Any = root
    for name in filter(None, unquote(reference.removeprefix("#")).split("/")):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdigit() and int(name) < len(part):
            part = part[int(name)]
        else:
            part = part.get(name) if isinstance(part, Mapping) else None
    if part is None or not reference.startswith("#"):
        raise ValidationError(f"{reference!r} does not exist in it")
    return part


def target_of(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """What the ``$ref`` of a schema refers to; None if it has none, or none that is found here."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    try:
        return resolve(reference, root)
    except ValidationError:
        return None


def check_shapes(schema: dict[str, Any]) -> None:
    """Checks what the walk below passes over: values of the wrong type, and dangling references.

    Raises:
        ValidationError: the schema has one.
    """
    for each in subschemas(schema):
        for keyword, kind in _SHAPES.items():
            if keyword in each.schema and not isinstance(each.schema[keyword], kind):
                raise ValidationError("it is not a valid JSON schema")
        if "$ref" in each.schema:
            resolve(str(each.schema["$ref"]), schema)


@dataclass(slots=True)
class Subschema:
    """A schema within a schema.

    Attributes:
        schema: the object itself, to be changed in place.
        path: where it stands, as a JSON pointer.
        merged: whether other constraints hold for the same value, such as those beside an
            ``allOf``, so that llguidance merges them with these.
    """

    schema: dict[str, Any]
    path: str
    merged: bool


def subschemas(root: dict[str, Any]) -> list[Subschema]:
    """A schema and all schemas in it, its definitions and the targets of references included."""
    found: dict[int, Subschema] = {}
    pending = deque([Subschema(root, "#", merged=False)])
    all_merged = False
    while pending:
        each = pending.popleft()
        known = found.setdefault(id(each.schema), each)
        if known is not each and (known.merged or not each.merged):
            continue
        known.merged = each.merged or _merges(known.schema)
        for child, path, in_place in _children(known.schema, known.path):
            if isinstance(child, dict):
                pending.append(Subschema(child, path, merged=in_place and known.merged))
        target = target_of(known.schema, root)
        if isinstance(target, dict):
            pending.append(Subschema(target, str(known.schema["$ref"]), merged=known.merged))
        # Such a reference may lead to any schema.
        all_merged |= ("$ref" in known.schema and target is None) or (
            "$id" in known.schema and known.schema is not root
        )
    for known in found.values():
        known.merged |= all_merged
    return list(found.values())


def _children(schema: dict[str, Any], path: str) -> Iterator[tuple[Any, str, bool]]:
    """Each child, its path, and whether it is about the same value."""
    for key in _SINGLE:
        if key in schema:
            yield schema[key], f"{path}/{key}", False
    for key in (*_LISTS, "items"):
        if isinstance(schema.get(key), list):
            for index, child in enumerate(schema[key]):
                yield child, f"{path}/{key}/{index}", key in IN_PLACE_LISTS
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            for name, child in schema[key].items():
                name = str(name).replace("~", "~0").replace("/", "~1")
                yield child, f"{path}/{key}/{name}", False


def _merges(schema: dict[str, Any]) -> bool:
    """Whether a schema has more than one source of constraints about the value itself."""
    sources = 1 if schema.keys() - ANNOTATIONS - {"type", "$ref", *IN_PLACE_LISTS} else 0
    sources += "$ref" in schema
    for key in IN_PLACE_LISTS:
        parts = schema.get(key)
        if isinstance(parts, list):
            sources += len(parts) if key == "allOf" else 1
    return sources > 1
