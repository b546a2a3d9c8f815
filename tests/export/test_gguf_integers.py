"""Bundles of GGUF files keep the integers of the file, to the last bit of each weight."""

import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import numpy_helper
from rich.console import Console

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.manifest import GRAPH, KERNEL_CHECK
from maskdial.kernels.installed import Kernels, find_kernels
from maskdial.kernels.rewrite import rewrite
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions
from maskdial_export.checkpoint.gguf.contents import read_contents
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.quantize import gate as gate_module
from maskdial_export.quantize import quality as quality_module
from maskdial_export.quantize.gate import Gate
from tests.export.test_gguf_models import write

Floats = NDArray[np.float32]

REFUSED = r"int8 diverges by \S+ nats from fp32 on .* maximum is 1e-09 nats"

TYPES = {
    "blk.0.attn_q.weight": "Q4_1",
    "blk.0.attn_k.weight": "Q4_1",
    "blk.0.attn_v.weight": "Q4_1",
    "blk.1.attn_q.weight": "Q4_1",
    "blk.1.attn_k.weight": "Q4_1",
    "blk.1.attn_v.weight": "Q4_0",  # gets minima, as the product of all three has them
    "attn_output.weight": "Q4_0",
    "ffn_gate.weight": "Q4_1",
    "ffn_up.weight": "Q4_1",
    "blk.0.ffn_down.weight": "Q4_0",
    "blk.1.ffn_down.weight": "Q5_0",
    "token_embd.weight": "Q8_0",  # and the output layer, which is the same matrix
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file and its bundle."""
    folder = tmp_path_factory.mktemp("integers")
    write("llama-bias", folder / "model.gguf", quantize=TYPES)
    gate = Gate(max_loss=math.inf)
    export(str(folder / "model.gguf"), folder / "bundle", precision="int4", gate=gate)
    return folder / "model.gguf", folder / "bundle"


@pytest.fixture
def kernels() -> Kernels:
    found = find_kernels("auto")
    if found is None:
        pytest.skip("there are no kernels")
    return found


def weights_of(graph: onnx.GraphProto, node: onnx.NodeProto) -> Floats:
    """The weights (outputs, inputs) that a ``MatMulNBits`` and what follows it stand for."""
    arrays = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    users = {name: each for each in graph.node for name in each.input}
    makers = {name: each for each in graph.node for name in each.output}
    nibbles = node.input[1].endswith(".int4")
    packed, scale = (arrays[name] for name in node.input[1:3])

    def pairs(array: NDArray[Any]) -> Floats:
        both = np.stack([array & 15, array >> 4], axis=-1)
        return both.reshape(*array.shape[:-1], -1).astype(np.float32)

    after = users.get(node.output[0], node)
    values = pairs(packed) if nibbles else packed.astype(np.float32) - 128
    if after.op_type == "Sub":  # less the zeros' share, which gives what the file has
        sums, less = (makers[name] for name in makers[after.input[1]].input)
        members = arrays[sums.input[1]]
        assert sums.input[0] == node.input[0]
        np.testing.assert_array_equal(members, np.repeat(np.eye(members.shape[1]), 32, axis=0))
        center = arrays[makers[less.input[1]].input[1]]
        if nibbles:
            assert len(node.input) == 3  # zeros of 8
            assert center == 8
        else:
            zeros = arrays[makers[node.input[3]].input[0]]
            np.testing.assert_array_equal(zeros[:, 0], center[0] + 128)
        weights = values * scale[..., None] - arrays[less.input[0]].T[..., None]
    else:
        zero = pairs(arrays[node.input[3]])[:, : scale.shape[1], None] if nibbles else 0
        weights = (values - zero) * scale[..., None]
    result: Floats = weights.reshape(len(weights), -1)
    return result


def test_weights_of_the_graph_are_those_of_the_file(bundle: tuple[Path, Path]) -> None:
    path, folder = bundle
    stored = {each.name: each.values() for each in read_contents([path]).weights}
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    graph = onnx.load(folder / GRAPH).graph
    kinds = Counter(node.op_type for node in graph.node)
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    bits = Counter(node.input[1].rpartition(".")[2] for node in products)
    assert bits == {"int4": 9, "int8": 2}  # gate and up are two
    assert not kinds["MatMulIntegerToFloat"]
    for node in products:
        modules = node.input[1].rpartition(".")[0].split(",")
        expected = np.concatenate([stored[f"{name}.weight"] for name in modules])
        np.testing.assert_array_equal(weights_of(graph, node), expected)
    assert kinds["Sub"] >= 5
    quality = load_bundle("mine", folder).manifest.quality
    assert quality is not None
    assert not quality.raised
    assert quality.loss < 0.02
    assert not (folder / KERNEL_CHECK).exists()  # it is for products of int8 with one scale


def test_the_kernels_subtract_minima(bundle: tuple[Path, Path], kernels: Kernels) -> None:
    """Every product is replaced, and rows have the same bits in any company."""
    _, folder = bundle
    about = load_bundle("mine", folder).manifest
    rewritten = onnx.load_from_string(rewrite(folder / GRAPH).model).graph
    kinds = Counter(node.op_type for node in rewritten.node)
    assert not kinds.keys() & {"MatMulNBits", "MatMulIntegerToFloat", "MatMul", "Expand"}
    linears = [node for node in rewritten.node if node.op_type.endswith(("Linear4", "Linear8"))]
    minima = [name for node in linears for name in node.input if name.endswith(".minimum")]
    assert len(minima) == len(set(minima)) == 6
    assert sum(node.op_type.endswith("Linear8") for node in linears) == 2
    assert about.kv is not None
    tokens = np.arange(20, 57)
    logits: list[Floats] = []
    for used in (None, kernels):
        session = Session(folder / GRAPH, SessionOptions(intra_op_threads=1, kernels=used))
        run = Runner(session, about.kv, slots=2, max_length=64, vocab_size=about.vocab_size)
        logits.append(np.array(run.prefill(0, tokens, 0, len(tokens))))
    plain, ours = logits
    np.testing.assert_allclose(ours, plain, atol=0.05 * np.abs(plain).max())
    half = np.array(run.prefill(1, tokens[:18], 0, 18))
    np.testing.assert_array_equal(half, ours[:18])


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_a_file_is_not_refused_for_what_its_integers_round(
    bundle: tuple[Path, Path], tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are its layers raised or kept, up to a limit of its own."""
    monkeypatch.setattr(gate_module, "MAX_LOSS", 1e-9)
    told = Console(record=True, quiet=False, file=io.StringIO(), width=200)
    path = bundle[0]
    manifest = export(str(path), tmp_path / "b", precision=precision, console=told)
    quality = manifest.quality
    assert quality is not None
    assert 1e-9 < quality.loss < 0.05 == quality.max_loss
    assert (quality.raised, quality.kept) == ((), ())
    assert "the rounding of what the file's integers are multiplied by" in told.export_text()
    monkeypatch.setattr(quality_module, "FILE_LOSS", 0.9 * quality.loss)
    with pytest.raises(ExportError, match=f"{precision} diverges by"):
        export(str(path), tmp_path / "c", precision=precision)


def test_a_file_is_refused_by_a_limit_that_was_asked_for(
    bundle: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=REFUSED):
        export(str(bundle[0]), tmp_path / "b", precision="int8", gate=Gate(max_loss=1e-9))


def test_layers_that_a_file_has_in_floats_are_judged_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {name: kind for name, kind in TYPES.items() if "ffn_down" not in name}
    write("llama-bias", tmp_path / "model.gguf", quantize=types)
    source = str(tmp_path / "model.gguf")
    alone = export(source, tmp_path / "a", precision="int8", gate=Gate(max_loss=math.inf))
    assert alone.quality is not None
    # As much as all layers lose, of which these are a few
    monkeypatch.setattr(gate_module, "MAX_LOSS", 0.9 * alone.quality.loss)
    manifest = export(source, tmp_path / "b", precision="int8", gate=Gate(keep_worst=0))
    assert manifest.quality is not None
    assert manifest.quality.kept == ()
    monkeypatch.setattr(gate_module, "MAX_LOSS", 1e-9)
    with pytest.raises(ExportError, match=REFUSED):
        export(source, tmp_path / "c", precision="int8", gate=Gate(keep_worst=0))


def test_a_file_without_4_bits_is_quantized_as_any_other(tmp_path: Path) -> None:
    write("llama", tmp_path / "model.gguf", quantize={"attn_q.weight": "Q8_0"})
    gate = Gate(max_loss=math.inf, keep_worst=0)
    manifest = export(
        str(tmp_path / "model.gguf"), tmp_path / "bundle", precision="int4", gate=gate
    )
    assert manifest.quality is not None
    assert manifest.quality.raised == ()
    graph = onnx.load(tmp_path / "bundle" / GRAPH, load_external_data=False).graph
    assert not any(node.op_type == "MatMulIntegerToFloat" for node in graph.node)
