"""int4 bundles with the kernels: each row's answer is its own, to the last bit."""

import math
import platform
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from maskdial.bundle.bundle import load_bundles
from maskdial.bundle.manifest import GRAPH, Manifest
from maskdial.kernels.installed import Kernels
from maskdial.kernels.rewrite import rewrite
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

pytestmark = pytest.mark.slow

HYBRID = STARTER_FOLDER / "hybrid"
PROMPT = np.arange(20, 57)


BLOCK = 32


def in_four_bits(weight: NDArray[np.float32]) -> list[NDArray[Any]]:
    """Integers, scales and zeros of a weight (inputs, outputs), as ``MatMulNBits`` takes them."""
    num_inputs, num_outputs = weight.shape
    blocks = np.pad(weight.T, ((0, 0), (0, -num_inputs % BLOCK)))
    blocks = blocks.reshape(num_outputs, -1, BLOCK)
    low, high = np.minimum(blocks.min(axis=2), 0), np.maximum(blocks.max(axis=2), 0)
    scale = ((high - low) / 15 + np.float32(1e-4)).astype(np.float16).astype(np.float32)
    zeros = np.rint(-low / scale).clip(0, 15).astype(np.uint8)
    integers = np.rint(blocks / scale[..., None]) + zeros[..., None]
    zeros = np.pad(zeros, ((0, 0), (0, zeros.shape[1] % 2)))
    packed = [
        each[..., 0::2] | each[..., 1::2] << 4
        for each in (integers.clip(0, 15).astype(np.uint8), zeros)
    ]
    return [packed[0], scale, packed[1]]


SUFFIXES = ("int4", "scale4", "zeros4")


