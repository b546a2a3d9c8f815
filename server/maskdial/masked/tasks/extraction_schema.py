"""What a request asks a model to extract: gliner2's schema.

Zaratiana et al. 2025, "GLiNER2: An Efficient Multi-Task Information Extraction System with
Schema-Driven Interface".
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Field:
    """Spans to find: entities of a type, or a field of a structure.

    Attributes:
        name: what to look for.
        description: what the model reads of it beside the name.
        single: whether only the best one is wanted.
        threshold: a score that a span must reach; None for that of the request.
        choices: of a field, values of which it has some, that need not be in the text.
    """

    name: str
    description: str | None = None
    single: bool = False
    threshold: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Structure:
    """Records to find, each with values for some of the fields."""

    name: str
    fields: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """Pairs of a head and a tail to find."""

    name: str
    description: str | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A classification of the text.

    Attributes:
        task: its name.
        labels: to choose from.
        descriptions: of some labels.
        multi_label: whether several labels may fit.
        threshold: a score that one of several must reach; the best one is always there.
        top_k: how many of several to return at most; None for all.
        activation: what makes scores of logits; auto: softmax, or sigmoid with ``multi_label``.
        prompt: what the model reads beside the task's name.
        examples: texts and their labels.
    """

    task: str
    labels: tuple[str, ...]
    descriptions: Mapping[str, str] = field(default_factory=dict)
    multi_label: bool = False
    threshold: float = 0.5
    top_k: int | None = None
    activation: Literal["auto", "sigmoid", "softmax"] = "auto"
    prompt: str | None = None
    examples: Sequence[tuple[str, str]] = ()

    @property
    def is_exclusive(self) -> bool:
        """Whether the labels' scores add up to 1."""
        if self.activation == "auto":
            return not self.multi_label
        return self.activation == "softmax"


@dataclass(frozen=True, slots=True)
class Schema:
    """All that is asked of one text, in the order in which the model reads it."""

    structures: tuple[Structure, ...] = ()
    entities: tuple[Field, ...] = ()
    relations: tuple[Relation, ...] = ()
    choices: tuple[Choice, ...] = ()

    def texts(self) -> Iterator[str]:
        """Everything in it that the model reads."""
        for structure in self.structures:
            yield structure.name
            yield from _texts_of(structure.fields)
        yield from _texts_of(self.entities)
        for relation in self.relations:
            yield from (relation.name, relation.description or "")
        for choice in self.choices:
            yield from (choice.task, choice.prompt or "", *choice.labels)
            yield from choice.descriptions.values()
            for example in choice.examples:
                yield from example


def _texts_of(fields: Sequence[Field]) -> Iterator[str]:
    for each in fields:
        yield from (each.name, each.description or "", *each.choices)
