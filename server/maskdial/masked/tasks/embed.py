"""Embeddings: what happens to a text's vector after the graph, and how similar two of them are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import ValidationError, about
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks.logits import finite
from maskdial.masked.tasks.task import (
    REFUSE,
    Reading,
    TaskModel,
    TaskRequest,
    Truncation,
    masked_input,
    read_inputs,
    read_text,
    read_texts,
    tokenizing_seconds,
)
from maskdial.models.bundle import Embedding, Task
from maskdial.models.tokenizer import TextOrIds

_TINY = 1e-12  # a zero vector stays zero, as in torch.nn.functional.normalize


@dataclass(frozen=True, slots=True)
class EmbedRequest(TaskRequest[NDArray[np.float32]]):
    """Texts, or token ids, to turn into vectors.

    ``normalize``: scale to length 1; None: as the model was trained, and always with
    ``dimensions``, which keeps that many leading dimensions.
    """

    task: ClassVar[str] = "embed"
    head: ClassVar[Task] = "embed"

    texts: Sequence[TextOrIds]
    truncation: Truncation = REFUSE
    normalize: bool | None = None
    dimensions: int | None = None

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([text for text in self.texts if isinstance(text, str)])

    def check(self, model: TaskModel) -> None:
        embedding = _embedding(model)
        if self.dimensions is not None and not 1 <= self.dimensions <= embedding.dimension:
            raise ValidationError(
                f"must be between 1 and {embedding.dimension} (the model's), not {self.dimensions}",
                field="dimensions",
            )
        if self.normalize is False and embedding.normalized:
            raise ValidationError(
                "this model normalizes its vectors itself and has no others; leave it out",
                field="normalize",
            )

    def read(self, model: TaskModel) -> Reading[NDArray[np.float32]]:
        inputs, num_truncated = read_inputs(model, self.texts, self.truncation)
        embedding = _embedding(model)

        def answer(results: Sequence[MaskedResult]) -> NDArray[np.float32]:
            return embed(
                _vectors(results),
                embedding,
                normalize=self.normalize,
                dimensions=self.dimensions,
            )

        return Reading(inputs, answer, num_truncated)


@dataclass(frozen=True, slots=True)
class SimilarityRequest(TaskRequest[NDArray[np.float64]]):
    """A sentence, and those to compare it with."""

    task: ClassVar[str] = "similarity"
    head: ClassVar[Task] = "embed"

    source: str
    sentences: Sequence[str]
    truncation: Truncation = REFUSE

    @property
    def num_texts(self) -> int:
        return 1 + len(self.sentences)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([self.source, *self.sentences])

    def read(self, model: TaskModel) -> Reading[NDArray[np.float64]]:
        with about("source"):
            source, num_source = read_text(model, (self.source, None), self.truncation)
        pairs = [(sentence, None) for sentence in self.sentences]
        others, num_others = read_texts(model, pairs, self.truncation, field="sentences")

        def answer(results: Sequence[MaskedResult]) -> NDArray[np.float64]:
            first, rest = np.split(_vectors(results), [1])
            return cosine_similarities(first[0], rest)

        inputs = [masked_input(each) for each in (source, *others)]
        return Reading(inputs, answer, num_source + num_others)


def embed(
    vectors: NDArray[np.float32],
    embedding: Embedding,
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
) -> NDArray[np.float32]:
    """The vectors to return, float32 (num_texts, dimensions or the model's dimension).

    Args:
        vectors: float32 (num_texts, dimension), from the graph.
        embedding: what the graph has done to them.
        normalize: scale to length 1. None: as the graph does, and always after a cut.
        dimensions: keep that many leading dimensions, where a model trained with Matryoshka
            representation learning (arXiv:2205.13147) packs the most information.

    Raises:
        InferenceError: a vector has values that are not finite numbers.
    """
    finite(vectors, "embeddings")
    kept = vectors[:, :dimensions]
    if normalize is False or (normalize is None and dimensions is None):
        return kept
    if embedding.normalized and kept.shape == vectors.shape:
        return kept
    return (kept / _lengths(kept)[:, None]).astype(np.float32)


def cosine_similarities(
    source: NDArray[np.float32], others: NDArray[np.float32]
) -> NDArray[np.float64]:
    """The cosine of the angle between one vector and each of others, float64 (num_others,).

    Args:
        source: float32 (dimension,).
        others: float32 (num_others, dimension).

    Raises:
        InferenceError: a vector has values that are not finite numbers.
    """
    finite(source, "embeddings")
    # Sums row by row, not a matrix product, which is not batch-invariant.
    products = (finite(others, "embeddings") * source).sum(axis=1)
    cosines: NDArray[np.float64] = products / (_lengths(others) * _lengths(source[None]))
    return cosines.clip(-1.0, 1.0)


def _embedding(model: TaskModel) -> Embedding:
    embedding = model.manifest.embedding
    assert embedding is not None, "every bundle for this task has one"
    return embedding


def _vectors(results: Sequence[MaskedResult]) -> NDArray[np.float32]:
    return np.stack([result.logits for result in results])


def _lengths(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    squares = np.square(vectors.astype(np.float64)).sum(axis=1)
    lengths: NDArray[np.float64] = np.maximum(np.sqrt(squares), _TINY)
    return lengths
