"""Numbers of a JSON schema that llguidance, which reads them as 64-bit floats, would change."""

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, TypeGuard

from maskdial.errors import ValidationError

# Beyond it, a float does not hold every integer.
_EXACT = 2**53
# Bounds beyond these are taken as these: the greatest and the least that llguidance writes.
MAX_INTEGER = 2**63 - 1
MAX_BOUND = 2**63 - 1024
# It needs both bounds where one is at least so far from 0.
_FAR = 10**18
_MAX_DIVISOR = 2**32 // 10  # of a multiple, in units of its last decimal
_STEP = 1e-12


def check_numbers(schema: dict[str, Any], report: Callable[[str], None]) -> None:
    """Checks the numbers of one schema, not of those in it, and moves bounds that are too far out.

    Args:
        schema: changed in place.
        report: receives a sentence for each bound that was moved.

    Raises:
        ValidationError: a number cannot be enforced exactly.
    """
    for keyword in ("const", "enum"):
        for value in _integers(schema.get(keyword)):
            _check_constant(keyword, value)
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    integer = "integer" in types and "number" not in types
    for side in (_LOW, _HIGH):
        side.read_draft_4(schema)
        if integer:
            side.make_inclusive(schema)
        for keyword in (side.inclusive, side.exclusive):
            if _is_number(schema.get(keyword)):
                schema[keyword] = side.bound(keyword, schema[keyword], integer, report)
    for side, other in ((_LOW, _HIGH), (_HIGH, _LOW)):
        side.bound_far(schema, other, report)
        if not integer:
            side.step_inside(schema, other)
    divisor = schema.get("multipleOf")
    if _is_number(divisor):
        _check_divisor(divisor)


class _Side:
    """The bounds of one side; ``sign`` is the direction that leads out of them."""

    def __init__(self, inclusive: str, exclusive: str, sign: int) -> None:
        self.inclusive = inclusive
        self.exclusive = exclusive
        self.sign = sign

    def read_draft_4(self, schema: dict[str, Any]) -> None:
        """In draft 4, a boolean says that the other bound is exclusive."""
        if isinstance(schema.get(self.exclusive), bool):
            is_exclusive = schema.pop(self.exclusive)
            if is_exclusive and self.inclusive in schema:
                schema[self.exclusive] = schema.pop(self.inclusive)

    def make_inclusive(self, schema: dict[str, Any]) -> None:
        """One exact bound of an integer in place of one or two."""
        round_inside = math.floor if self.sign > 0 else math.ceil
        bounds: list[int] = []
        for keyword in (self.inclusive, self.exclusive):
            value = schema.get(keyword)
            if _is_number(value) and math.isfinite(value):
                inside = round_inside(value)
                at_bound = keyword == self.exclusive and inside == value
                bounds.append(inside - self.sign if at_bound else inside)
                del schema[keyword]
        if bounds:
            schema[self.inclusive] = min(bounds) if self.sign > 0 else max(bounds)

    def bound(
        self, keyword: str, value: float, integer: bool, report: Callable[[str], None]
    ) -> float:
        """A bound as llguidance holds to it."""
        if integer and value == MAX_INTEGER:
            return value
        if value * self.sign > MAX_BOUND:
            limit = MAX_INTEGER if integer and self.sign > 0 else MAX_BOUND * self.sign
            report(f"{keyword} is taken as {limit}")
            return limit
        too_far = not -MAX_BOUND <= value <= MAX_BOUND
        if too_far or (abs(value) > _EXACT and int(float(value)) != value):
            raise _not_exact(keyword, value)
        if keyword == self.exclusive and abs(value) >= _EXACT:
            raise _not_exact(keyword, value)
        return value

    def bound_far(
        self, schema: dict[str, Any], other: "_Side", report: Callable[[str], None]
    ) -> None:
        """Adds a bound on the other side to one that is far out on the wrong side of 0."""
        value = self.of(schema)
        if value is not None and -value * self.sign >= _FAR and other.of(schema) is None:
            schema[other.inclusive] = MAX_BOUND * other.sign
            report(f"{other.inclusive} is taken as {MAX_BOUND * other.sign}")

    def step_inside(self, schema: dict[str, Any], other: "_Side") -> None:
        """llguidance lets an exclusive bound be written where both bounds are less than 1 apart."""
        value, opposite = self.of(schema), other.of(schema)
        if value is None or opposite is None or value != schema.get(self.exclusive):
            return
        room = (value - opposite) * self.sign
        if value == int(value) and 0 < room < 1:
            del schema[self.exclusive]
            step = min(max(_STEP, 4 * math.ulp(value)), room / 2)
            schema[self.inclusive] = value - step * self.sign

    def of(self, schema: dict[str, Any]) -> float | None:
        """The bound of this side that decides, of the inclusive and the exclusive one; None for
        none.
        """
        given = [schema.get(keyword) for keyword in (self.inclusive, self.exclusive)]
        bounds: list[float] = [value for value in given if _is_number(value)]
        return min(bounds, key=lambda value: value * self.sign, default=None)


_LOW = _Side("minimum", "exclusiveMinimum", -1)
_HIGH = _Side("maximum", "exclusiveMaximum", 1)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integers(value: object) -> Iterator[int]:
    """The integers of a constant, at any depth."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)
        elif isinstance(part, int) and not isinstance(part, bool):
            yield part


def _check_constant(keyword: str, value: int) -> None:
    if abs(value) <= _EXACT or value == MAX_INTEGER:
        return
    if abs(value) > 10**300:
        raise _not_exact(keyword, value)
    if -MAX_BOUND <= value < MAX_INTEGER:
        exact = int(float(value)) == value
    else:
        # Beyond 64 bits, it writes the digits that tell the float from its neighbors, then zeros.
        exact = value > 0 and int(Decimal(repr(float(value)))) == value
    if not exact:
        raise _not_exact(keyword, value)


def _check_divisor(divisor: float) -> None:
    if not math.isfinite(divisor):
        return
    _, digits, exponent = Decimal(repr(divisor)).normalize().as_tuple()
    assert isinstance(exponent, int), "the number is finite"
    if int("".join(map(str, digits))) * 10 ** max(exponent, 0) > _MAX_DIVISOR:
        text = str(divisor) if abs(divisor) < 10**30 else "of more than 30 digits"
        raise ValidationError(
            f"multipleOf {text} has too many digits to be enforced: at most {_MAX_DIVISOR} times "
            "its last decimal"
        )


def _not_exact(keyword: str, value: float) -> ValidationError:
    text = str(value) if abs(value) < 10**30 else "of more than 30 digits"
    return ValidationError(
        f"{keyword} {text} cannot be enforced exactly: beyond 2^53, only integers that a 64-bit "
        "float holds can be; describe the value as a string instead"
    )
