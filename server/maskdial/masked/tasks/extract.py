"""Extraction: what a schema names is found in a text, by GLiNER2 models.

Zaratiana et al. 2025, "GLiNER2: An Efficient Multi-Task Information Extraction System with
Schema-Driven Interface". Results are those of gliner2's `extract`, with these differences: no span
ends with the full stop that gliner2 adds to a text without one, a word without tokens is left out,
and a relation has its own name in the answer, also with a description.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from maskdial.bundle.manifest import TaskName
from maskdial.bundle.texts import check_characters, tokenizing_seconds
from maskdial.errors import ValidationError, about
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.classify import LabelScore
from maskdial.masked.tasks.extraction_prompt import HEAD_AND_TAIL, PromptTask, SchemaPrompt
from maskdial.masked.tasks.extraction_schema import Choice, Field, Schema
from maskdial.masked.tasks.extraction_scores import Findings, Floats
from maskdial.masked.tasks.logits import sigmoid, softmax
from maskdial.masked.tasks.schema_scorer import make_scorer
from maskdial.masked.tasks.task import REFUSE, Reading, TaskModel, TaskRequest, Truncation
from maskdial.masked.tasks.text_words import TextWords

_THRESHOLD = 0.5
_MAX_WORDS = 2**16
_SECONDS_PER_WORD = 50e-6


@dataclass(frozen=True, slots=True)
class Value:
    """What was found; ``start`` and ``end`` are characters of the text, None of a choice."""

    text: str
    score: float
    start: int | None = None
    end: int | None = None


Values = Value | list[Value] | None
"""What a field has: the best value, or all of them."""


@dataclass(frozen=True, slots=True)
class Extracted:
    """What was found in one text.

    Attributes:
        structures: by name, records of values by field.
        entities: by type.
        relations: by name, pairs of a head and a tail.
        choices: by task, the label, or the labels that fit.
        scores: by task, all labels.
    """

    structures: Mapping[str, list[dict[str, Values]]]
    entities: Mapping[str, Values]
    relations: Mapping[str, list[tuple[Value, Value]]]
    choices: Mapping[str, LabelScore | list[LabelScore]]
    scores: Mapping[str, list[LabelScore]]


@dataclass(frozen=True, slots=True)
class ExtractRequest(TaskRequest[list[Extracted]]):
    """Texts in which to find what a schema names.

    ``threshold``: a score that a span must reach, where the schema does not say.
    """

    task: ClassVar[str] = "extract"
    head: ClassVar[TaskName] = "extract"

    texts: Sequence[str]
    schema: Schema
    threshold: float = _THRESHOLD
    truncation: Truncation = REFUSE

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([*self.texts, *self.schema.texts()])

    def read(self, model: TaskModel) -> Reading[list[Extracted]]:
        prompt = SchemaPrompt.read(self.schema, model.tokenizer)
        room = prompt.check(model, "the schema takes")
        scorer = make_scorer(prompt, self._thresholds(), model)
        inputs, texts, num_truncated = [], [], 0
        for index, text in enumerate(self.texts):
            with about("texts", index):
                words, num_cut = self._words(text, room, model)
            texts.append(words)
            num_truncated += num_cut
            inputs.append(_input(prompt, words, scorer))

        def answer(results: Sequence[MaskedResult]) -> list[Extracted]:
            return [
                _Reader(self.schema, prompt, text, words, result).extracted()
                for text, words, result in zip(self.texts, texts, results, strict=True)
            ]

        seconds = sum(map(len, texts)) * _SECONDS_PER_WORD
        return Reading(inputs, answer, num_truncated, seconds)

    def _words(self, text: str, room: int, model: TaskModel) -> tuple[TextWords, int]:
        """A text's words, and the number of tokens that were cut off."""
        cuts = self.truncation.cuts(model)
        if not cuts:
            check_characters(text, model.manifest.max_length, model)
        words = TextWords.read_sentence(text, model.tokenizer, _MAX_WORDS)
        num_tokens = len(words.ids)
        if num_tokens > room and not cuts:
            raise ValidationError(
                f"the text has {num_tokens:,} tokens; the schema leaves room for {room:,} of the "
                f"{model.manifest.max_length:,} that model {model.name!r} reads; shorten it, ask "
                'for less at once, or set "truncate"'
            )
        words = words.cut(room)
        at_left = self.truncation.side(model) == "left"
        return words.limited(room, from_end=at_left), max(num_tokens - room, 0)

    def _thresholds(self) -> list[list[float]]:
        """Those of each task's fields, in the order of the prompt."""
        found = [self._of_fields(structure.fields) for structure in self.schema.structures]
        if self.schema.entities:
            found.append(self._of_fields(self.schema.entities))
        for relation in self.schema.relations:
            least = self.threshold if relation.threshold is None else relation.threshold
            found.append([least] * len(HEAD_AND_TAIL))
        return found + [[] for _ in self.schema.choices]

    def _of_fields(self, fields: Sequence[Field]) -> list[float]:
        return [self.threshold if one.threshold is None else one.threshold for one in fields]


