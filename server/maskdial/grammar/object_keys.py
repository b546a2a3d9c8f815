"""Keys of the objects that a JSON schema describes: patterns, further keys, and their number.

llguidance writes named keys in the schema's order, each once, and then any number of keys that a
pattern or ``additionalProperties`` allows. What the latter may not do is restricted here.
"""

import json
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from maskdial.grammar.key_pattern import all_but, matches_every_key, words_of
from maskdial.grammar.subschemas import Subschema

_MAX_WORDS = 64  # keys of a pattern that are named one by one
_MAX_COPIED = 4096  # bytes of a pattern's schema, over all of its keys
_MAX_CASES = 64  # of which optional keys there are
_SCALARS = ("null", "boolean", "number", "string", "array")
_Report = Callable[[str], None]


def restrict_keys(each: Subschema, report: _Report) -> None:
    """Has llguidance write each key once, and only where another can follow a comma.

    Args:
        each: one schema, changed in place.
        report: receives a sentence for each constraint that cannot be enforced.
    """
    schema = each.schema
    keywords = schema.keys() & {"properties", "patternProperties", "additionalProperties"}
    if not keywords | schema.keys() & {"required", "minProperties", "maxProperties"}:
        return
    types = schema.get("type", "object")
    if "object" not in (types if isinstance(types, list) else [types]):
        return
    for keyword, kind in (
        ("properties", dict),
        ("patternProperties", dict),
        ("required", list),
        ("minProperties", int),
        ("maxProperties", int),
    ):
        if keyword in schema and not isinstance(schema[keyword], kind):
            return  # which llguidance refuses
    keys = _Keys(schema, report)
    keys.name_words()
    keys.close_what_patterns_cover()
    keys.forbid_other_spellings(merged=each.merged)
    keys.count()


