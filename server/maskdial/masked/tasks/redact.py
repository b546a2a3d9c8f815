"""Redaction: the entities of a text are found, and something else is put in their place."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.engine.timing import Deadline
from maskdial.errors import ValidationError
from maskdial.masked.tasks.entities import THRESHOLD, EntitiesRequest
from maskdial.masked.tasks.task import Reading, TaskModel, TaskRequest
from maskdial.masked.tasks.token_classify import (
    AggregationStrategy,
    Entity,
    TokenClassifyRequest,
)

LABEL = "{label}"
TEMPLATE = f"[{LABEL}]"
_OUTSIDE = "O"
_MAX_LISTED = 20


@dataclass(frozen=True, slots=True)
class Cover:
    """What is put in an entity's place.

    Attributes:
        template: a text with `LABEL` where the label goes, if anywhere.
        by_label: templates of single labels.
        character: one that each character of the entity becomes; None for the templates.
    """

    template: str = TEMPLATE
    by_label: Mapping[str, str] = field(default_factory=dict)
    character: str | None = None

    def of(self, label: str, length: int) -> str:
        """The replacement of ``length`` characters that have a label."""
        if self.character is not None:
            return self.character * length
        return self.by_label.get(label, self.template).replace(LABEL, label)


@dataclass(frozen=True, slots=True)
class Replacement:
    """A part of a text that was replaced.

    Offsets are characters, ends exclusive: ``start`` and ``end`` of the text, ``redacted_start``
    and ``redacted_end`` of the redacted one. ``original`` is what was there, None if not wanted.
    """

    label: str
    score: float
    start: int
    end: int
    redacted_start: int
    redacted_end: int
    original: str | None = None


@dataclass(frozen=True, slots=True)
class Redaction:
    """A redacted text, and its replacements in the order of the text."""

    text: str
    replacements: list[Replacement]


@dataclass(frozen=True, slots=True)
class RedactRequest(TaskRequest[list[Redaction]]):
    """Texts to redact. A text longer than the model is read in windows.

    Attributes:
        texts: the texts.
        labels: of a GLiNER model, what to find; of another, which of its labels to redact, None for
            all but O.
        threshold: a score that an entity exceeds; None for that of the labels' kind: 0.5 where the
            request brings them, none otherwise.
        cover: what is put in the entities' place.
        keep_original: whether replacements say what was there.
        aggregation_strategy: how tokens with a model's own labels become entities.
        stride: tokens that neighboring windows share; None: a quarter of a window.
        vectors: of the labels, (num_labels, columns), where the model has an encoder for them.
    """

    task: ClassVar[str] = "redact"
    head: ClassVar[TaskName] = "token-classify"

    texts: Sequence[str]
    labels: Sequence[str] | None = None
    threshold: float | None = None
    cover: Cover = field(default_factory=Cover)
    keep_original: bool = False
    aggregation_strategy: AggregationStrategy = "simple"
    stride: int | None = None
    vectors: NDArray[np.float32] | None = None

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        return TokenClassifyRequest.serves(manifest)

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        return self._own_labels().read_seconds

    def check(self, model: TaskModel) -> None:
        if EntitiesRequest.serves(model.manifest):
            if self.labels is None:
                raise ValidationError(
                    f"model {model.name!r} has no labels of its own; name those to redact",
                    field="labels",
                )
            known: Collection[str] = self.labels
            try:
                self._any_labels().check(model)
            except ValidationError as error:
                raise _about_labels(error) from error
        else:
            known = own_labels(model.manifest)
            self._check_known(self.labels or (), known, model, "labels")
            self._own_labels().check(model)
        self._check_known(self.cover.by_label, known, model, "replacement")

    def _check_known(
        self, labels: Collection[str], known: Collection[str], model: TaskModel, field: str
    ) -> None:
        for label in labels:
            if label not in known:
                listed = ", ".join([*known][:_MAX_LISTED])
                more = ", ..." if len(known) > _MAX_LISTED else ""
                raise ValidationError(
                    f"{label!r} is none of the labels of model {model.name!r}: {listed}{more}"
                    if not EntitiesRequest.serves(model.manifest)
                    else f"{label!r} is none of the labels to redact",
                    field=field,
                )

    async def prepared(self, model: TaskModel, deadline: Deadline) -> "RedactRequest":
        if model.label_encoder is None:
            return self
        try:
            with_vectors = await self._any_labels().prepared(model, deadline)
        except ValidationError as error:
            raise _about_labels(error) from error
        return replace(self, vectors=with_vectors.vectors)

    def read(self, model: TaskModel) -> Reading[list[Redaction]]:
        reading: Reading[Any]
        if not EntitiesRequest.serves(model.manifest):
            reading = self._own_labels().read(model)
        else:
            try:
                reading = self._any_labels().read(model)
            except ValidationError as error:
                raise _about_labels(error) from error
        least = self.threshold or 0.0
        chosen = None if self.labels is None else frozenset(self.labels)

        def cover(answers: Sequence[Any]) -> list[Redaction]:
            redactions = []
            for text, found in zip(self.texts, answers, strict=True):
                entities = [
                    each
                    for each in found
                    if isinstance(each, Entity)
                    and each.score > least
                    and (chosen is None or each.entity_group in chosen)
                ]
                redactions.append(redact(text, entities, self.cover, self.keep_original))
            return redactions

        return reading.map(cover)

    def _own_labels(self) -> TokenClassifyRequest:
        return TokenClassifyRequest(
            self.texts, aggregation_strategy=self.aggregation_strategy, stride=self.stride
        )

    def _any_labels(self) -> EntitiesRequest:
        threshold = THRESHOLD if self.threshold is None else self.threshold
        labels = self.labels or ()
        return EntitiesRequest(
            self.texts, labels, threshold, stride=self.stride, vectors=self.vectors
        )


def _about_labels(error: ValidationError) -> ValidationError:
    """An error about candidate labels by the name that they have here."""
    field = "labels" if error.field == "candidate_labels" else error.field
    return ValidationError(error.message, field=field, index=error.index)


def own_labels(manifest: Manifest) -> list[str]:
    """The labels of the entities that a tagger finds, in the order of its own."""
    names = (label.split("-", 1)[-1] for label in manifest.labels)
    return [name for name in dict.fromkeys(names) if name != _OUTSIDE]


def redact(
    text: str, entities: Sequence[Entity], cover: Cover, keep_original: bool = False
) -> Redaction:
    """A text with something else in the place of its entities.

    Entities that overlap become one replacement, with the label of the best of them; of equal
    scores, of the first and longest one.
    """
    merged: list[Entity] = []
    for each in sorted(entities, key=lambda one: (one.start, -one.end, one.entity_group)):
        if each.start == each.end:
            continue
        if merged and each.start < merged[-1].end:
            last = merged[-1]
            best = max(last, each, key=lambda one: one.score)
            merged[-1] = Entity(
                best.entity_group, best.score, "", last.start, max(last.end, each.end)
            )
        else:
            merged.append(each)
    parts: list[str] = []
    replacements: list[Replacement] = []
    read = written = 0
    for each in merged:
        instead = cover.of(each.entity_group, each.end - each.start)
        start = written + each.start - read
        parts += [text[read : each.start], instead]
        read, written = each.end, start + len(instead)
        original = text[each.start : each.end] if keep_original else None
        replacements.append(
            Replacement(
                each.entity_group, each.score, each.start, each.end, start, written, original
            )
        )
    return Redaction("".join([*parts, text[read:]]), replacements)
