"""Entities of labels that the request brings, by GLiNER models.

Zaratiana et al. 2023, "GLiNER: Generalist Model for Named Entity Recognition using Bidirectional
Transformer". Spans, labels and scores are those of gliner's `predict_entities`, with two deliberate
differences: a text longer than the model is read in windows, where gliner cuts it, and a word
without tokens, such as an invisible character, does not shift the words after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.bundle.texts import check_media, tokenizing_seconds
from maskdial.engine.timing import Deadline
from maskdial.errors import ValidationError, about
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.entity_finders import EntityFinder, GlinerFinder, SchemaFinder
from maskdial.masked.tasks.entity_spans import choose
from maskdial.masked.tasks.task import Reading, TaskModel, TaskRequest, check_distinct
from maskdial.masked.tasks.text_words import TextWords, WordWindow
from maskdial.masked.tasks.token_classify import Entity

THRESHOLD = 0.5
_SECONDS_PER_WORD = 20e-6
_SECONDS_PER_SCORE = 0.25e-6
# Below this threshold most spans may have to be compared with each other
_LOW, _SECONDS_PER_CANDIDATE = 0.1, 3e-6


@dataclass(frozen=True, slots=True)
class EntitiesRequest(TaskRequest[list[list[Entity]]]):
    """Texts whose entities to find. A text longer than the model is read in windows.

    Attributes:
        texts: the texts.
        labels: what to find.
        threshold: a score that an entity exceeds.
        flat: whether no two entities may overlap; otherwise one may lie within another.
        multi_label: whether one span may be several entities.
        stride: tokens at most that neighboring windows share; None: a quarter of a window.
        vectors: of the labels, (num_labels, columns), where the model has an encoder for them.
    """

    task: ClassVar[str] = "token-classify"
    head: ClassVar[TaskName] = "entities"

    texts: Sequence[str]
    labels: Sequence[str]
    threshold: float = THRESHOLD
    flat: bool = True
    multi_label: bool = False
    stride: int | None = None
    vectors: NDArray[np.float32] | None = None

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        return manifest.entities is not None or manifest.extraction is not None

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([*self.texts, *self.labels])

    def check(self, model: TaskModel) -> None:
        if not self.serves(model.manifest):
            raise ValidationError(
                f"model {model.name!r} tags texts with labels of its own; leave them out, or name "
                "a GLiNER model",
                field="candidate_labels",
            )
        check_distinct(self.labels)

    async def prepared(self, model: TaskModel, deadline: Deadline) -> "EntitiesRequest":
        if model.label_encoder is None:
            return self
        return replace(self, vectors=await model.label_encoder.vectors(self.labels, deadline))

    def read(self, model: TaskModel) -> Reading[list[list[Entity]]]:
        finder = self._finder(model)
        room = model.manifest.max_length - len(finder.ids) - len(finder.after)
        if self.stride is not None and self.stride >= room:
            raise ValidationError(
                f"must be less than {room}, the tokens of a text that the labels leave in one "
                f"window of model {model.name!r}, not {self.stride}",
                field="stride",
            )
        texts = []
        most = model.max_queue * min(finder.max_words, room)
        for index, text in enumerate(self.texts):
            with about("texts", index):
                words = finder.read(text, most).cut(room)
                check_media(words.ids.tolist(), model)
            texts.append(words)
        check_media(finder.ids, model)
        plans = [words.windows(room, finder.max_words, self.stride) for words in texts]
        self._check_windows(model, plans)
        inputs = [
            _window_input(words, window, finder)
            for words, plan in zip(texts, plans, strict=True)
            for window in plan
        ]

        def answer(results: Sequence[MaskedResult]) -> list[list[Entity]]:
            left = iter(results)
            return [
                self._entities(text, words, plan, [next(left) for _ in plan], finder)
                for text, words, plan in zip(self.texts, texts, plans, strict=True)
            ]

        num_words = sum(map(len, texts))
        num_scores = num_words * len(self.labels) * finder.max_width
        seconds = num_words * _SECONDS_PER_WORD + num_scores * _SECONDS_PER_SCORE
        if self.threshold < _LOW:
            seconds += num_scores * _SECONDS_PER_CANDIDATE
        return Reading(inputs, answer, seconds=seconds)

    def _finder(self, model: TaskModel) -> EntityFinder:
        entities = model.manifest.entities
        if entities is None:
            return SchemaFinder(self.labels, self.threshold, model, flat=self.flat)
        return GlinerFinder(self.labels, self.vectors, entities, model)

    def _check_windows(self, model: TaskModel, plans: Sequence[Sequence[WordWindow]]) -> None:
        """Refuses texts that need more windows than the queue holds."""
        limit = f"one request may have at most {model.max_queue}"
        for index, plan in enumerate(plans):
            if len(plan) > model.max_queue:
                raise ValidationError(
                    f"the text is {len(plan):,} windows; {limit}", field="texts", index=index
                )
        total = sum(map(len, plans))
        if total > model.max_queue:
            raise ValidationError(
                f"{len(plans)} texts are {total:,} windows; {limit}", field="texts"
            )

    def _entities(
        self,
        text: str,
        words: TextWords,
        plan: Sequence[WordWindow],
        results: Sequence[MaskedResult],
        finder: EntityFinder,
    ) -> list[Entity]:
        if not plan:
            return []
        found = finder.candidates(plan, results, self.threshold)
        # No span ends with the full stop that a finder has added
        found = found.where(words.starts[found.ends] < words.ends[found.ends])
        kept = choose(found, flat=self.flat, multi_label=self.multi_label)
        starts = words.starts[found.starts[kept]].tolist()
        ends = words.ends[found.ends[kept]].tolist()
        labels, scores = found.labels[kept].tolist(), found.scores[kept].tolist()
        columns = zip(labels, scores, starts, ends, strict=True)
        return [
            Entity(self.labels[label], score, text[start:end], start, end)
            for label, score, start, end in columns
        ]


def _window_input(words: TextWords, window: WordWindow, finder: EntityFinder) -> MaskedInput:
    """A window after the labels; its rows are those of the labels and of its words."""
    first, end = words.firsts[window.words.start], words.firsts[window.words.stop]
    tokens = words.firsts[window.words.start : window.words.stop + 1] - first + len(finder.ids)
    places = tokens[1:] - 1 if finder.subtoken_is_last else tokens[:-1]
    return MaskedInput(
        (*finder.ids, *words.ids[first:end].tolist(), *finder.after),
        (*finder.rows, *places.tolist()),
        num_labels=finder.num_labels,
        reduce=finder.reduce,
    )
