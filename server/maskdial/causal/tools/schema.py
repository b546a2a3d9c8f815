"""Checks on a tool's JSON schema that llguidance does not make."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from maskdial.errors import ValidationError

_MAX_STEPS = 100_000


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


def check_finite(schema: Mapping[str, Any]) -> None:
    """Refuses a schema that only infinite values satisfy.

    llguidance compiles such a schema, and generation under it never ends.

    Raises:
        ValidationError: the schema is one of these, or has a dangling reference.
    """
    if not _Finite(schema).holds(schema):
        raise ValidationError("it is infinitely recursive, so no finite value satisfies it")


class _Finite:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: set[str] = set()
        self._active: set[str] = set()
        self._steps = 0

    def holds(self, schema: object) -> bool:
        """Whether a finite value can satisfy a schema, judged by types and references alone."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise ValidationError("it is too complex")
        if not isinstance(schema, Mapping):
            return schema is not False
        if "$ref" in schema and not self._reference(str(schema["$ref"])):
            return False
        if not all(map(self.holds, schema.get("allOf", []))):
            return False
        for key in ("anyOf", "oneOf"):
            if key in schema and not any(map(self.holds, schema[key])):
                return False
        match schema.get("type"):
            case "object":
                properties = schema.get("properties", {})
                return all(self.holds(properties.get(key)) for key in schema.get("required", []))
            case "array":
                return not schema.get("minItems") or self.holds(schema.get("items"))
        return True

    def _reference(self, reference: str) -> bool:
        """A reference being followed already would only lead to an infinite value."""
        if reference in self._known:
            return True
        if reference in self._active:
            return False
        self._active.add(reference)
        holds = self.holds(resolve(reference, self._root))
        self._active.remove(reference)
        if holds:
            self._known.add(reference)
        return holds
