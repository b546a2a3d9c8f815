"""Weights in 4-bit blocks: what searching scales and GPTQ gain, and what the integers mean."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from maskdial_export.quantize.blocks import Blocks
from maskdial_export.quantize.int4 import INT4, to_blocks
from maskdial_export.quantize.quantize import quantize
from tests.export.test_export_quantize import one_product

Floats = NDArray[np.float32]
KIND = INT4["int4"]
INPUTS, OUTPUTS = 200, 48  # inputs are no multiple of a block


def correlated(rng: np.random.Generator, num_rows: int) -> Floats:
    """Rows whose columns depend on each other and differ in size, as those of a model do."""
    mixing = np.random.default_rng(1).standard_normal((40, INPUTS), np.float32)
    sizes = np.logspace(-1, 1, INPUTS, dtype=np.float32)
    hidden = rng.standard_normal((num_rows, 40), np.float32)
    noise = rng.standard_normal((num_rows, INPUTS), np.float32)
    rows: Floats = (hidden @ mixing / np.float32(6) + noise * np.float32(0.3)) * sizes
    return rows


def test_moments_lower_the_error_for_other_rows() -> None:
    """Against rounding to the nearest integer, and against blocks of 128 without zeros."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((INPUTS, OUTPUTS), np.float32)
    seen, others = correlated(rng, 2000), correlated(rng, 500)
    moments = torch.from_numpy(seen.T @ seen / len(seen))

    def error(rounded: Floats) -> float:
        exact = others @ weight
        return float(np.square(others @ rounded - exact).mean() / np.square(exact).mean())

    nearest = error(to_blocks(weight, KIND).weight())
    chosen = error(to_blocks(weight, KIND, moments).weight())
    blocks = np.pad(weight.T, ((0, 0), (0, -INPUTS % 128))).reshape(OUTPUTS, -1, 128)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / 7
    symmetric = (np.rint(blocks / scale) * scale).reshape(OUTPUTS, -1)[:, :INPUTS].T
    assert chosen < 0.4 * nearest < 0.4 * 0.75 * error(symmetric)


def test_a_graph_multiplies_by_the_weights_of_the_blocks() -> None:
    """With moments, an odd number of blocks and a last one that is not whole."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((INPUTS, OUTPUTS), np.float32)
    weight[:32] += 3  # blocks far from zero, and
    weight[32:64] = 0  # of zeros
    rows = correlated(rng, 300)
    moments = torch.from_numpy(rows.T @ rows / len(rows))
    blocks = to_blocks(weight, KIND, moments)
    assert blocks.integers.max() == 15
    assert not blocks.weight()[32:64].any()
    model = quantize(one_product(weight), "int4", moments={"layer": moments})
    for node in model.graph:
        if node.op_type == "MatMulNBits":
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (product,) = session.run(None, {"x": rows})
    np.testing.assert_allclose(product, rows @ blocks.weight(), rtol=1e-4, atol=1e-3)


def test_weights_alone_are_multiplied_without_rounding_activations() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((INPUTS, OUTPUTS), np.float32)
    rows = correlated(rng, 50)
    made: dict[str, Blocks] = {}
    model = quantize(one_product(weight), "int4", made=made, weights_only=True)
    assert {node.op_type for node in model.graph} == {"MatMul"}
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (product,) = session.run(None, {"x": rows})
    np.testing.assert_allclose(product, rows @ made["layer"].weight(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("size", [1e-15, 1e-9, 1e-5, 1e4, 1e9])
def test_weights_of_any_size_keep_their_value(size: float) -> None:
    """Scales that are no numbers of 16 bits stay float32."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((INPUTS, OUTPUTS), np.float32) * np.float32(size)
    blocks = to_blocks(weight, KIND)
    error = np.abs(blocks.weight() - weight).max() / size
    assert 0 < error < 0.4
    with np.errstate(over="ignore"):
        halves = blocks.scale == blocks.scale.astype(np.float16).astype(np.float32)
    assert halves.all() == (size == 1e4)


def test_inputs_that_were_never_read() -> None:
    """Moments of zero rows, and of columns that are always zero."""
    weight = np.random.default_rng(0).standard_normal((INPUTS, OUTPUTS), np.float32)
    rows = correlated(np.random.default_rng(0), 300)
    rows[:, :64] = 0
    for seen in (rows, rows * 0):
        moments = torch.from_numpy(seen.T @ seen / len(seen))
        rounded = to_blocks(weight, KIND, moments).weight()
        assert np.isfinite(rounded).all()
        assert np.abs(rounded - weight)[:64].max() < 0.5
