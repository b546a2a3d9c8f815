"""The body of `/extract`: a schema as gliner2's `Schema.from_dict` reads it, and what is returned.

The answer is gliner2's own: for each name of the schema what was found, with scores and offsets if
they are wanted.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from maskdial.bounds import Range, Size
from maskdial.dialects.body import TextsBody, Wire, example
from maskdial.dialects.masked_body import MaskedBody, Text, TruncationParameters
from maskdial.errors import shortened
from maskdial.masked.tasks import extraction_schema as neutral
from maskdial.masked.tasks.classify import LabelScore
from maskdial.masked.tasks.extract import Extracted, ExtractRequest, Value, Values

Name = Annotated[Text, Size(1, 1024, "characters")]
Description = Annotated[Text, Size(1, 4096, "characters")]
Threshold = Annotated[float, Range(0, 1)]
_RELATIONS = "relation_extraction"
_RESERVED = ("entities", _RELATIONS)


class EntityType(Wire):
    """What to find of a type of entities."""

    description: Description | None = Field(None, description="What the model reads of it.")
    dtype: Literal["list", "str"] | None = Field(
        None, description="list: all that are found (default); str: the best one."
    )
    threshold: Threshold | None = Field(
        None, description="Score that a span must reach. Default: the request's."
    )


class StructureField(EntityType):
    """A field of a structure."""

    name: Name = Field(description="What to look for.")
    choices: Annotated[list[Name], Size(1, 256, "choices")] | None = Field(
        None, description="Values of which the field has some, that need not be in the text."
    )

    @model_validator(mode="after")
    def _chooses_from_each_once(self) -> Self:
        _check_once(self.choices or ())
        return self


class StructureType(Wire):
    """Records to find, each with values for some of the fields."""

    fields: Annotated[list[StructureField], Size(1, 256, "fields")]

    @model_validator(mode="after")
    def _names_each_once(self) -> Self:
        _check_once(each.name for each in self.fields)
        return self


class RelationType(Wire):
    """What to find of a relation."""

    description: Description | None = Field(None, description="What the model reads of it.")
    threshold: Threshold | None = Field(
        None, description="Score that head and tail must reach. Default: the request's."
    )


def _each_described(value: object) -> object:
    """Types by name, from a list of names, or from an object with descriptions for some."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {
            name: {"description": each} if isinstance(each, str) else each
            for name, each in value.items()
        }
    return {name: {} for name in _names(value)}


def _labels(value: object) -> object:
    """Descriptions by label, empty where there is none."""
    return value if isinstance(value, dict) else dict.fromkeys(_names(value), "")


def _names(value: object) -> list[str]:
    if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        raise ValueError("must be a list of names, or an object with what is said of each")
    _check_once(value)
    return value


