"""Vectors that a client stored, of every type and in both ways to write them."""

import base64
from typing import Any

import numpy as np
import pytest

from maskdial.errors import ValidationError
from maskdial.masked.tasks.quantized import OutputDtype, quantized
from maskdial.masked.tasks.stored_vectors import MAX_NUMBERS, StoredVectors

DIMENSION = 12
RANDOM = np.random.default_rng(1).normal(size=(5, DIMENSION)).astype(np.float32)
VECTORS = RANDOM / np.linalg.norm(RANDOM, axis=1, keepdims=True)
SIGNS = np.where(VECTORS > 0, 1, -1) / np.sqrt(DIMENSION)


@pytest.mark.parametrize(
    ("dtype", "wanted", "off"),
    [
        ("float", VECTORS, 0),
        ("int8", VECTORS, 1 / 255),
        ("uint8", VECTORS, 1 / 255),
        ("binary", SIGNS, 1e-7),
        ("ubinary", SIGNS, 1e-7),
    ],
)
def test_both_ways_to_write_them_are_read(dtype: OutputDtype, wanted: Any, off: float) -> None:
    values = quantized(VECTORS, dtype)
    documents = [values.tolist(), base64.b64encode(values.tobytes()).decode(), values[:1].tolist()]
    stored = StoredVectors(documents, dtype)
    rows = stored.read(DIMENSION)
    assert {each.dtype for each in rows} == {values.dtype}, "no more memory than what was sent"
    first, second, third = (stored.restored(each, DIMENSION) for each in rows)
    assert first.dtype == np.float32
    np.testing.assert_allclose(first, wanted, atol=off + 1e-6 * bool(off))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first[:1], third)


def test_a_scale_is_what_a_step_is_worth() -> None:
    values = np.array([[-128, 0, 127] * 4], np.int8)
    stored = StoredVectors([values.tolist()], "int8", 0.5)
    (rows,) = stored.read(DIMENSION)
    np.testing.assert_array_equal(stored.restored(rows, DIMENSION), values * 0.5)


@pytest.mark.parametrize(
    ("document", "dtype", "words"),
    [
        ([], "float", "has no vectors"),
        ("", "float", "has 0 bytes; each vector has 12 numbers of the type float"),
        ("AAAA", "float", "has 3 bytes; each vector has 12 numbers of the type float"),
        ("no base64!", "int8", "must be base64, or a list of vectors"),
        ("ü", "int8", "must be base64, or a list of vectors"),
        ([[0.0] * 11], "float", "vector 0 has 11 numbers; each has 12"),
        ([[0] * 12, [0] * 13], "int8", "vector 1 has 13 numbers; each has 12"),
        ([[0] * 12], "ubinary", "vector 0 has 12 numbers; each has 2 numbers of the type ubinary"),
        ([[128] * 12], "int8", "has numbers that are no int8"),
        ([[-1] * 12], "uint8", "has numbers that are no uint8"),
        ([[0.5] * 12], "int8", "has numbers that are no int8"),
        ([[1e39] * 12], "float", "has numbers that are not finite"),
        ([[-3e38] * 12], "float", "not finite, or beyond 1e.09"),  # products would overflow
        (
            base64.b64encode(bytes(2 * (MAX_NUMBERS // 12 + 1))).decode(),
            "ubinary",
            "has 1,398,102 vectors; at most 1,398,101 are compared",
        ),
        (base64.b64encode(np.full(12, np.nan, "<f4").tobytes()).decode(), "float", "not finite"),
    ],
)
def test_what_is_refused(document: Any, dtype: OutputDtype, words: str) -> None:
    good = quantized(VECTORS, dtype).tolist()
    with pytest.raises(ValidationError, match=words) as caught:
        StoredVectors([good, document], dtype).read(DIMENSION)
    assert caught.value.field == "vectors.documents[1]"


def test_only_integers_have_a_scale() -> None:
    with pytest.raises(ValidationError, match="only int8 and uint8 have a scale"):
        StoredVectors([VECTORS.tolist()], "float", 1.0).read(DIMENSION)
