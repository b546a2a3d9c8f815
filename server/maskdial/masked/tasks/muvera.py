"""MUVERA: one vector of a fixed size for the vectors of a text's tokens.

Dhulipala, Hadian, Jayaram, Lee and Mirrokni 2024, "MUVERA: Multi-Vector Retrieval via Fixed
Dimensional Encodings" (arXiv 2405.19504): the product of a query's and a document's encoding
estimates their MaxSim. Parameters and random numbers are those of fastembed's ``Muvera``, so that
either encodes what the other has indexed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import ValidationError

Floats = NDArray[np.float32]

MAX_SIZE = 65_536
"""Numbers of an encoding, before the final projection."""
MAX_NUMBERS = 2**22
"""Of all encodings of a request, and of all projections: those are kept, in float64."""


@dataclass(frozen=True, slots=True)
class Muvera:
    """How vectors are encoded: alike for queries and documents that are to be compared.

    Attributes:
        k_sim: planes that part the space, into 2 ** k_sim cells.
        dim_proj: dimensions of a cell's vector.
        r_reps: repetitions, each with other planes.
        random_seed: of planes and projections.
        final_dimension: numbers of the encoding after a last projection; None: there is none.
    """

    k_sim: int = 5
    dim_proj: int = 16
    r_reps: int = 20
    random_seed: int = 42
    final_dimension: int | None = None

    def check(self, num_texts: int, dimension: int) -> None:
        """Whether vectors of so many texts, and dimensions, can be encoded.

        Raises:
            ValidationError: they cannot.
        """
        if self.dim_proj > dimension:
            raise ValidationError(
                f"must be at most {dimension}, as the model's vectors have, not {self.dim_proj}",
                field="muvera.dim_proj",
            )
        size = self._size
        if size > MAX_SIZE:
            raise ValidationError(
                f"r_reps * 2 ** k_sim * dim_proj is {size:,}; it must be at most {MAX_SIZE:,}",
                field="muvera",
            )
        if self.final_dimension is not None and self.final_dimension > size:
            raise ValidationError(
                f"must be at most {size:,}, r_reps * 2 ** k_sim * dim_proj",
                field="muvera.final_dimension",
            )
        num_random = self.r_reps * self.dim_proj * dimension
        if num_random > MAX_NUMBERS:
            raise ValidationError(
                f"r_reps * dim_proj is too much for vectors of {dimension:,} dimensions; it must "
                f"be at most {MAX_NUMBERS // dimension:,}",
                field="muvera",
            )
        most = MAX_NUMBERS // (self.final_dimension or size)
        if num_texts > most:
            raise ValidationError(
                f"at most {most:,} texts may have so large encodings; send fewer",
                field="muvera",
            )

    def seconds(self, sizes: Sequence[int], dimension: int) -> float:
        """Estimate of how long texts of so many tokens take, and the random numbers for them."""
        cells = self.r_reps * (1 << self.k_sim)
        products = self.r_reps * sum(sizes) * dimension * (self.k_sim + 1)
        per_text = cells * dimension * 2 + self._size
        num_random = self.r_reps * self.dim_proj * dimension
        return (products + len(sizes) * per_text) * 2e-9 + num_random * 40e-9

    def encode(self, vectors: Floats, *, is_query: bool) -> Floats:
        """The encoding of a text.

        A query's cell has the sum of the vectors in it, a document's their mean; an empty cell of a
        document the first vector of the occupied cell that fewest planes lie between.

        Args:
            vectors: float32 (num_tokens, dimension).
            is_query: what the text is.

        Returns:
            float32 (r_reps * 2 ** k_sim * dim_proj,), or (final_dimension,); zeros of a text
            without vectors.
        """
        planes, projections, (places, signs) = _random(self, vectors.shape[1])
        encoded: NDArray[Any] = np.zeros(self._size)
        if len(vectors):
            parts = [
                _cells(vectors, plane, is_query=is_query) @ projection
                for plane, projection in zip(planes, projections, strict=True)
            ]
            encoded = np.concatenate(parts, axis=None)
        if self.final_dimension is not None:
            encoded = np.bincount(places, encoded * signs, self.final_dimension)
        return encoded.astype(np.float32)

    @property
    def _size(self) -> int:
        return self.r_reps * (1 << self.k_sim) * self.dim_proj


@lru_cache(maxsize=8)
def _random(settings: Muvera, dimension: int) -> Any:
    """Planes, (r_reps, dimension, k_sim), projections, (r_reps, dimension, dim_proj), and the place
    and sign of each number in the final projection, a count sketch.
    """
    generator = np.random.default_rng(settings.random_seed)
    size = (dimension, settings.k_sim)
    planes = [generator.normal(size=size) for _ in range(settings.r_reps)]
    to = settings.dim_proj
    signs = generator.choice([-1, 1], size=(settings.r_reps, dimension, to))
    same = np.broadcast_to(np.eye(dimension), (settings.r_reps, dimension, dimension))
    projections = signs / np.sqrt(to) if to < dimension else same
    if settings.final_dimension is None:
        return planes, projections, (None, None)
    count = settings.r_reps * (1 << settings.k_sim) * to
    places = generator.integers(settings.final_dimension, size=count)
    return planes, projections, (places, generator.choice([-1, 1], size=count))


def _cells(vectors: Floats, plane: NDArray[np.float64], *, is_query: bool) -> NDArray[np.float64]:
    """A vector for each cell, (2 ** k_sim, dimension)."""
    num_planes = plane.shape[1]
    cells = (vectors @ plane > 0) @ (1 << np.arange(num_planes))
    found = np.zeros((1 << num_planes, vectors.shape[1]))
    np.add.at(found, cells, vectors)
    if is_query:
        return found
    counts = np.bincount(cells, minlength=len(found))
    occupied, empty = np.flatnonzero(counts), np.flatnonzero(counts == 0)
    found[occupied] /= counts[occupied, None]
    bits = np.arange(len(found))[:, None] >> np.arange(num_planes) & 1
    apart = bits[empty] @ (1 - bits[occupied]).T + (1 - bits[empty]) @ bits[occupied].T
    _, firsts = np.unique(cells, return_index=True)
    found[empty] = vectors[firsts[apart.argmin(axis=1)]]
    return found
