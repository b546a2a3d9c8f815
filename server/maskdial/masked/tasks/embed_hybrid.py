"""Several kinds of vectors of a text from one pass: dense, sparse, and one for each token."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import TaskName
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.masked.tasks.embed import PromptedRequest, SparseVector, sparse_vector
from maskdial.masked.tasks.hybrid_rows import (
    all_rows,
    dense_vector,
    first_row,
    token_vectors,
    token_weights,
)
from maskdial.masked.tasks.logits import finite
from maskdial.masked.tasks.task import Reading, TaskModel

VectorKind = Literal["dense", "sparse", "multi_vector"]

_SECONDS_PER_TOKEN = 1e-6


@dataclass(frozen=True, slots=True)
class HybridVectors:
    """The vectors of a text; None for kinds that were not wanted.

    ``dense`` is float32 (dimension,), ``multi_vector`` float32 (num_tokens - 1, token_dimension).
    """

    dense: NDArray[np.float32] | None
    sparse: SparseVector | None
    multi_vector: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class HybridEmbedRequest(PromptedRequest[list[HybridVectors]]):
    """Texts, and the kinds of vectors that are wanted of them."""

    task: ClassVar[str] = "embed-hybrid"
    head: ClassVar[TaskName] = "embed-hybrid"

    kinds: Collection[VectorKind] = ("dense", "sparse", "multi_vector")

    def read(self, model: TaskModel) -> Reading[list[HybridVectors]]:
        embedding = model.manifest.embedding
        assert embedding is not None, "every bundle for this task has one"
        read, num_truncated = self.read_prompted(model)
        only_dense = set(self.kinds) == {"dense"}
        inputs = first_row(read, embedding) if only_dense else all_rows(read)

        def vectors(given: MaskedInput, result: MaskedResult) -> HybridVectors:
            rows, kinds = result.logits, self.kinds
            finite(rows, "embeddings")
            return HybridVectors(
                dense_vector(rows, embedding) if "dense" in kinds else None,
                sparse_vector(token_weights(rows, given.input_ids, embedding))
                if "sparse" in kinds
                else None,
                token_vectors(rows, embedding) if "multi_vector" in kinds else None,
            )

        def answer(results: Sequence[MaskedResult]) -> list[HybridVectors]:
            return [vectors(*each) for each in zip(inputs, results, strict=True)]

        seconds = sum(len(each.rows) for each in inputs) * _SECONDS_PER_TOKEN
        return Reading(inputs, answer, num_truncated, seconds)
