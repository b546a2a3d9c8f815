"""Lower precisions of many architectures, and which of them are batch-invariant."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from maskdial.bundle.manifest import Manifest
from maskdial.config import Config
from maskdial.kernels.rewrite import rewrite
from maskdial.metrics import Metrics
from maskdial.registry.loading import load_model
from maskdial_export.checkpoint.source import find
from maskdial_export.checks.evaluation import FillMask
from maskdial_export.checks.parity import expected_output
from maskdial_export.export import export
from maskdial_export.model import load_checkpoint
from maskdial_export.quantize.gate import Gate
from maskdial_export.session import MaskedSession
from maskdial_export.tracing.graph import optimize, save

Export = Callable[..., Manifest]
INT8 = (
    "bert",
    "modernbert",
    "albert",
    "distilbert",
    "deberta-v2",
    "gpt2",
    "opt",
    "llama",
    "qwen3",
    "gemma2",
)

# Their output layer has weights of its own
UNTIED = ("qwen3",)


@pytest.fixture
def export_as(checkpoint: Callable[[str], Path], tmp_path: Path) -> Export:
    """Exports a tiny random checkpoint, whatever its quality is."""

    def run(name: str, precision: str, calibrate: bool = True) -> Manifest:
        gate = Gate(max_loss=math.inf, calibrate=calibrate)
        return export(str(checkpoint(name)), tmp_path / precision, precision=precision, gate=gate)

    return run


def tables(bundle: Path) -> list[NDArray[Any]]:
    """The matrices with a row or column per token (there are 101), without scales."""
    constants = ir.load(bundle / "model.onnx").graph.initializers.values()
    tensors = [value.const_value for value in constants]
    arrays = [tensor.numpy() for tensor in tensors if tensor is not None]
    return [
        array for array in arrays if array.ndim >= 2 and 101 in array.shape and array.size > 101 * 8
    ]


@pytest.mark.parametrize("name", INT8)
def test_int8_is_batch_invariant(export_as: Export, name: str, tmp_path: Path) -> None:
    manifest = export_as(name, "int8", calibrate=name in ("bert", "llama"))
    assert manifest.precision == "int8"
    assert manifest.batch_invariant
    assert manifest.quality is not None
    found = {array.dtype for array in tables(tmp_path / "int8")}
    if manifest.quality.by_row:
        assert found == {np.dtype(np.int8)}
    else:  # in blocks; rows of no whole blocks are looked up in a table of their own
        apart = name in (*UNTIED, "opt")
        assert found == {np.dtype(np.uint8)} | ({np.dtype(np.int8)} if apart else set())


def test_experts_are_quantized(export_as: Export, tmp_path: Path) -> None:
    """Two products for each of four experts, beside those of attention and the output layer."""
    assert export_as("mixtral", "int8", calibrate=False).batch_invariant
    graph = ir.load(tmp_path / "int8" / "model.onnx").graph
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    assert len(products) == 2 * (2 + 2 * 4) + 1


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(each, marks=pytest.mark.zoo) for each in ("gemma2", "phi3", "mixtral")),
    ],
)
def test_fp16_has_a_cache_of_its_own(export_as: Export, name: str) -> None:
    manifest = export_as(name, "fp16")
    assert manifest.kv is not None
    assert manifest.kv.dtype == "float16"
    assert manifest.quality is not None
    assert abs(manifest.quality.loss) < 1e-3


def test_int4_weights_in_a_graph_of_fp16(export_as: Export, tmp_path: Path) -> None:
    manifest = export_as("llama", "int4-fp16")
    assert manifest.precision == "int4-fp16"
    assert manifest.kv is not None
    assert manifest.kv.dtype == "float16"
    assert manifest.quality is not None
    assert manifest.quality.kept == ()
    assert {array.dtype.name for array in tables(tmp_path / "int4-fp16")} == {"float16", "uint8"}
    graph = ir.load(tmp_path / "int4-fp16" / "model.onnx").graph
    assert not [each for each in graph.initializers.values() if each.dtype == ir.DataType.FLOAT]
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    # query, key and value at once; output; gate; up; down; and the output layer, tied as it is
    assert len(products) == 2 * 5 + 1
    assert not [node for node in graph if node.op_type in ("MatMul", "Gemm")]
    assert {node.attributes.get_int("block_size") for node in products} == {64}


def test_rotary_frequencies_stay_exact_in_fp16(checkpoint: Callable[[str], Path]) -> None:
    """With float16 frequencies the angle at position 1,000 would be off by half a radian."""
    source = find(str(checkpoint("llama")), "auto", revision=None, allow_pickle=False)
    loaded = load_checkpoint(source)
    exact, halved = (each.survey.layers[0].rotation for each in (loaded, loaded.half()))
    assert exact is not None
    assert halved is not None
    assert torch.equal(halved.cos, exact.cos.half())
    assert torch.equal(halved.sin, exact.sin.half())
    assert exact.cos[100, -1] == torch.cos(100 * loaded.model.model.rotary_emb.inv_freq[-1])


def test_means_of_fp16_are_those_of_torch(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    source = find(str(checkpoint("bert-embed")), "auto", revision=None, allow_pickle=False)
    loaded = load_checkpoint(source)
    save(optimize(loaded.half().trace()), tmp_path / "model.onnx")
    texts = [np.arange(5, 45), np.arange(60, 71), np.array([7])]
    embeddings = MaskedSession(tmp_path / "model.onnx").run(texts)
    for text, embedding in zip(texts, embeddings, strict=True):
        inputs = {"input_ids": torch.from_numpy(text[None])}
        expected = expected_output(loaded.model, loaded.pooler, inputs)
        np.testing.assert_allclose(embedding, expected, atol=2e-3)


@pytest.mark.parametrize("name", ["xlnet-classify", pytest.param("llama4", marks=pytest.mark.zoo)])
def test_weights_that_are_plain_parameters_are_quantized_one_by_one(
    name: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A module multiplies by several of them; a quantized weight is found by its name."""
    gate = Gate(max_loss=float("inf"))
    export(str(checkpoint(name)), tmp_path / "bundle", precision="int8", gate=gate)
    graph = onnx.load(tmp_path / "bundle" / "model.onnx", load_external_data=False).graph
    kinds = ("MatMulIntegerToFloat", "MatMulNBits")
    read = [node.input[1] for node in graph.node if node.op_type in kinds]
    assert len(read) > 10
    assert len(set(read)) == len(read)


def test_a_masked_model_with_its_table_in_blocks_has_no_padding(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels know the rows that tokens look up in the output layer's blocks."""
    monkeypatch.setattr(FillMask, "negligible", -1.0)  # no scale for each row
    gate = Gate(max_loss=math.inf)
    folder = tmp_path / "bundle"
    manifest = export(str(checkpoint("bert")), folder, precision="int8", gate=gate)
    assert manifest.quality is not None
    assert not manifest.quality.by_row
    graph = onnx.load_from_string(rewrite(folder / "model.onnx").model).graph
    kinds = {node.op_type for node in graph.node}
    assert {"Pack", "MaskedAttention", "Linear8"} <= kinds
    assert not kinds & {"MatMulNBits", "MultiHeadAttention"}
    model = load_model("mine", folder, Config(), Metrics())
    model.engine.stop(0)
