"""Bounds of numbers and sizes that name themselves when a value breaks them.

They annotate types: of a body's fields, and of whatever else pydantic reads.
"""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from maskdial.errors import shortened

LARGEST_INT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Bounds of a number, inclusive unless ``above_low``; the error names both.

    Without a ``high``, integers are still limited to 32 bits, as in the engine.
    """

    low: float
    high: float = LARGEST_INT
    above_low: bool = False

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        low = "exclusiveMinimum" if self.above_low else "minimum"
        return {**handler(schema), low: self.low, "maximum": self.high}

    def _check(self, value: float) -> float:
        if self.low <= value <= self.high and not (self.above_low and value == self.low):
            return value
        low, high = _number(self.low), _number(self.high)
        if self.above_low:
            bounds = f"above {low} and at most {high}"
        elif self.high == LARGEST_INT and value < self.low:
            bounds = f"at least {low}"
        else:
            bounds = f"between {low} and {high}"
        raise ValueError(f"must be {bounds}, not {_number(value)}")


def _number(value: float) -> str:
    """A number as a person writes it; an integer may be too large for a float, or for a line."""
    return shortened(str(value) if isinstance(value, int) else f"{value:g}")


@dataclass(frozen=True, slots=True)
class Size:
    """Inclusive bounds of the size of a text, list or object; the error names both."""

    low: int
    high: int
    unit: str

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        inner = handler(source)
        if inner["type"] == "list":
            # Stops at the first item that is wrong or one too many, before it has made an error for
            # each of half a million.
            inner = {**inner, "fail_fast": True, "max_length": self.high}
        return core_schema.no_info_after_validator_function(self._check, inner)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        inner = handler(schema)
        if "anyOf" in inner:  # one of several forms, which a validator makes one of
            return inner
        suffix = {"string": "Length", "array": "Items", "object": "Properties"}[inner["type"]]
        return {**inner, f"min{suffix}": self.low, f"max{suffix}": self.high}

    def _check(self, value: Sized) -> Sized:
        if self.low <= len(value) <= self.high:
            return value
        if self.high == LARGEST_INT:
            bounds = f"at least {self.low}"
        else:
            bounds = f"between {self.low} and {self.high}" if self.low else f"at most {self.high}"
        raise ValueError(f"must have {bounds} {self.unit}, not {len(value)}")
