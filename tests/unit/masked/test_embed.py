"""Vectors after the graph: normalized, cut, compared."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maskdial.bundle.manifest import Embedding
from maskdial.errors import InferenceError, ValidationError
from maskdial.masked.tasks.embed import EmbedRequest, cosine_similarities, embed
from maskdial.masked.tasks.quantized import OutputDtype, quantized

RAW = Embedding(dimension=4, pooling="mean", normalized=False)
UNIT = Embedding(dimension=4, pooling="mean", normalized=True)
VECTORS = np.array([[3, 4, 0, 0], [1, -1, 1, -1]], np.float32)
NORMALIZED = (VECTORS / np.array([[5], [2]])).astype(np.float32)


QWEN = "Instruct: Find passages\nQuery:"


def model(embedding: Embedding) -> Any:
    return SimpleNamespace(name="m", manifest=SimpleNamespace(embedding=embedding))


def prompted(default: str | None = None, **prompts: str) -> Any:
    return model(RAW.model_copy(update={"prompts": prompts, "default_prompt": default}))


def test_an_instruction_takes_the_place_of_the_prompts_own() -> None:
    several = prompted(query=QWEN, document="", other="search: ")
    request = EmbedRequest(["a"], instruction="Find code")
    assert request.prompt(several) == "Instruct: Find code\nQuery:"
    named = EmbedRequest(["a"], prompt_name="query", instruction="Find\n code")
    assert named.prompt(several) == "Instruct: Find\n code\nQuery:"
    assert EmbedRequest(["a"]).prompt(several) == ""
    assert EmbedRequest(["a"]).prompt(prompted("query", query=QWEN)) == QWEN
    spaced = prompted("q", q="Instruct: x\nQuery: ", other=QWEN)
    assert request.prompt(spaced) == "Instruct: Find code\nQuery: "


@pytest.mark.parametrize(
    ("prompts", "default", "named"),
    [
        ({}, None, None),
        ({"query": "search: "}, None, None),
        ({"query": "search: ", "task": QWEN}, "query", None),
        ({"query": "search: ", "task": QWEN}, None, "query"),
        ({"one": QWEN, "two": QWEN}, None, None),
    ],
)
def test_a_prompt_without_an_instruction_takes_none(
    prompts: dict[str, str], default: str | None, named: str | None
) -> None:
    request = EmbedRequest(["a"], prompt_name=named, instruction="Find code")
    with pytest.raises(ValidationError, match="takes an instruction in prompts like") as caught:
        request.check(prompted(default, **prompts))
    assert caught.value.field == "instruction"


@pytest.mark.parametrize(("vectors", "embedding"), [(VECTORS, RAW), (NORMALIZED, UNIT)])
def test_vectors_are_the_graphs_own_when_nothing_is_asked(
    vectors: np.ndarray, embedding: Embedding
) -> None:
    np.testing.assert_array_equal(embed(vectors, embedding), vectors)


def test_normalized_when_asked() -> None:
    np.testing.assert_array_equal(embed(VECTORS, RAW, normalize=True), NORMALIZED)
    np.testing.assert_array_equal(embed(VECTORS, RAW, normalize=False), VECTORS)
    # What the graph has normalized keeps its bits
    np.testing.assert_array_equal(embed(NORMALIZED, UNIT, normalize=True), NORMALIZED)


@pytest.mark.parametrize(("vectors", "embedding"), [(VECTORS, RAW), (NORMALIZED, UNIT)])
@pytest.mark.parametrize("normalize", [None, True])
def test_a_cut_is_normalized_again(
    vectors: np.ndarray, embedding: Embedding, normalize: bool | None
) -> None:
    cut = embed(vectors, embedding, normalize=normalize, dimensions=2)
    assert cut.dtype == np.float32
    np.testing.assert_allclose(cut, [[0.6, 0.8], [0.5**0.5, -(0.5**0.5)]], atol=1e-7)


def test_a_cut_that_is_not_to_be_normalized() -> None:
    cut = embed(VECTORS, RAW, normalize=False, dimensions=3)
    np.testing.assert_array_equal(cut, VECTORS[:, :3])


def test_all_dimensions_are_no_cut() -> None:
    np.testing.assert_array_equal(embed(NORMALIZED, UNIT, dimensions=4), NORMALIZED)


def test_zeros_stay_zeros() -> None:
    zeros = np.zeros((1, 4), np.float32)
    np.testing.assert_array_equal(embed(zeros, RAW, normalize=True), zeros)
    np.testing.assert_array_equal(cosine_similarities(zeros[0], VECTORS), [0, 0])


@pytest.mark.parametrize("dimensions", [0, 5])
def test_dimensions_out_of_range(dimensions: int) -> None:
    with pytest.raises(ValidationError, match="between 1 and 4") as caught:
        EmbedRequest(["a"], dimensions=dimensions).check(model(RAW))
    assert caught.value.field == "dimensions"


def test_a_graph_that_normalizes_has_no_other_vectors() -> None:
    request = EmbedRequest(["a"], normalize=False, dimensions=2)
    request.check(model(RAW))
    with pytest.raises(ValidationError, match="normalizes") as caught:
        request.check(model(UNIT))
    assert caught.value.field == "normalize"


def test_vectors_that_are_no_numbers_are_an_error() -> None:
    bad = np.array([[1, np.nan, 0, 0]], np.float32)
    with pytest.raises(InferenceError):
        embed(bad, RAW)
    with pytest.raises(InferenceError):
        cosine_similarities(bad[0], VECTORS)
    with pytest.raises(InferenceError):
        cosine_similarities(VECTORS[0], bad)


def test_cosines() -> None:
    source = np.array([2, 0, 0, 0], np.float32)
    others = np.array([[5, 0, 0, 0], [0, 1, 0, 0], [-1, 0, 0, 0], [1, 1, 0, 0]], np.float32)
    np.testing.assert_allclose(cosine_similarities(source, others), [1, 0, -1, 0.5**0.5])


@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_a_cosine_ignores_its_company_and_keeps_within_bounds(seed: int, count: int) -> None:
    generator = np.random.default_rng(seed)
    source, *others = generator.standard_normal((1 + count, 48)).astype(np.float32)
    vectors = np.stack([*others, source, -source])
    together = cosine_similarities(source, vectors)
    assert np.abs(together).max() <= 1
    alone = [cosine_similarities(source, vector[None])[0] for vector in vectors]
    np.testing.assert_array_equal(together, alone)


EDGES = np.array([[-1, -0.5, 0, 0.5, 1, 2**-24, -(2**-24), 1.0000001, -1.0000001]], np.float32)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("int8", [-128, -65, -1, 63, 126, -1, -1, 126, -128]),
        ("uint8", [0, 63, 127, 191, 254, 127, 127, 254, 0]),
        ("ubinary", [0b00011101, 0b00000000]),
        ("binary", [0b00011101 - 128, -128]),
    ],
)
def test_bytes_and_bits_at_the_edges(dtype: OutputDtype, expected: list[int]) -> None:
    values = quantized(EDGES, dtype)
    assert values.dtype == (np.uint8 if dtype.startswith("u") else np.int8)
    assert values.tolist() == [expected]


def test_integers_are_of_normalized_vectors() -> None:
    request = EmbedRequest(["a"], dtypes=("float", "int8"))
    request.check(model(RAW))
    with pytest.raises(ValidationError, match="length 1") as caught:
        EmbedRequest(["a"], normalize=False, dtypes=("float", "uint8")).check(model(RAW))
    assert caught.value.field == "normalize"
    EmbedRequest(["a"], normalize=False, dtypes=("binary",)).check(model(RAW))
