"""Whether a finite value satisfies a JSON schema."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from maskdial.errors import ValidationError
from maskdial.grammar.subschemas import target_of

_MAX_STEPS = 100_000
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_COMPOSITE = frozenset({"array", "object"})

# Schemas that hold for one value together.
_Conjunction = tuple[Any, ...]
_Key = frozenset[int]


def check_finite(schema: Mapping[str, Any]) -> None:
    """Refuses a schema that only infinite values satisfy.

    llguidance compiles such a schema, and generation under it never ends. Types, references and
    obligatory parts decide; whether a pattern matches anything does not.

    Raises:
        ValidationError: the schema is one of these.
    """
    finite = _Finite(schema)
    if not finite.has_value():
        reason = "" if finite.met_false else "it is infinitely recursive, so "
        raise ValidationError(f"{reason}no finite value satisfies it")


class _Finite:
    """The least fixed point: what has a finite value, given what is known to have one.

    A conjunction that waits for others is decided again when one of them is.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.met_false = False
        self._root = root
        self._num_steps = 0
        self._known: set[_Key] = set()
        self._conjunctions: dict[_Key, _Conjunction] = {}
        self._waiting: dict[_Key, set[_Key]] = {}
        self._pending: list[_Key] = []
        self._reduced: dict[tuple[int, tuple[str, ...]], Mapping[str, Any]] = {}

    def has_value(self) -> bool:
        start = self._key((self._root,))
        self._pending.append(start)
        while start not in self._known and self._pending:
            key = self._pending.pop()
            if key not in self._known and self._decide(key):
                self._known.add(key)
                self._pending.extend(self._waiting.pop(key, ()))
        return start in self._known

    def _count(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > _MAX_STEPS:
            raise ValidationError("it is too complex")

    def _key(self, schemas: _Conjunction) -> _Key:
        self._count(len(schemas))
        key = frozenset(map(id, schemas))
        self._conjunctions.setdefault(key, schemas)
        return key

    def _decide(self, key: _Key) -> bool:
        flat = self._flatten(self._conjunctions[key])
        if flat is None:
            return False
        parts = [self._without(part, "$ref", "allOf") for part in flat]
        for part in parts:
            for name in ("anyOf", "oneOf"):
                options = part.get(name)
                if isinstance(options, list):
                    rest = tuple(other for other in parts if other is not part)
                    own = self._without(part, name)
                    if not self._any([(*rest, own, option) for option in options], key):
                        return False
        return self._has_value(parts, key)

    def _holds(self, schemas: _Conjunction, asking: _Key) -> bool:
        """Whether a conjunction is known to have a value; if not, ``asking`` waits for it."""
        key = self._key(schemas)
        if key in self._known:
            return True
        if key not in self._waiting:
            self._waiting[key] = set()
            self._pending.append(key)
        self._waiting[key].add(asking)
        return False

    def _any(self, conjunctions: Iterable[_Conjunction], asking: _Key) -> bool:
        """Whether one of them has a value. All are asked, since any may turn out to later."""
        return True in [self._holds(each, asking) for each in conjunctions]

    def _all(self, conjunctions: Iterable[_Conjunction], asking: _Key) -> bool:
        return False not in [self._holds(each, asking) for each in conjunctions]

    def _flatten(self, schemas: _Conjunction) -> list[Mapping[str, Any]] | None:
        """The schemas, with those that they refer to or list under ``allOf``; None if one is false,
        or if they lead to each other only.
        """
        parts: dict[int, Mapping[str, Any]] = {}
        pending = list(schemas)
        has_end = False
        while pending:
            schema = pending.pop()
            self._count(1)
            if schema is False:
                self.met_false = True
                return None
            if not isinstance(schema, Mapping):
                has_end = True
                continue
            if id(schema) in parts:
                continue
            parts[id(schema)] = schema
            target, every = target_of(schema, self._root), schema.get("allOf")
            if target is not None:
                pending.append(target)
            if isinstance(every, list):
                pending.extend(every)
            has_end |= target is None and not every
        return list(parts.values()) if has_end else None

    def _without(self, part: Mapping[str, Any], *keywords: str) -> Mapping[str, Any]:
        """The schema without some keywords, always the same object."""
        if not part.keys() & set(keywords):
            return part
        key = (id(part), keywords)
        if key not in self._reduced:
            self._reduced[key] = {name: part[name] for name in part if name not in keywords}
        return self._reduced[key]

    def _has_value(self, parts: list[Mapping[str, Any]], key: _Key) -> bool:
        if any("const" in part or "enum" in part for part in parts):
            return True
        types = _TYPES
        for part in parts:
            named = part.get("type")
            if isinstance(named, str | list):
                types &= {named} if isinstance(named, str) else set(map(str, named))
        if not types or not types <= _COMPOSITE:
            return True  # if there are no types left, llguidance says so
        return ("array" in types and self._has_array(parts, key)) or (
            "object" in types and self._has_object(parts, key)
        )

    def _has_array(self, parts: list[Mapping[str, Any]], key: _Key) -> bool:
        num_items = _greatest(parts, "minItems")
        num_named = max(len(_prefix(part)) for part in parts)
        items = (
            tuple(_item(part, index) for part in parts)
            for index in range(min(num_items, num_named + 1))
        )
        return self._all(items, key)

    def _has_object(self, parts: list[Mapping[str, Any]], key: _Key) -> bool:
        required = dict.fromkeys(
            name for part in parts for name in _list(part, "required") if isinstance(name, str)
        )
        values = (tuple(_property(part, name) for part in parts) for name in required)
        if not self._all(values, key):
            return False
        if _greatest(parts, "minProperties") <= len(required):
            return True
        return self._any(_any_property(parts), key)


def _greatest(parts: list[Mapping[str, Any]], keyword: str) -> int:
    values = [part.get(keyword) for part in parts]
    return max((int(each) for each in values if isinstance(each, int | float)), default=0)


def _list(part: Mapping[str, Any], keyword: str) -> list[Any]:
    value = part.get(keyword)
    return value if isinstance(value, list) else []


def _prefix(part: Mapping[str, Any]) -> list[Any]:
    return _list(part, "prefixItems") or _list(part, "items")


def _item(part: Mapping[str, Any], index: int) -> Any:
    prefix = _prefix(part)
    if index < len(prefix):
        return prefix[index]
    return part.get("additionalItems" if isinstance(part.get("items"), list) else "items", True)


def _property(part: Mapping[str, Any], name: str) -> Any:
    """The schema of a property; anything where patterns may say otherwise."""
    properties = part.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return True if part.get("patternProperties") else part.get("additionalProperties", True)


def _any_property(parts: list[Mapping[str, Any]]) -> Iterator[_Conjunction]:
    """The schemas of each property that an object may have."""
    names: dict[str, None] = {}
    for part in parts:
        if isinstance(part.get("properties"), Mapping):
            names |= dict.fromkeys(part["properties"])
        if isinstance(part.get("patternProperties"), Mapping):
            for value in part["patternProperties"].values():
                yield (value,)
    for name in names:
        yield tuple(_property(part, name) for part in parts)
    if not any(part.get("patternProperties") for part in parts):
        yield tuple(part.get("additionalProperties", True) for part in parts)