def _check_once(names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{shortened(name)!r} is there twice; name it once")
        seen.add(name)


class ClassificationTask(Wire):
    """A classification of the text."""

    task: Name = Field(description="Its name.")
    labels: Annotated[
        dict[Name, Annotated[str, Size(0, 4096, "characters")]],
        Size(2, 1024, "labels"),
        BeforeValidator(_labels, json_schema_input_type=list[Name] | dict[Name, str]),
    ] = Field(description="Labels to choose from, or descriptions by label.")
    multi_label: bool = Field(False, description="Whether several labels may fit.")
    cls_threshold: Threshold = Field(0.5, description="Score that one of several must reach.")
    top_k: Annotated[int, Range(1)] | None = Field(
        None, description="How many of several labels to return at most."
    )
    class_act: Literal["auto", "sigmoid", "softmax"] | None = Field(
        None, description="What makes scores of logits. Default: softmax, or sigmoid of several."
    )
    prompt: Description | None = Field(None, description="What the model reads beside the name.")
    examples: Annotated[list[tuple[Description, Name]], Size(0, 64, "examples")] | None = Field(
        None, description="Texts and their labels."
    )


class ExtractionSchema(Wire):
    """What to find."""

    entities: Annotated[
        Annotated[dict[Name, EntityType], Size(1, 1024, "types")] | None,
        BeforeValidator(
            _each_described,
            json_schema_input_type=list[Name] | dict[Name, Description | EntityType] | None,
        ),
    ] = Field(None, description="Types of entities, or what to find of each.")
    structures: Annotated[dict[Name, StructureType], Size(1, 64, "structures")] | None = Field(
        None, description="Records to find, by name."
    )
    relations: Annotated[
        Annotated[dict[Name, RelationType], Size(1, 256, "relations")] | None,
        BeforeValidator(
            _each_described,
            json_schema_input_type=list[Name] | dict[Name, Description | RelationType] | None,
        ),
    ] = Field(None, description="Relations, or what to find of each.")
    classifications: Annotated[list[ClassificationTask], Size(1, 64, "classifications")] | None = (
        Field(None, description="Classifications of the text.")
    )

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.given("entities", "structures", "relations", "classifications"):
            raise ValueError("must have entities, structures, relations or classifications to find")
        names = [*(self.structures or ()), *(each.task for each in self.classifications or ())]
        _check_once(names)
        for name in names:
            if name in _RESERVED:
                raise ValueError(f"{name!r} has another meaning in the answer; choose another name")
        return self

    def neutral(self) -> neutral.Schema:
        """The same, independent of the wire."""
        return neutral.Schema(
            tuple(
                neutral.Structure(name, tuple(_field(each.name, each) for each in one.fields))
                for name, one in (self.structures or {}).items()
            ),
            tuple(_field(name, one) for name, one in (self.entities or {}).items()),
            tuple(
                neutral.Relation(name, one.description, one.threshold)
                for name, one in (self.relations or {}).items()
            ),
            tuple(map(_choice, self.classifications or ())),
        )


class ExtractParameters(TruncationParameters):
    """Parameters of `/extract`."""

    model_config = ConfigDict(protected_namespaces=())

    schema_: ExtractionSchema = Field(alias="schema", description="What to find.")
    threshold: Threshold | None = Field(
        None,
        description="Score that a span must reach, unless the schema has another. Default: 0.5.",
    )
    include_confidence: bool = Field(False, description="Whether to return scores.")
    include_spans: bool = Field(
        False, description="Whether to return where values start and end, in characters."
    )


class ExtractBody(TextsBody, MaskedBody):
    """A text, or a list of them, and what to find."""

    model_config = example(
        {
            "inputs": "Alice took the train from Paris to Rome.",
            "parameters": {
                "schema": {
                    "entities": ["person", "city"],
                    "structures": {
                        "trip": {"fields": [{"name": "from", "dtype": "str"}, {"name": "to"}]}
                    },
                }
            },
        }
    )
    spellings = {"texts": "inputs", "schema": "parameters.schema"}  # noqa: RUF012

    parameters: ExtractParameters

    def request(self) -> ExtractRequest:
        parameters = self.parameters
        return ExtractRequest(
            self.texts,
            parameters.schema_.neutral(),
            truncation=parameters.truncation,
            **parameters.given("threshold"),
        )


def render(body: ExtractBody, found: Extracted) -> dict[str, Any]:
    """What was found in one text, as gliner2 writes it."""
    given = body.parameters
    writer = _Writer(scores=given.include_confidence, spans=given.include_spans)
    content: dict[str, Any] = {
        name: [
            {field: writer.values(values) for field, values in record.items()} for record in records
        ]
        for name, records in found.structures.items()
    }
    if given.schema_.entities is not None:
        content["entities"] = {
            name: writer.values(values) for name, values in found.entities.items()
        }
    for task, label in found.choices.items():
        content[task] = writer.labels(label)
    if given.schema_.relations is not None:
        content[_RELATIONS] = {
            name: [writer.pair(*pair) for pair in pairs] for name, pairs in found.relations.items()
        }
    return content


class _Writer:
    """Writes values with their scores and places, or as texts alone."""

    def __init__(self, *, scores: bool, spans: bool) -> None:
        self._scores, self._spans = scores, spans

    def value(self, value: Value) -> str | dict[str, Any]:
        has_place = self._spans and value.start is not None
        if not (self._scores or has_place):
            return value.text
        written: dict[str, Any] = {"text": value.text}
        if self._scores:
            written["confidence"] = value.score
        if has_place:
            written |= {"start": value.start, "end": value.end}
        return written

    def values(self, values: Values) -> object:
        """One, or a list, in which no text is there twice unless its places are told."""
        if not isinstance(values, list):
            return None if values is None else self.value(values)
        if not self._spans:
            values = [*{each.text.lower(): each for each in reversed(values)}.values()][::-1]
        return [self.value(each) for each in values]

    def pair(self, head: Value, tail: Value) -> object:
        if not (self._scores or self._spans):
            return [head.text, tail.text]
        return {"head": self.value(head), "tail": self.value(tail)}

    def labels(self, labels: LabelScore | list[LabelScore]) -> object:
        if isinstance(labels, list):
            return [self.labels(each) for each in labels]
        if not self._scores:
            return labels.label
        return {"label": labels.label, "confidence": labels.score}


def _field(name: str, given: EntityType) -> neutral.Field:
    choices = given.choices if isinstance(given, StructureField) else None
    return neutral.Field(
        name, given.description, given.dtype == "str", given.threshold, tuple(choices or ())
    )


def _choice(given: ClassificationTask) -> neutral.Choice:
    return neutral.Choice(
        given.task,
        tuple(given.labels),
        {label: text for label, text in given.labels.items() if text},
        given.multi_label,
        given.cls_threshold,
        given.top_k,
        given.class_act or "auto",
        given.prompt,
        tuple(given.examples or ()),
    )
