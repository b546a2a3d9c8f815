"""Embeddings: what is done with a text's vector after the graph, and how alike two of them are."""

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import InferenceError, ValidationError
from maskdial.models.bundle import Embedding

_TINY = 1e-12  # a vector of zeros stays one, as in torch.nn.functional.normalize


def check_embedding(
    embedding: Embedding, *, normalize: bool | None = None, dimensions: int | None = None
) -> None:
    """Checks what is asked of vectors against the model.

    Raises:
        ValidationError: more dimensions than the model has, or vectors that are not normalized from
            a graph that normalizes.
    """
    if dimensions is not None and not 1 <= dimensions <= embedding.dimension:
        raise ValidationError(
            f"`dimensions` must be between 1 and {embedding.dimension} (the model's), not "
            f"{dimensions}"
        )
    if normalize is False and embedding.normalized:
        raise ValidationError(
            "`normalize`: this model's last module normalizes, so it has no other vectors; leave "
            "it out"
        )


def embed(
    vectors: NDArray[np.float32],
    embedding: Embedding,
    *,
    normalize: bool | None = None,
    dimensions: int | None = None,
) -> NDArray[np.float32]:
    """The vectors that are returned, float32 (num_texts, dimensions or the model's dimension).

    Args:
        vectors: float32 (num_texts, dimension), from the graph.
        embedding: what the graph has done.
        normalize: to length 1. When None, as the graph does, and always after a cut.
        dimensions: keep the first so many, which a model trained for it (Matryoshka representation
            learning, arXiv:2205.13147) packs the most into.

    Raises:
        ValidationError: as `check_embedding` says.
        InferenceError: the vectors are not numbers.
    """
    check_embedding(embedding, normalize=normalize, dimensions=dimensions)
    _check_finite(vectors)
    kept = vectors[:, :dimensions]
    if normalize is False or (normalize is None and dimensions is None):
        return kept
    if embedding.normalized and kept.shape == vectors.shape:
        return kept
    return (kept / _lengths(kept)[:, None]).astype(np.float32)


def cosine_similarities(
    source: NDArray[np.float32], others: NDArray[np.float32]
) -> NDArray[np.float64]:
    """The cosine of the angles between one vector and others, float64 (num_others,).

    Args:
        source: float32 (dimension,).
        others: float32 (num_others, dimension).

    Raises:
        InferenceError: the vectors are not numbers.
    """
    _check_finite(source)
    _check_finite(others)
    # Sums row by row, and not a product of matrices: a text's score ignores its company.
    products = (others.astype(np.float64) * source).sum(axis=1)
    cosines: NDArray[np.float64] = products / (_lengths(others) * _lengths(source[None]))
    return cosines.clip(-1.0, 1.0)


def _lengths(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    squares = np.square(vectors.astype(np.float64)).sum(axis=1)
    lengths: NDArray[np.float64] = np.maximum(np.sqrt(squares), _TINY)
    return lengths


def _check_finite(vectors: NDArray[np.float32]) -> None:
    if not np.isfinite(vectors).all():
        raise InferenceError("the model's embedding of a text has values that are not numbers")
