"""Integers of quantized GGUF tensors are, to the last bit, what the gguf package dequantizes."""

import gguf
import numpy as np
import pytest

from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.checkpoint.gguf.blocks import read_blocks
from maskdial_export.checkpoint.gguf.file import StoredTensor
from maskdial_export.checkpoint.gguf.types import TYPES, TensorType
from maskdial_export.quantize.stored import as_blocks

ROWS = 48
# type -> (bits, block size, whether there is a minimum)
FORMS = {
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q5_0": (5, 32, False),
    "Q5_1": (5, 32, True),
    "Q8_0": (8, 32, False),
    "Q2_K": (2, 16, True),
    "Q3_K": (3, 16, False),
    "Q4_K": (4, 32, True),
    "Q5_K": (5, 32, True),
    "Q6_K": (6, 16, False),
    "IQ4_NL": (8, 32, False),
    "IQ4_XS": (8, 32, False),
    "MXFP4": (5, 32, False),
}


def random_tensor(of: TensorType) -> StoredTensor:
    """Random bytes, so every code and scale; a few scales are infinite or no number."""
    random = np.random.default_rng(of.number)
    content = random.integers(0, 256, ROWS * 2 * of.num_bytes, np.uint8)
    return StoredTensor(
        "x", (ROWS, 2 * of.block_size), of, 0, len(content), memoryview(content.tobytes())
    )


def test_types_are_those_of_the_reference() -> None:
    for number, of in TYPES.items():
        reference = gguf.GGMLQuantizationType(number)
        assert of.name == reference.name
        assert (of.block_size, of.num_bytes) == gguf.GGML_QUANT_SIZES[reference]


@pytest.mark.parametrize("of", TYPES.values(), ids=lambda of: of.name)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_equal_to_the_last_bit(of: TensorType) -> None:
    tensor = random_tensor(of)
    blocks = read_blocks(tensor)
    if of.name not in FORMS:
        assert blocks is None
        return
    assert blocks is not None
    bits, block_size, has_minimum = FORMS[of.name]
    assert (blocks.bits, blocks.block_size) == (bits, block_size)
    assert (blocks.minimum is not None) == has_minimum
    assert blocks.scale.shape == (ROWS, tensor.shape[1] // block_size)
    expected = gguf.quants.dequantize(tensor.rows(), gguf.GGMLQuantizationType(of.number))
    found = blocks.dequantize()
    numbers = ~np.isnan(expected)
    assert numbers.mean() > 0.9
    np.testing.assert_array_equal(numbers, ~np.isnan(found))
    np.testing.assert_array_equal(found.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
    signed = blocks.values.dtype == np.int8
    assert blocks.values.max() < 2 ** (bits - signed)
    assert blocks.values.min() >= (-(2 ** (bits - 1)) if signed else 0)


def test_rows_are_taken_with_their_scales() -> None:
    blocks = read_blocks(random_tensor(TYPES[3]))
    assert isinstance(blocks, StoredBlocks)
    order = np.random.default_rng(0).permutation(ROWS)
    np.testing.assert_array_equal(blocks.take(order).dequantize(), blocks.dequantize()[order])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_bundles_hold_the_same_weights(name: str, minima: bool) -> None:
    """As integers of 8 bits, in the blocks and with the minima of layers that share a product."""
    stored = read_blocks(random_tensor(next(of for of in TYPES.values() if of.name == name)))
    assert stored is not None
    expected, has_minimum = stored.dequantize(), stored.minimum is not None
    for size in {stored.block_size, 16}:
        blocks = as_blocks(stored, 8, size, minima=minima or has_minimum)
        assert blocks.block_size == size
        assert (blocks.minimum is not None) == (minima or has_minimum)
        if blocks.minimum is None and stored.values.min() > -128:
            assert not (blocks.scale < 0).any()
        np.testing.assert_array_equal(blocks.weight().T, expected)
    if FORMS[name][:2] == (4, 32):
        nibbles = as_blocks(stored, 4, 32, minima=minima or has_minimum)
        assert nibbles.integers.max() <= 15
        np.testing.assert_array_equal(nibbles.weight().T, expected)
