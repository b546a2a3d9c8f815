"""Reranking: documents in the order in which a model finds that they answer a query.

The model is a cross-encoder, a causal language model that reads both in a template, or one that
reads each alone and compares their tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.errors import ValidationError
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks.late_interaction import SECONDS_PER_PRODUCT, max_sim, read_interaction
from maskdial.masked.tasks.logits import finite, sigmoid
from maskdial.masked.tasks.pairs import SECONDS_PER_PAIR, read_pairs
from maskdial.masked.tasks.stored_vectors import StoredVectors
from maskdial.masked.tasks.task import REFUSE, Reading, TaskModel, TaskRequest, Truncation
from maskdial.masked.tasks.template import SECONDS_PER_TEMPLATE, read_in_template
from maskdial.masked.tasks.token_pooling import check_sizes, pool_tokens, pooling_of


@dataclass(frozen=True, slots=True)
class Rank:
    """A document by its index in the request, and its score."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class RerankRequest(TaskRequest[list[Rank]]):
    """A query, and documents to put in order.

    ``vectors``: documents as the vectors of their tokens, which the client stored, in place of
    texts. ``instruction``: what the model shall look for, in place of its template's own.
    ``top_n``: how many of the best are wanted; None: all.
    """

    task: ClassVar[str] = "rerank"
    head: ClassVar[TaskName] = "classify"

    query: str
    texts: Sequence[str] = ()
    truncation: Truncation = REFUSE
    raw_scores: bool = False
    instruction: str | None = None
    top_n: int | None = None
    vectors: StoredVectors | None = None

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        is_cross_encoder = manifest.task == cls.head and len(manifest.labels) == 1
        return is_cross_encoder or manifest.task in ("rerank", "embed-all")

    @property
    def num_texts(self) -> int:
        return len(self.texts if self.vectors is None else self.vectors.documents)

    @property
    def read_seconds(self) -> float:
        if self.vectors is not None:
            return tokenizing_seconds([self.query]) + self.vectors.seconds
        per_pair = SECONDS_PER_PAIR + SECONDS_PER_TEMPLATE + tokenizing_seconds([self.query])
        return tokenizing_seconds(self.texts) + len(self.texts) * per_pair

    def check(self, model: TaskModel) -> None:
        if self.vectors is not None and model.manifest.task != "embed-all":
            raise ValidationError(
                f"model {model.name!r} makes no vectors of tokens to compare them with; send texts",
                field="vectors",
            )
        template = model.manifest.pair_template
        if self.instruction is not None and (template is None or template.instruction is None):
            raise ValidationError(
                f"model {model.name!r} has no place for an instruction in what it reads; leave it "
                "out",
                field="instruction",
            )

    def read(self, model: TaskModel) -> Reading[list[Rank]]:
        if model.manifest.task == "embed-all":
            return self._read_apart(model)
        template = model.manifest.pair_template
        if template is not None:
            template = template.instructed(self.instruction)
            inputs, num_truncated = read_in_template(
                model, template, self.query, self.texts, self.truncation, error=_pair_error
            )
        else:
            inputs, num_truncated = read_pairs(
                model,
                [self.query],
                self.texts,
                self.truncation,
                strategy="longest_first",
                error=_pair_error,
            )

        def answer(results: Sequence[MaskedResult]) -> list[Rank]:
            logits = [result.logits for result in results]
            return rerank(logits, raw_scores=self.raw_scores)[: self.top_n]

        return Reading(inputs, answer, num_truncated)

    def _read_apart(self, model: TaskModel) -> Reading[list[Rank]]:
        inputs, num_truncated = read_interaction(model, self.query, self.texts, self.truncation)
        embedding = model.manifest.embedding
        assert embedding is not None, "every bundle for this task has one"
        of_query, of_texts = (pooling_of(embedding, is_query=each) for each in (True, False))
        sizes = [len(each.rows) for each in inputs[1:]]
        vectors, dimension = self.vectors, embedding.dimension
        stored = [] if vectors is None else vectors.read(dimension)

        def answer(results: Sequence[MaskedResult]) -> list[Rank]:
            query, *documents = (result.logits for result in results)
            query = pool_tokens(query, of_query)
            if vectors is None:
                scores = max_sim(query, [pool_tokens(each, of_texts) for each in documents])
            else:
                scores = max_sim(query, (vectors.restored(each, dimension) for each in stored))
            return rank(scores)[: self.top_n]

        num_pairs = len(inputs[0].rows) * (sum(sizes) + sum(map(len, stored)))
        seconds = num_pairs * dimension * SECONDS_PER_PRODUCT
        seconds += check_sizes(sizes, of_texts)
        return Reading(inputs, answer, num_truncated, seconds)


def rerank(logits: Sequence[NDArray[np.float32]], *, raw_scores: bool) -> list[Rank]:
    """The documents with their scores, best first; ties in the order sent.

    Documents are ordered by their logits, also where the sigmoids of those are equal.

    Args:
        logits: (1,) float32 for each document.
        raw_scores: the score is the logit, not its sigmoid.

    Raises:
        InferenceError: a logit is not a finite number.
    """
    values = finite(np.concatenate(logits))
    return rank(values, values if raw_scores else sigmoid(values))


def rank(values: NDArray[Any], scores: NDArray[Any] | None = None) -> list[Rank]:
    """The indices of values, float (num_texts,), largest first, with their scores.

    ``scores`` default to the values.
    """
    shown = values if scores is None else scores
    order = np.argsort(-values, kind="stable")
    return [Rank(int(index), float(shown[index])) for index in order]


def _pair_error(_: int, text: int, reason: str) -> ValidationError:
    return ValidationError(f"the query and the text {reason}", field="texts", index=text)
