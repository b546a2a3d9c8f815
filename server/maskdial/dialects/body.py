"""What wire schemas are made of, and the sentence when a body breaks one."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, from_json

from maskdial.bounds import Range
from maskdial.config import MAX_BATCH_INPUTS
from maskdial.engine.offload import offload
from maskdial.errors import PromptTooLongError, ValidationError, shortened
from maskdial.http.ignored import Ignored, note_field, noted, noting
from maskdial.registry.choice import ModelChoice, WrittenMask

Body = TypeVar("Body", bound=BaseModel)
T = TypeVar("T")


_MAX_SMALL_BODY = 65_536  # bytes
_MAX_FIELDS = 30_000
_MAX_LISTS_AND_OBJECTS = 30_000
# One that does not end is matched as well, or looking for its end would begin again at each quote.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
SECONDS_PER_BYTE = 8e-8
"""To parse a body: of lists of small numbers, the slowest."""


def _stop_lists_at_first_error(schema: object) -> None:
    if isinstance(schema, list | tuple):
        for part in schema:
            _stop_lists_at_first_error(part)
    elif isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_lists_at_first_error(part)


class Wire(BaseModel):
    """The base of all wire schemas: unknown fields are refused, types are not coerced.

    A list is refused at its first wrong item: only that is told, and an error for each of half a
    million items takes seconds in which no other request is answered.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_lists_at_first_error(schema)
        return schema

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the fields that are given: neither left out nor null."""
        fields = self.__dict__
        return {name: fields[name] for name in names if fields[name] is not None}


def example(body: Mapping[str, Any], **keywords: Any) -> ConfigDict:
    """The configuration of a body with an example, which `/docs` offers to send.

    Args:
        body: the example.
        keywords: what else its JSON schema says.
    """
    return ConfigDict(json_schema_extra={"examples": [dict(body)], **keywords})


class BodyError(ValidationError):
    """A ValidationError whose ``field`` is the body's own, as the client wrote it.

    Its sentence names the field where that helps.
    """

    def __str__(self) -> str:
        return self.message


class TaskBody(Wire):
    """What every task's body may hold beside its inputs and parameters.

    Attributes:
        spellings: what it calls the neutral request's fields, beside its parameters.
    """

    spellings: ClassVar[Mapping[str, str]] = {}

    model: str | None = Field(
        None,
        description="Model name; NAME:full, NAME:causal, NAME:prefix or NAME:block also says which "
        "attention mask. Default: the only model that supports this task.",
    )
    mask: WrittenMask | None = Field(
        None,
        description="Attention mask, for models that have both. To write texts also prefix: the "
        "prompt is read under the full mask, and what is written under the causal one; or block: "
        "as full, but tokens see what comes before their block, and not what comes behind it. "
        "Default: the one that the task needs; causal if both do it.",
    )
    timeout: Annotated[float, Range(0.001, 86_400)] | None = Field(
        None,
        description="Seconds after which the request is aborted with 504. Default: the server's "
        "limit, if any.",
    )

    def choice(self, name: str | None = None) -> ModelChoice:
        """Which model is meant; ``name`` is the one in the path, if there is one.

        Raises:
            ValidationError: name and mask contradict each other.
        """
        return ModelChoice.of(name or self.model, self.mask)

    @property
    def batch(self) -> bool:
        """Whether the texts came as a list, so that an error has to say which one it is about."""
        return isinstance(getattr(self, self.spellings.get("texts", "texts"), None), list)

    def names(self) -> Mapping[str, str]:
        """What the body calls the fields of the neutral request, where the names differ.

        By default, its parameters' names with a prefix, and its ``spellings``.
        """
        names: dict[str, str] = {}
        parameters = type(self).model_fields.get("parameters")
        if parameters is not None:
            kinds = (*getattr(parameters.annotation, "__args__", ()), parameters.annotation)
            for kind in kinds:
                for name in getattr(kind, "model_fields", ()):
                    if name not in type(self).model_fields:
                        names.setdefault(name, f"parameters.{name}")
        return {**names, **self.spellings}

    def locate(self, error: ValidationError) -> ValidationError:
        """An error about the neutral request, with the field at fault as the client wrote it."""
        if isinstance(error, BodyError) or error.field is None:
            return error
        where = self.names().get(error.field, error.field)
        if isinstance(error, PromptTooLongError):
            which = f"{where}[{error.index}]: " if self.batch and error.index is not None else ""
            return PromptTooLongError(which + error.message, field=where)
        if error.index is None:
            return BodyError(f"{where}: {error.message}", field=where)
        if not self.batch:  # the index of a single text means nothing
            return BodyError(error.message, field=where)
        where = f"{where}[{error.index}]"
        return BodyError(f"{where}: {error.message}", field=where)


TokenId = Annotated[int, Range(0)]


MAX_MESSAGES = 10_000
"""In one conversation."""

IMAGE_LEFT_OUT = "[image left out: this model reads text only]"
"""What stands for an image in the result of a tool: it would be sent again with every turn."""

IMAGES = frozenset({"image", "image_url", "input_image"})
"""What the dialects call parts that are images."""

_PART_HABITS = frozenset(
    {"annotations", "cache_control", "citations", "logprobs", "prompt_cache_breakpoint"}
)


def join_parts(content: object) -> object:
    """The text of a message in parts, joined by newlines, as in vLLM."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError('must be a string or a list of {"type": "text", "text": "..."}')
    return "\n".join(_part_text(index, part) for index, part in enumerate(content))


