"""Lenient bodies: those of dialects of others, whose clients send more than is known here."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema

from maskdial.dialects.body import FieldError, Wire
from maskdial.http.ignored import noted


class Lenient(Wire):
    """An object in which clients send more than the server needs.

    Attributes:
        habits: fields that are known to mean nothing here; they are ignored.
        neutral: by field, values that ask for nothing; such a field is ignored, as null is. If it
            is no field of the schema, it is refused with any other value, which would change the
            answer.
        renamed: what clients of others call a field of the schema, and its name.
        within: where such an object stands in a body, as ``x-ignored-fields`` tells it.

    Any other unknown field is ignored and noted, or refused with ``--unknown-fields refuse``.
    """

    habits: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, Sequence[object]]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}
    within: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _drop_habits(cls, content: object) -> object:
        if not isinstance(content, dict):
            return content
        known, ignored = _known_fields(cls), noted()
        kept = {}
        for written, value in content.items():
            name = cls.renamed.get(written, written)
            if name != written and content.get(name) is not None:
                name = written  # given by its own name as well, which counts
            neutral = cls.neutral.get(name, ())
            if value is None or name in cls.habits or value in neutral:
                continue
            if name not in known:
                if neutral:
                    only = " or ".join(map(json.dumps, neutral))
                    raise FieldError(name, f"only {only} is supported; leave it out")
                if ignored is not None:
                    ignored.add_field(name, cls.within)
                    continue
            kept[name] = value
        return kept

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        written = handler(schema)
        handler.resolve_ref_schema(written).pop("additionalProperties", None)
        return written


@functools.cache
def _known_fields(schema: type[Lenient]) -> frozenset[str]:
    """The names that a schema reads."""
    by_name = schema.model_config.get("validate_by_name", False)
    names: set[str] = set()
    for name, field in schema.model_fields.items():
        names.add(field.alias or name)
        if by_name:
            names.add(name)
    return frozenset(names)