def _input(
    prompt: SchemaPrompt, words: TextWords, scorer: Callable[[Floats], Floats]
) -> MaskedInput:
    before = len(prompt.ids) + len(prompt.words.ids)
    return MaskedInput(
        (*prompt.ids, *prompt.words.ids.tolist(), *words.ids.tolist()),
        (
            *prompt.rows,
            *(len(prompt.ids) + prompt.words.firsts[:-1]).tolist(),
            *(before + words.firsts[:-1]).tolist(),
        ),
        reduce=scorer,
    )


class _Reader:
    """Makes of a text's findings what its schema asks for."""

    def __init__(
        self,
        schema: Schema,
        prompt: SchemaPrompt,
        text: str,
        words: TextWords,
        result: MaskedResult,
    ) -> None:
        self.schema, self.prompt = schema, prompt
        self.text, self.words = text, words
        self.findings = Findings.of(result.logits)

    def extracted(self) -> Extracted:
        tasks = iter(enumerate(self.prompt.tasks))
        structures = {
            each.name: self._records(next(tasks)[0], each.fields) for each in self.schema.structures
        }
        entities: dict[str, Values] = {}
        if self.schema.entities:
            place = next(tasks)[0]
            entities = self._record(place, 0, self.schema.entities)
        relations = {each.name: self._pairs(next(tasks)[0]) for each in self.schema.relations}
        scores = {each.task: self._scores(next(tasks), each) for each in self.schema.choices}
        choices = {each.task: chosen(scores[each.task], each) for each in self.schema.choices}
        return Extracted(structures, entities, relations, choices, scores)

    def _records(self, task: int, fields: Sequence[Field]) -> list[dict[str, Values]]:
        records = [self._record(task, step, fields) for step in self._steps(task)]
        return [each for each in records if any(value for value in each.values())]

    def _pairs(self, task: int) -> list[tuple[Value, Value]]:
        pairs = []
        for step in self._steps(task):
            head, tail = self._record(task, step, HEAD_AND_TAIL).values()
            if isinstance(head, Value) and isinstance(tail, Value):
                pairs.append((head, tail))
        return pairs

    def _steps(self, task: int) -> list[int]:
        """The occurrences of a task's fields in which something was found."""
        steps: list[int] = np.unique(self.findings.step[self.findings.task == task]).tolist()
        return steps

    def _record(self, task: int, step: int, fields: Sequence[Field]) -> dict[str, Values]:
        found = self.findings
        here = (found.task == task) & (found.step == step)
        record: dict[str, Values] = {}
        for place, field in enumerate(fields):
            places = np.flatnonzero(here & (found.name == place)).tolist()
            values = self._choices(places, field) if field.choices else self._spans(places)
            if field.single:
                record[field.name] = max(values, key=lambda one: one.score, default=None)
            else:
                record[field.name] = values
        return record

    def _choices(self, places: Sequence[int], field: Field) -> list[Value]:
        found = self.findings
        return [Value(field.choices[found.start[at]], float(found.score[at])) for at in places]

    def _spans(self, places: Sequence[int]) -> list[Value]:
        """Those that do not overlap, best first."""
        found, words = self.findings, self.words
        kept: list[Value] = []
        taken: list[tuple[int, int]] = []
        for at in sorted(places, key=lambda place: -found.score[place]):
            first, last = int(found.start[at]), int(found.end[at])
            if words.starts[last] == words.ends[last]:  # the full stop that was added
                continue
            if any(first <= end and start <= last for start, end in taken):
                continue
            taken.append((first, last))
            start, end = int(words.starts[first]), int(words.ends[last])
            kept.append(Value(self.text[start:end], float(found.score[at]), start, end))
        return kept

    def _scores(self, task: tuple[int, PromptTask], choice: Choice) -> list[LabelScore]:
        logits = self.findings.score[self.findings.task == task[0]]
        values = softmax(logits) if choice.is_exclusive else sigmoid(logits)
        pairs = zip(choice.labels, values.tolist(), strict=True)
        return [LabelScore(*pair) for pair in pairs]


def chosen(scores: Sequence[LabelScore], choice: Choice) -> LabelScore | list[LabelScore]:
    """The label with the highest score, or those that reach the threshold, or else the best one.

    With ``top_k`` they are sorted, best first; otherwise in the order of the labels.
    """
    best = max(scores, key=lambda each: each.score)
    if not choice.multi_label:
        return best
    fitting = [each for each in scores if each.score >= choice.threshold] or [best]
    if choice.top_k is None:
        return fitting
    return sorted(fitting, key=lambda each: -each.score)[: choice.top_k]