def product4(source: str, name: str, weight: NDArray[np.float32], output: str) -> NodeProto:
    num_inputs, num_outputs = weight.shape
    return helper.make_node(
        "MatMulNBits",
        [source, *(f"{name}.{suffix}" for suffix in SUFFIXES)],
        [output],
        domain="com.microsoft",
        K=num_inputs,
        N=num_outputs,
        bits=4,
        block_size=BLOCK,
        accuracy_level=4,
    )


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid's causal graph with its int8 products as products of 4-bit weights."""
    model = onnx.load(HYBRID / GRAPH)
    graph = model.graph
    arrays = {each.name: each for each in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    nodes = []
    replaced = {}
    for node in graph.node:
        if node.op_type != "MatMulIntegerToFloat":
            continue
        rows, stored, _, scale = node.input[:4]
        transposed = stored not in arrays
        name = producers[stored].input[0] if transposed else stored
        weight = numpy_helper.to_array(arrays[name]).astype(np.float32)
        weight = (weight.T if transposed else weight) * numpy_helper.to_array(arrays[scale])
        source = producers[producers[rows].input[0]].input[0]
        (last,) = (each for each in graph.node if node.output[0] in each.input)
        replaced[last.output[0]] = product4(source, name, weight, last.output[0])
        for suffix, array in zip(SUFFIXES, in_four_bits(weight), strict=True):
            graph.initializer.append(numpy_helper.from_array(array, f"{name}.{suffix}"))
    for node in graph.node:
        nodes.append(replaced.get(node.output[0], node))
    del graph.node[:]
    graph.node.extend(nodes)
    folder = tmp_path_factory.mktemp("int4")
    onnx.save(model, folder / GRAPH)
    return folder


def manifest() -> Manifest:
    return load_bundles("starter", HYBRID)[0].manifest


def runner(int4: Path, kernels: Kernels | None, threads: int = 1) -> Runner:
    options = SessionOptions(intra_op_threads=threads, kernels=kernels)
    session = Session(int4 / GRAPH, options)
    assert session.kernels == (kernels.processor if kernels else "")
    about = manifest()
    assert about.kv is not None
    return Runner(session, about.kv, slots=4, max_length=64, vocab_size=about.vocab_size)


def whole(run: Runner, slot: int = 0) -> NDArray[np.float32]:
    """The logits of every token of the prompt."""
    return np.array(run.prefill(slot, PROMPT, 0, len(PROMPT)))


def test_every_product_is_replaced_and_gates_are_fused(int4: Path) -> None:
    before = Counter(each.op_type for each in onnx.load(int4 / GRAPH).graph.node)
    rewritten = rewrite(int4 / GRAPH)
    after = Counter(each.op_type for each in onnx.load_from_string(rewritten.model).graph.node)
    num_products, num_gates = before["MatMulNBits"], before["Sigmoid"]
    assert num_gates
    assert rewritten.num_replaced == num_products + before["GroupQueryAttention"]
    assert after["Linear4"] + after["NormLinear4"] == num_products - num_gates
    assert after["NormLinear4"] == num_gates  # queries, keys and values share their norm
    assert not after.keys() & {"MatMulNBits", "Sigmoid", "QuantizeLinear"}


@pytest.mark.skipif(
    platform.machine() == "aarch64", reason="ONNX Runtime's 4-bit product answers otherwise on Arm"
)
def test_answers_are_those_without_the_kernels_but_for_rounding(
    int4: Path, kernels: Kernels, processor: str
) -> None:
    rng, ours = np.random.default_rng(0), Kernels(kernels.path, processor)
    plain, one, two = runner(int4, None), runner(int4, ours, 1), runner(int4, ours, 2)
    squares = []
    for _ in range(6):
        prompt = rng.integers(0, manifest().vocab_size, 40)
        expected, found, threaded = (
            np.array(each.prefill(0, prompt, 0, len(prompt))) for each in (plain, one, two)
        )
        np.testing.assert_array_equal(threaded, found)
        squares.append(((found - expected).std() / expected.std()) ** 2)
    # An input that lies between two integers may be rounded to the other one, and which ones do
    # changes with every last bit before: single prompts differ by 0 to 1.5%.
    assert math.sqrt(np.mean(squares)) < 0.015


def test_instruction_sets_agree_to_the_last_bit(
    int4: Path, kernels: Kernels, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = whole(runner(int4, Kernels(kernels.path, processor)))
    monkeypatch.setenv("MASKDIAL_KERNELS_ISA", "scalar")
    np.testing.assert_array_equal(whole(runner(int4, Kernels(kernels.path, "scalar"))), logits)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_text_is_the_same_alone_in_company_in_chunks_and_token_by_token(
    int4: Path, kernels: Kernels, processor: str, threads: int
) -> None:
    run = runner(int4, Kernels(kernels.path, processor), threads)
    expected = whole(run)
    starts = (0, 1, 5, 18, 36)
    for start, stop in zip(starts, (*starts[1:], len(PROMPT)), strict=True):
        chunk = run.prefill(1, PROMPT[start:stop], start, stop - start)
        np.testing.assert_array_equal(chunk, expected[start:stop])
    others = [PROMPT[:7], PROMPT, PROMPT[::-1][:20]]
    np.testing.assert_array_equal(np.asarray(run.prefill_together(0, others))[1], expected[-1])
    zero = np.zeros(1, np.int64)
    for position, token in enumerate(PROMPT):
        alone = run.decode(np.array([token]), np.array([position]), zero)
        np.testing.assert_array_equal(np.asarray(alone)[0], expected[position])
    lengths = np.array([7, 36, 20, 3])
    tokens = np.array([9, PROMPT[36], 8, 7])
    together = run.decode(tokens, lengths, np.arange(4))
    np.testing.assert_array_equal(np.asarray(together)[1], expected[36])


def changed(int4: Path, tmp_path: Path, change: Callable[[GraphProto, NodeProto], object]) -> int:
    """How many ``MatMulNBits`` stay if one of them is changed."""
    model = onnx.load(int4 / GRAPH)
    node = next(each for each in model.graph.node if each.op_type == "MatMulNBits")
    change(model.graph, node)
    onnx.save(model, tmp_path / GRAPH)
    after = onnx.load_from_string(rewrite(tmp_path / GRAPH).model).graph
    return sum(each.op_type == "MatMulNBits" for each in after.node)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("accuracy_level", 0), ("accuracy_level", 1), ("bits", 8), ("block_size", 16), ("new", 1)],
)
def test_products_of_another_kind_stay(
    int4: Path, tmp_path: Path, attribute: str, value: int
) -> None:
    def change(_graph: GraphProto, node: NodeProto) -> None:
        kept = [each for each in node.attribute if each.name != attribute]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(attribute, value)])

    assert changed(int4, tmp_path, change) == 1


