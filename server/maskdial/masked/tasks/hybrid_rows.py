"""The rows of a hybrid graph: dense vector, sparse weights and token vectors from one pass.

A row is a token's: what is the dense vector of its text if it is the first token, then its own
vector, then its weight (BGE-M3, arXiv:2402.03216; the arithmetic is FlagEmbedding's).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Embedding
from maskdial.masked.request import MaskedInput
from maskdial.masked.tasks.logits import finite


def first_row(inputs: Sequence[MaskedInput], embedding: Embedding) -> Sequence[MaskedInput]:
    """Inputs whose dense vectors are wanted; those of other models as they are."""
    if embedding.hybrid is None:
        return inputs
    return [replace(each, rows=(0,)) for each in inputs]


def all_rows(inputs: Sequence[MaskedInput]) -> Sequence[MaskedInput]:
    """Inputs whose tokens' weights or vectors are wanted."""
    return [replace(each, rows=tuple(range(each.length))) for each in inputs]


def dense_vector(rows: NDArray[np.float32], embedding: Embedding) -> NDArray[np.float32]:
    """The vector of a text, float32 (dimension,)."""
    return rows if embedding.hybrid is None else rows[0, : embedding.dimension]


def token_vectors(rows: NDArray[np.float32], embedding: Embedding) -> NDArray[np.float32]:
    """The vectors of all tokens but the first one, float32 (length - 1, token_dimension).

    Raises:
        InferenceError: a value is not a finite number.
    """
    vectors = rows[1:, embedding.dimension : -1]
    finite(vectors, "embeddings")
    return vectors


def token_weights(
    rows: NDArray[np.float32], ids: Sequence[int], embedding: Embedding
) -> dict[int, float]:
    """The largest weight above 0 of each token of a text, by its id, ascending.

    Raises:
        InferenceError: a value is not a finite number.
    """
    assert embedding.hybrid is not None, "of a hybrid model"
    found: dict[int, float] = {}
    weights = finite(rows[:, -1], "embeddings").tolist()
    unweighted = frozenset(embedding.hybrid.unweighted)
    for token, weight in zip(ids, weights, strict=True):
        if weight > max(found.get(token, 0.0), 0.0) and token not in unweighted:
            found[token] = weight
    return dict(sorted(found.items()))