class _Keys:
    def __init__(self, schema: dict[str, Any], report: _Report) -> None:
        self._schema = schema
        self._report = report

    @property
    def _properties(self) -> dict[str, Any]:
        return self._schema.get("properties") or {}

    @property
    def _patterns(self) -> dict[str, Any]:
        return self._schema.get("patternProperties") or {}

    @property
    def _required(self) -> list[str]:
        return list(dict.fromkeys(self._schema.get("required", ())))

    @property
    def _is_closed(self) -> bool:
        return self._schema.get("additionalProperties") is False

    def name_words(self) -> None:
        """A pattern of a few keys becomes these keys: each is then written once, and a pattern
        that only repeats named keys leaves none over.
        """
        properties = dict(self._properties)
        patterns = dict(self._patterns)
        for pattern, value in self._patterns.items():
            words = words_of(pattern, max(_MAX_WORDS, len(properties) + 1))
            if words is None:
                continue
            fits = len(words) * len(json.dumps(value)) <= _MAX_COPIED
            if not fits and not properties.keys() >= set(words):
                continue
            del patterns[pattern]
            for word in words:
                known = properties.get(word)
                properties[word] = value if known is None else {"allOf": [known, value]}
        if len(patterns) < len(self._patterns):
            self._schema |= {"properties": properties, "patternProperties": patterns}
        if "patternProperties" in self._schema and not patterns:
            del self._schema["patternProperties"]

    def close_what_patterns_cover(self) -> None:
        """Where patterns match every key, no further one can follow."""
        if self._patterns and not self._is_closed and matches_every_key(self._patterns):
            self._schema["additionalProperties"] = False

    def forbid_other_spellings(self, *, merged: bool) -> None:
        """Further keys may be written with escapes such as ``\\u0061``, and so repeat a named one,
        or one of a pattern. Keys of a pattern may not, so a pattern describes them where it can.
        """
        named = list(dict.fromkeys((*self._properties, *self._required)))
        if merged and self._patterns:
            self._report("patternProperties may miss keys that schemas beside it describe")
        if self._is_closed or not (named or self._patterns):
            return
        value = self._schema.get("additionalProperties", True)
        # llguidance leaves named keys out of a pattern, in one spelling, but has the schema of the
        # pattern hold for them, too.
        is_plain = value in (True, {}) and all(map(str.isprintable, named))
        others = "" if is_plain else all_but(named)
        if merged and not (self._properties or self._patterns):
            return  # a key that is only obligatory may have any value that further keys may
        if merged or self._patterns or others is None:
            self._report("keys may be repeated in another spelling, such as \\u0061 for a")
            return
        unnamed = [name for name in named if name not in self._properties]
        self._schema["properties"] = {**self._properties, **dict.fromkeys(unnamed, value)}
        self._schema["patternProperties"] = {others: value}
        self._schema["additionalProperties"] = False

    def count(self) -> None:
        """llguidance counts only keys that it writes after obligatory ones, and counts a repeated
        key twice. So the cases of which optional keys there are become alternatives.
        """
        minimum = self._schema.pop("minProperties", 0)
        maximum = self._schema.pop("maxProperties", None)
        required = set(self._required)
        optional = [name for name in self._properties if name not in required]
        is_open = bool(self._patterns) or not self._is_closed
        num_required = len(self._required)
        if not is_open and maximum is not None and maximum >= num_required + len(optional):
            maximum = None
        minimum = minimum if minimum > num_required else 0
        if not minimum and maximum is None:
            return
        if not optional:
            self._schema.update(self._counted(minimum, maximum, num_required))
            return
        cases: list[dict[str, Any]] = []
        if len(optional) <= _MAX_CASES:
            cases.extend(self._cases(optional, minimum, maximum, is_open=is_open))
        place = next((key for key in ("anyOf", "oneOf") if key not in self._schema), None)
        if len(optional) > _MAX_CASES or len(cases) > _MAX_CASES or place is None:
            for keyword, value in (("minProperties", minimum), ("maxProperties", maximum)):
                if value:
                    self._report(f"{keyword} is not enforced beside so many optional properties")
            return
        types = self._schema.get("type", [*_SCALARS, "object"])
        scalars = [kind for kind in (types if isinstance(types, list) else []) if kind != "object"]
        self._schema[place] = [*([{"type": scalars}] if scalars else []), *cases]

    def _counted(self, minimum: int, maximum: int | None, num_named: int) -> dict[str, Any]:
        """The bounds that llguidance counts right, where all named keys are obligatory."""
        counted: dict[str, Any] = {}
        if maximum is not None:
            counted["maxProperties"] = maximum
        if minimum > num_named + 1 and (self._patterns or not self._is_closed):
            self._report(f"minProperties is taken as {num_named + 1}: further keys may be repeated")
            minimum = num_named + 1
        if minimum > num_named:
            counted["minProperties"] = minimum
        return counted

    def _cases(
        self, optional: list[str], minimum: int, maximum: int | None, *, is_open: bool
    ) -> Iterator[dict[str, Any]]:
        """Alternatives, each with its own obligatory and forbidden keys; too many if need be."""
        num_left = _MAX_CASES + 1
        room = None if maximum is None else maximum - len(self._required)
        wanted = max(minimum - len(self._required), 0)
        if room is None and (wanted <= 1 or not is_open):
            # The first keys that there are; more may follow.
            for chosen in combinations(range(len(optional)), min(wanted, len(optional) + 1)):
                last = chosen[-1]
                forbidden = [optional[i] for i in range(last) if i not in chosen]
                yield self._case([optional[i] for i in chosen], forbidden, {})
                num_left -= 1
                if not num_left:
                    return
            if is_open:
                yield self._case([], optional, {"minProperties": minimum})
            return
        for size in range(len(optional) + 1):
            if (room is not None and size > room) or (not is_open and size < wanted):
                continue
            for names in combinations(optional, size):
                forbidden = [name for name in optional if name not in names]
                num_named = len(self._required) + size
                counted = self._counted(minimum, maximum, num_named) if is_open else {}
                yield self._case(list(names), forbidden, counted)
                num_left -= 1
                if not num_left:
                    return

    def _case(
        self, obligatory: list[str], forbidden: list[str], counted: dict[str, Any]
    ) -> dict[str, Any]:
        case: dict[str, Any] = {"type": "object", **counted}
        if obligatory or counted:
            case["required"] = [*self._required, *obligatory]
        if forbidden:
            case["properties"] = dict.fromkeys(forbidden, False)
        return case
