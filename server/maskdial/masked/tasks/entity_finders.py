"""How models read a request for entities: as GLiNER's prompt, or as GLiNER2's schema."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Entities
from maskdial.errors import ValidationError
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks.entity_prompt import LabelPrompt
from maskdial.masked.tasks.entity_spans import (
    Candidates,
    prompt_span_scores,
    span_candidates,
    span_scores,
    token_candidates,
    token_probabilities,
)
from maskdial.masked.tasks.extraction_prompt import SchemaPrompt
from maskdial.masked.tasks.extraction_schema import Field, Schema
from maskdial.masked.tasks.extraction_scores import Findings
from maskdial.masked.tasks.schema_scorer import make_scorer
from maskdial.masked.tasks.task import TaskModel
from maskdial.masked.tasks.text_words import TextWords, WordWindow

Floats = NDArray[np.float32]
_NO_LIMIT = 2**31


class EntityFinder(Protocol):
    """What differs between the kinds.

    Attributes:
        ids: the tokens before a text.
        rows: those whose vectors stand for the labels.
        after: the tokens after a text.
        max_words: of a text that the model reads at once.
        max_width: of an entity, in words.
        subtoken_is_last: whether a word's vector is that of its last token.
        num_labels: rows of labels that are paired with words in the graph.
        reduce: what makes of a window's rows what is kept of them, if anything.
    """

    ids: tuple[int, ...]
    rows: tuple[int, ...]
    after: tuple[int, ...]
    max_words: int
    max_width: int
    subtoken_is_last: bool
    num_labels: int
    reduce: Callable[[Floats], Floats] | None

    def read(self, text: str, max_words: int) -> TextWords: ...
    def candidates(
        self, plan: Sequence[WordWindow], results: Sequence[MaskedResult], threshold: float
    ) -> Candidates: ...


class GlinerFinder:
    """Labels before the text, or vectors of them from an encoder of their own."""

    def __init__(
        self,
        labels: Sequence[str],
        vectors: Floats | None,
        entities: Entities,
        model: TaskModel,
    ) -> None:
        self._tokenizer = model.tokenizer
        self._of_spans = entities.scores == "span"
        self._count = len(labels)
        prompt = LabelPrompt.read(labels, entities, model.tokenizer, model.manifest.max_length)
        self.ids, self.rows = prompt.ids, prompt.rows
        self.after = tuple(model.tokenizer.ends()[1])
        self.max_words, self.max_width = entities.max_words, entities.max_width
        self.subtoken_is_last = entities.subtoken == "last"
        self.num_labels = len(prompt.rows)
        # A word has thousands of columns
        self.reduce: Callable[[Floats], Floats] | None = None
        if self._of_spans and vectors is not None:
            self.reduce = partial(span_scores, labels=vectors, max_width=entities.max_width)
        elif self._of_spans:
            self.reduce = partial(
                prompt_span_scores, num_labels=len(labels), max_width=entities.max_width
            )

    def read(self, text: str, max_words: int) -> TextWords:
        """A text's words."""
        return TextWords.read(text, self._tokenizer, max_words)

    def candidates(
        self, plan: Sequence[WordWindow], results: Sequence[MaskedResult], threshold: float
    ) -> Candidates:
        """What may be an entity, from the results of a text's windows."""
        pairs = zip(plan, results, strict=True)
        if self._of_spans:
            return Candidates.join(
                [span_candidates(result.logits, window, threshold) for window, result in pairs]
            )
        scores = []
        for window, result in pairs:
            own = slice(window.own.start - window.words.start, window.own.stop - window.words.start)
            scores.append(token_probabilities(result.logits, self._count)[own])
        return token_candidates(np.concatenate(scores), threshold)


class SchemaFinder:
    """A schema of entities before the text."""

    after: tuple[int, ...] = ()
    max_words = _NO_LIMIT
    subtoken_is_last = False
    num_labels = 0

    def __init__(
        self, labels: Sequence[str], threshold: float, model: TaskModel, *, flat: bool
    ) -> None:
        extraction = model.manifest.extraction
        assert extraction is not None, "a model without it has no schema"
        self._tokenizer = model.tokenizer
        schema = Schema(entities=tuple(map(Field, labels)))
        try:
            prompt = SchemaPrompt.read(schema, model.tokenizer)
            prompt.check(model, f"the {len(labels):,} labels take")
        except ValidationError as error:
            raise ValidationError(error.message, field="candidate_labels") from error
        self.ids, self.rows = prompt.ids, prompt.rows
        self.max_width = extraction.max_width
        self.reduce: Callable[[Floats], Floats] | None = make_scorer(
            prompt, [[threshold] * len(labels)], model, flat=flat
        )

    def read(self, text: str, max_words: int) -> TextWords:
        """A text's words; the full stop that gliner2 adds is the last one."""
        return TextWords.read_sentence(text, self._tokenizer, max_words)

    def candidates(
        self, plan: Sequence[WordWindow], results: Sequence[MaskedResult], _threshold: float
    ) -> Candidates:
        """What may be an entity; the thresholds were applied before."""
        parts = []
        for window, result in zip(plan, results, strict=True):
            found = Findings.of(result.logits)
            starts, ends = found.start + window.words.start, found.end + window.words.start
            middles = starts + (ends - starts) // 2
            owned = (middles >= window.own.start) & (middles < window.own.stop)
            parts.append(Candidates(starts, ends, found.name, found.score).where(owned))
        return Candidates.join(parts)