@pytest.mark.parametrize("names", [["computed"], ["", "group"], ["", "", "computed"]])
def test_groups_and_computed_zeros_and_biases_stay(
    int4: Path, tmp_path: Path, names: list[str]
) -> None:
    def change(_graph: GraphProto, node: NodeProto) -> None:
        node.input[3:] = names

    assert changed(int4, tmp_path, change) == 1


def test_zeros_of_floats_stay(int4: Path, tmp_path: Path) -> None:
    def change(graph: GraphProto, node: NodeProto) -> None:
        graph.initializer.append(numpy_helper.from_array(np.ones((1, 1), np.float32), "floats"))
        node.input[3] = "floats"

    assert changed(int4, tmp_path, change) == 1


def test_scales_of_float16_stay(int4: Path, tmp_path: Path) -> None:
    def change(graph: GraphProto, node: NodeProto) -> None:
        scale = next(each for each in graph.initializer if each.name == node.input[2])
        scale.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(scale).astype(np.float16), scale.name)
        )

    assert changed(int4, tmp_path, change) == 1


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_biases_and_gelu_are_fused_with_a_product(
    kernels: Kernels, tmp_path: Path, shared: bool, bias: bool
) -> None:
    """GELU does not if the product is used itself, or has a bias already."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((140, 50), np.float32) * np.float32(0.125)
    arrays: dict[str, NDArray[Any]]
    arrays = {
        f"w.{suffix}": each for suffix, each in zip(SUFFIXES, in_four_bits(weight), strict=True)
    }
    arrays |= {"bias": rng.standard_normal(50, np.float32)}
    product = product4("x", "w", weight, "product")
    if bias:
        product.input.extend(["", "bias"])
    nodes = [
        product,
        helper.make_node("BiasGelu", ["product", "bias"], ["y"], domain="com.microsoft"),
    ]
    results = ["y", "product"] if shared else ["y"]
    graph = helper.make_graph(
        nodes,
        "gelu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 140])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
        [numpy_helper.from_array(each, name) for name, each in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / GRAPH)
    rewritten = onnx.load_from_string(rewrite(tmp_path / GRAPH).model).graph
    expected_kinds = ["Linear4", "BiasGelu"] if shared or bias else ["Linear4"]
    assert [node.op_type for node in rewritten.node] == expected_kinds
    x = rng.standard_normal((9, 140), np.float32)
    plain, used = (
        Session(tmp_path / GRAPH, SessionOptions(kernels=each)).run({"x": x})
        for each in (None, kernels)
    )
    np.testing.assert_allclose(used, plain, rtol=0, atol=0.03)


@pytest.mark.parametrize("block", [BLOCK, 64])
def test_gates_are_fused_with_products_in_blocks_of_one_size(
    kernels: Kernels, tmp_path: Path, block: int
) -> None:
    """A GGUF file may have two types of them."""
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[Any]] = {}
    for name, size in (("gate", BLOCK), ("up", block)):
        arrays[f"{name}.w"] = rng.integers(0, 256, (50, 192 // size, size // 2)).astype(np.uint8)
        arrays[f"{name}.s"] = rng.random((50, 192 // size), np.float32) / 8
    nodes = [
        helper.make_node(
            "MatMulNBits",
            ["x", f"{name}.w", f"{name}.s"],
            [name],
            domain="com.microsoft",
            K=192,
            N=50,
            bits=4,
            block_size=size,
            accuracy_level=4,
        )
        for name, size in (("gate", BLOCK), ("up", block))
    ]
    nodes += [
        helper.make_node("Sigmoid", ["gate"], ["sigmoid"]),
        helper.make_node("Mul", ["gate", "sigmoid"], ["silu"]),
        helper.make_node("Mul", ["silu", "up"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "gated",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 192])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(each, name) for name, each in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / GRAPH)
    rewritten = onnx.load_from_string(rewrite(tmp_path / GRAPH).model).graph
    kinds = [node.op_type for node in rewritten.node]
    assert kinds == (["Linear4"] if block == BLOCK else ["Linear4"] * 2 + ["Sigmoid", "Mul", "Mul"])
    x = rng.standard_normal((9, 192), np.float32) / np.float32(8)
    plain, used = (
        Session(tmp_path / GRAPH, SessionOptions(kernels=each)).run({"x": x})
        for each in (None, kernels)
    )
    np.testing.assert_allclose(used, plain, rtol=0, atol=0.02 * np.abs(plain).max())
