"""Products with minima of blocks on ONNX Runtime's operators lose what the kernels lose."""

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest

from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.quantize.quantize import quantize
from maskdial_export.quantize.stored import as_blocks
from tests.export.test_export_quantize import INPUTS, Floats, one_product, run

BLOCK, OUTPUTS = 32, 48


def stored(bits: int, rng: np.random.Generator) -> StoredBlocks:
    """Integers from 0 on whose weights have a mean of about zero, as those of Q4_1 and Q5_1."""
    num_blocks = -(-INPUTS // BLOCK)
    shape = OUTPUTS, num_blocks
    values = rng.integers(0, 2**bits, (OUTPUTS, num_blocks * BLOCK)).astype(np.uint8)
    scale = rng.uniform(0.5, 2, shape).astype(np.float16).astype(np.float32)
    middle = (2**bits - 1) / 2
    minimum = scale * (middle + rng.normal(size=shape)).astype(np.float16).astype(np.float32)
    return StoredBlocks(values, scale, minimum, bits, BLOCK)


def rounded(rows: Floats) -> Floats:
    """Rows in blocks of 32 of 8 bits, as the kernels round them."""
    padded = np.pad(rows, [(0, 0), (0, -INPUTS % BLOCK)]).reshape(len(rows), -1, BLOCK)
    step = np.abs(padded).max(axis=2, keepdims=True) / 127
    result: Floats = (np.rint(padded / step) * step).reshape(len(rows), -1)[:, :INPUTS]
    return result


@pytest.mark.parametrize("bits", [4, 5])
def test_a_rounded_input_counts_by_its_weight(bits: int) -> None:
    rng = np.random.default_rng(bits)
    held: Literal[4, 8] = 4 if bits == 4 else 8
    blocks = replace(as_blocks(stored(bits, rng), held, BLOCK, minima=True), num_inputs=INPUTS)
    weight = blocks.weight()
    rows = rng.normal(size=(64, INPUTS)).astype(np.float32) + np.float32(0.3)
    model = quantize(one_product(weight), "int8", stored=lambda _, __: blocks)
    (found,) = run(model, rows)
    exact, kernels = rows @ weight, rounded(rows) @ weight
    loss = float(np.square(found - exact).sum())
    of_kernels = float(np.square(kernels - exact).sum())
    # Uncentered, a nibble's error is more than four times as large
    assert loss < 1.5 * of_kernels
    assert loss > 0.5 * of_kernels