def _part_text(index: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in IMAGES:
        raise ValueError(f"part {index} is an image, and no model here reads images; send text")
    field = "refusal" if kind == "refusal" else "text"
    if not isinstance(part, dict) or kind != field or not isinstance(part.get(field), str):
        raise ValueError(f'part {index} must be {{"type": "text", "text": "..."}}')
    for name in part.keys() - {"type", field} - _PART_HABITS:
        if noted() is None:
            raise ValueError(f"part {index} has an unknown field: {shortened(name)}")
        note_field(name, "messages.content")
    return str(part[field])


def without_images(parts: list[object]) -> list[object]:
    """The parts of a tool's result, with a text in place of each image, which is noted."""

    def replaced(part: object) -> object:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in IMAGES:
            return part
        note_field("image", "messages.content")
        return {"type": "text", "text": IMAGE_LEFT_OUT}

    return [*map(replaced, parts)]


def check_texts(value: object) -> object:
    """Checks a text, or a list of them, before parsing; the error says which one is wrong."""
    if isinstance(value, list) and not value:
        raise ValueError("must hold at least one text")
    for where, item in enumerate_inputs(value):
        if not isinstance(item, str):
            raise ValueError(f"{where}must be a string")
        if not item.strip():
            raise ValueError(f"{where}must not be empty")
    return value


NOT_BLANK = {"pattern": r"[^\s\x1c-\x1f\x85]"}
"""Says in a JSON schema that a text has more than white space."""

AT_LEAST_ONE = {"minItems": 1}
"""Says in a JSON schema that a list is not empty."""

AnyText = Annotated[str, Field(json_schema_extra=NOT_BLANK)]
"""A text whose validator, elsewhere, refuses blank ones."""

OneOrManyTexts = Annotated[
    AnyText | Annotated[list[AnyText], Field(json_schema_extra=AT_LEAST_ONE)],
    pydantic.BeforeValidator(check_texts),
]


class TextsBody(TaskBody):
    """A body with a text, or a list of them."""

    spellings = {"texts": "inputs"}

    inputs: OneOrManyTexts = Field(description="A text, or a list of texts.")

    @property
    def texts(self) -> list[str]:
        """The texts, also if it is one."""
        return self.inputs if isinstance(self.inputs, list) else [self.inputs]


def enumerate_inputs(value: object) -> list[tuple[str, object]]:
    """The items of ``inputs``, each with the beginning of an error about it."""
    if isinstance(value, list):
        if len(value) > MAX_BATCH_INPUTS:
            raise ValueError(f"must hold at most {MAX_BATCH_INPUTS:,} items, not {len(value):,}")
        return [(f"inputs[{index}] ", item) for index, item in enumerate(value)]
    return [("", value)]


async def read_body(schema: type[Body], content: bytes, ignored: Ignored | None = None) -> Body:
    """`parse_body`, in a thread if the body is large: others are answered meanwhile."""
    return await offload(
        lambda: parse_body(schema, content, ignored), len(content) * SECONDS_PER_BYTE
    )


def parse_body(schema: type[Body], content: bytes, ignored: Ignored | None = None) -> Body:
    """Parses a JSON body.

    Args:
        schema: of the body.
        content: the JSON.
        ignored: gets the unknown fields of lenient bodies; None: they are refused, too.

    Raises:
        ValidationError: it is not JSON or violates the schema; the message names the field.
    """
    check_shape(content, "the body")
    try:
        with noting(ignored):
            return schema.model_validate_json(content)
    except pydantic.ValidationError as error:
        raise BodyError(_describe(error), field=_field_of(error)) from error


def check_shape(content: bytes, what: str) -> None:
    """Refuses a body with thousands of lists and objects, and an object with thousands of fields,
    which would be thousands of errors: at 2 MB, pydantic takes seconds for them, and no other
    request is answered meanwhile.

    Args:
        content: JSON, to be parsed after this.
        what: it is, for the message.

    Raises:
        ValidationError: it has too many.
    """
    if len(content) <= _MAX_SMALL_BODY:
        return
    # Not parsed for the count: Python's collection of garbage would take most of the time.
    if (
        _num_opened(content) > _MAX_LISTS_AND_OBJECTS
        and _num_opened(_STRING.sub(b"", content)) > _MAX_LISTS_AND_OBJECTS
    ):
        raise ValidationError(f"{what} has more than {_MAX_LISTS_AND_OBJECTS:,} lists and objects")
    if content.count(b":") <= _MAX_FIELDS:
        return
    try:
        pending = [from_json(content)]
    except ValueError:
        return  # parsing the body says why
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if len(value) > _MAX_FIELDS:
                raise ValidationError(
                    f"an object in {what} has {len(value):,} fields; the limit is {_MAX_FIELDS:,}"
                )
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(item for item in value if isinstance(item, list | dict))


def _num_opened(content: bytes) -> int:
    return content.count(b"{") + content.count(b"[")


def read_object(content: bytes) -> Mapping[str, Any]:
    """A JSON object; an empty one for anything else, which `parse_body` refuses."""
    try:
        body = from_json(content)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


class FieldError(ValueError):
    """A validator's error about a field of its object that is wrong beside another one."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def _field_of(error: pydantic.ValidationError) -> str | None:
    """The field that the first problem is about; None for the whole body."""
    first = error.errors(include_url=False, include_input=False)[0]
    cause = first.get("ctx", {}).get("error")
    loc = first["loc"]
    if isinstance(cause, FieldError):
        loc = (*loc, *cause.field.split("."))
    return _field_name(loc) or None


def _describe(error: pydantic.ValidationError) -> str:
    """The first problem as a sentence, without echoing what was sent."""
    first = error.errors(include_url=False, include_input=False)[0]
    kind = first["type"]
    if kind == "json_invalid":
        return f"the body is not valid JSON: {first['ctx']['error']}"
    if kind == "value_error" and not first["loc"]:
        return str(first["ctx"]["error"])
    if not first["loc"]:
        return f"the body must be a JSON object: {first['msg']}"
    field = _field_name(first["loc"])
    if kind == "extra_forbidden":
        return f"{field}: unknown field"
    if kind == "missing":
        return f"{field}: this field is required"
    if kind == "too_long":
        limit, length = first["ctx"]["max_length"], first["ctx"]["actual_length"]
        return f"{field}: must have at most {limit} items, not {length}"
    message = str(first["ctx"]["error"]) if kind == "value_error" else first["msg"]
    return message if message.startswith(field) else f"{field}: {message}"


def _field_name(loc: tuple[int | str, ...]) -> str:
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part != "list[list[float]]":  # which of several types was meant, and no field
            written = part if re.fullmatch(r"\w[\w-]*", part) else json.dumps(part)
            name += ("." if name else "") + shortened(written)
    return name
