"""MUVERA's encodings, against the paper's definition written out, and fastembed's numbers."""

import numpy as np
import pytest

from maskdial.errors import ValidationError
from maskdial.masked.tasks.muvera import Muvera

# fastembed 0.9.1: Muvera(4, k_sim=2, dim_proj=2, r_reps=1, random_seed=7) of VECTORS
VECTORS = np.array([[1, 0, 0, 0], [0.5, -1, 0.25, 2], [-1, 3, 0, 1]], np.float32)
DOCUMENT = [-2.12132, -3.535534, -2.12132, -3.535534, -2.12132, -3.535534, -0.795495, 0.088388]
QUERY = [-2.12132, -3.535534, 0.0, 0.0, 0.0, 0.0, -1.59099, 0.176777]


def test_the_numbers_are_fastembeds() -> None:
    settings = Muvera(k_sim=2, dim_proj=2, r_reps=1, random_seed=7)
    np.testing.assert_allclose(settings.encode(VECTORS, is_query=False), DOCUMENT, atol=1e-6)
    np.testing.assert_allclose(settings.encode(VECTORS, is_query=True), QUERY, atol=1e-6)


@pytest.mark.parametrize("num_planes", [0, 1, 4])
@pytest.mark.parametrize("num_tokens", [1, 3, 60])
def test_cells_are_those_of_the_paper(num_planes: int, num_tokens: int) -> None:
    """Without a projection, where the definition can be written out cell by cell."""
    dimension, repetitions, seed = 8, 3, 5
    drawn = np.random.default_rng(num_tokens).normal(size=(num_tokens, dimension))
    vectors = drawn.astype(np.float32)
    settings = Muvera(num_planes, dimension, repetitions, seed)
    settings.check(1, dimension)
    generator = np.random.default_rng(seed)
    queries, documents = [], []
    for _ in range(repetitions):
        planes = generator.normal(size=(dimension, num_planes)).T
        signs = [tuple(bool(plane @ vector > 0) for plane in planes) for vector in vectors]
        for number in range(2**num_planes):
            cell = tuple(bool(number >> bit & 1) for bit in range(num_planes))
            inside = [v for v, s in zip(vectors, signs, strict=True) if s == cell]
            queries.append(sum(inside, np.zeros(dimension)))
            if inside:
                documents.append(sum(inside) / len(inside))
                continue
            apart = [sum(a != b for a, b in zip(s, cell, strict=True)) for s in signs]
            nearest = [s for s, n in zip(signs, apart, strict=True) if n == min(apart)]
            lowest = min(nearest, key=lambda s: sum(bit << at for at, bit in enumerate(s)))
            documents.append(vectors[signs.index(lowest)])
    found = settings.encode(vectors, is_query=True)
    np.testing.assert_allclose(found, np.concatenate(queries), atol=1e-5)
    found = settings.encode(vectors, is_query=False)
    np.testing.assert_allclose(found, np.concatenate(documents), atol=1e-5)


def test_products_estimate_maxsim() -> None:
    generator = np.random.default_rng(0)
    query = generator.normal(size=(8, 32)).astype(np.float32)
    query /= np.linalg.norm(query, axis=1, keepdims=True)
    noise = generator.normal(size=(6, 8, 32)).astype(np.float32)
    texts = [
        query + step * each
        for step, each in zip((0.0, 0.1, 0.3, 0.6, 1.0, 3.0), noise, strict=True)
    ]
    texts = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in texts]
    exact = [float((query @ each.T).max(axis=1).sum()) for each in texts]
    for final in (None, 2048):
        settings = Muvera(final_dimension=final)
        encoded = settings.encode(query, is_query=True)
        assert len(encoded) == (final or 20 * 32 * 16)
        found = [float(encoded @ settings.encode(each, is_query=False)) for each in texts]
        assert np.corrcoef(found, exact)[0, 1] > 0.9


def test_a_text_without_vectors_is_zeros() -> None:
    nothing = np.zeros((0, 16), np.float32)
    for is_query in (True, False):
        assert not Muvera().encode(nothing, is_query=is_query).any()


@pytest.mark.parametrize(
    ("settings", "num_texts", "words"),
    [
        (Muvera(final_dimension=2**30), 1, "must be at most 10,240"),
        (Muvera(dim_proj=17), 1, "must be at most 16, as the model's vectors have, not 17"),
        (Muvera(k_sim=10, r_reps=5), 1, r"is 81,920; it must be at most 65,536"),
        (Muvera(final_dimension=10_241), 1, "must be at most 10,240"),
        (Muvera(), 410, "at most 409 texts may have so large encodings"),
    ],
)
def test_what_is_refused(settings: Muvera, num_texts: int, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        settings.check(num_texts, 16)


def test_projections_that_take_much_memory_are_refused() -> None:
    """0.5 GB for these, and as much for each of the last few seeds."""
    settings = Muvera(k_sim=0, dim_proj=655, r_reps=100)
    with pytest.raises(ValidationError, match="for vectors of 1,024 dimensions; it must be at mo"):
        settings.check(1, 1024)
    Muvera().check(1, 1024)


def test_drawing_many_projections_is_no_short_work() -> None:
    """What takes so long must not hold the event loop: most of it is spent before any text."""
    few = Muvera(k_sim=0, dim_proj=1, r_reps=1).seconds([4], 1024)
    assert Muvera(k_sim=0, dim_proj=40, r_reps=100).seconds([4], 1024) > 0.1 > 0.001 > few
