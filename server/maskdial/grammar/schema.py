"""A JSON schema as llguidance enforces it: what it cannot enforce is taken out and reported."""

import copy
from collections.abc import Callable
from typing import Any

from maskdial.errors import ValidationError
from maskdial.grammar.finite import check_finite
from maskdial.grammar.keywords import drop_not_enforced
from maskdial.grammar.numbers import check_numbers
from maskdial.grammar.object_keys import restrict_keys
from maskdial.grammar.subschemas import subschemas

# llguidance says so of a ``oneOf`` whose schemas it does not know to exclude each other.
ONE_OF_WARNING = "oneOf is taken as anyOf"


def enforceable(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A schema for llguidance, and a sentence for each constraint that it does not enforce.

    Args:
        schema: not too deep; it is not changed.

    Raises:
        ValidationError: only infinite values satisfy it, or a number cannot be enforced exactly.
    """
    schema, warnings = without_not_enforced(schema)
    try:
        check_finite(schema)
    except ValidationError as error:
        raise ValidationError(f"the JSON schema cannot be used: {error.message}") from error
    for each in subschemas(schema):
        report = _reporter(warnings, each.path)
        try:
            check_numbers(each.schema, report)
        except ValidationError as error:
            raise ValidationError(f"the JSON schema cannot be used: {error.message}") from error
        restrict_keys(each, report)
    return schema, list(dict.fromkeys(warnings))


def without_not_enforced(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A copy of a schema without the keywords that no grammar enforces, and a sentence for each."""
    schema = copy.deepcopy(schema)
    warnings: list[str] = []
    for each in subschemas(schema):
        drop_not_enforced(each.schema, _reporter(warnings, each.path))
    return schema, warnings


def _reporter(warnings: list[str], path: str) -> Callable[[str], None]:
    return lambda sentence: warnings.append(f"{path}: {sentence}")
