"""Masked graphs rewritten for the kernels: packed values, unpacked graphs, and the same answers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from maskdial.bundle.manifest import GRAPH
from maskdial.kernels.installed import Kernels
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.runtime.session import Session, SessionOptions
from tests.kernels.encoder import HEADS, LAYERS, LENGTHS, Change, Encoder, feeds, kinds, rewritten


def run(path: Path, kernels: Kernels | None, given: dict[str, Any]) -> NDArray[np.float32]:
    session = Session(path, SessionOptions(intra_op_threads=2, kernels=kernels))
    assert bool(session.kernels) == (kernels is not None)
    return session.run(given)


def is_packed(graph: onnx.GraphProto) -> bool:
    """Whether a graph's attention is over packed texts; all of it is ours."""
    attentions = [node for node in graph.node if node.op_type == "MaskedAttention"]
    (packed,) = {helper.get_node_attr_value(node, "packed") for node in attentions}
    assert kinds(graph)["Pack"] == packed
    return bool(packed)


def test_everything_between_embeddings_and_head_is_packed(tmp_path: Path) -> None:
    path = Encoder().save(tmp_path / GRAPH)
    before, after = onnx.load(path).graph, rewritten(path)
    assert is_packed(after)
    expected = kinds(before)
    del expected["MultiHeadAttention"]
    expected["LayerNormalization"] -= 2 * LAYERS
    expected["Add"] -= 2 * LAYERS
    expected.update(MaskedAttention=LAYERS, AddNorm=2 * LAYERS, Pack=1, Unpack=1)
    assert kinds(after) == expected
    assert [each.name for each in after.output] == [each.name for each in before.output]


@pytest.mark.parametrize("int8", [False, True])
def test_attention_is_by_integers_where_products_are(tmp_path: Path, int8: bool) -> None:
    after = rewritten(Encoder(int8=int8).save(tmp_path / GRAPH))
    attentions = [node for node in after.node if node.op_type == "MaskedAttention"]
    assert [helper.get_node_attr_value(node, "integers") for node in attentions] == [int8] * LAYERS


def test_packed_texts_have_the_answers_of_padded_ones(
    kernels: Kernels, processor: str, tmp_path: Path
) -> None:
    path = Encoder().save(tmp_path / GRAPH)
    ours = Kernels(kernels.path, processor)
    given = feeds()
    result = run(path, ours, given)
    np.testing.assert_allclose(result, run(path, None, given), rtol=1e-4, atol=1e-4)
    given["input_ids"] = np.pad(given["input_ids"], ((0, 0), (0, 9)), constant_values=-1)
    given["rows"] = given["rows"] + given["rows"] // max(LENGTHS) * 9
    np.testing.assert_array_equal(run(path, ours, given), result)


def test_lengths_beyond_the_batch_are_errors(kernels: Kernels, tmp_path: Path) -> None:
    session = Session(Encoder().save(tmp_path / GRAPH), SessionOptions(kernels=kernels))
    session.run(feeds())
    for wrong in ([*LENGTHS[:-1], 71], [*LENGTHS[:-1], 0], [*LENGTHS[:-1], -3]):
        with pytest.raises(Exception, match="do not fit"):
            session.run(feeds() | {"lengths": np.array(wrong, np.int32)})


def test_what_is_returned_for_each_token_is_unpacked(kernels: Kernels, tmp_path: Path) -> None:
    hidden = Encoder().hidden

    def change(graph: onnx.GraphProto) -> None:
        del graph.output[:]
        graph.output.append(helper.make_tensor_value_info(hidden, 1, None))

    path = Encoder().save(tmp_path / GRAPH, change)
    assert is_packed(rewritten(path))
    given = feeds()
    result, plain = run(path, kernels, given), run(path, None, given)
    for row, other, length in zip(result, plain, LENGTHS, strict=True):
        np.testing.assert_allclose(row[:length], other[:length], rtol=1e-4, atol=1e-4)
        assert not row[length:].any()


def attention(graph: onnx.GraphProto) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == "MultiHeadAttention")


def mixes_neighbors(graph: onnx.GraphProto) -> None:
    """A layer reads the token before each one."""
    graph.initializer.append(numpy_helper.from_array(np.array([0, 1, 0, 0, -1, 0]), "shift"))
    node = attention(graph)
    index = list(graph.node).index(node)
    graph.node.insert(index, helper.make_node("Pad", [node.input[0], "shift"], ["shifted"]))
    graph.node[index + 1].input[0] = "shifted"


def test_a_layer_that_knows_the_text_keeps_padding(kernels: Kernels, tmp_path: Path) -> None:
    path = Encoder().save(tmp_path / GRAPH, mixes_neighbors)
    assert not is_packed(rewritten(path))
    given = feeds()
    result = run(path, kernels, given)
    np.testing.assert_allclose(result, run(path, None, given), rtol=1e-4, atol=1e-4)


def add_input(graph: onnx.GraphProto) -> None:
    """A bias of one layer's scores."""
    bias = np.random.default_rng(0).standard_normal((1, HEADS, 70, 70), np.float32)
    graph.initializer.append(numpy_helper.from_array(bias, "scores"))
    attention(graph).input.append("scores")


def test_a_bias_of_scores_stays_and_the_other_layers_keep_padding(
    kernels: Kernels, tmp_path: Path
) -> None:
    path = Encoder().save(tmp_path / GRAPH, add_input)
    after = rewritten(path)
    assert kinds(after)["MultiHeadAttention"] == 1
    assert not is_packed(after)
    given = feeds()
    result = run(path, kernels, given)
    np.testing.assert_allclose(result, run(path, None, given), rtol=1e-4, atol=1e-4)


def add_window(graph: onnx.GraphProto, size: int = 6, masked: float = -60_000.0) -> None:
    """A bias of one layer's scores that is a window."""
    arrays = {"size": size, "masked": np.float32(masked), "first": [0, 1]}
    for name, value in arrays.items():
        graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    nodes = [
        helper.make_node("Unsqueeze", ["positions", "axis1"], ["others"]),
        helper.make_node("Sub", ["others", "places"], ["apart"]),
        helper.make_node("Abs", ["apart"], ["distance"]),
        helper.make_node("GreaterOrEqual", ["distance", "size"], ["far"]),
        helper.make_node("Cast", ["far"], ["is_far"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["is_far", "first"], ["is_far4"]),
        helper.make_node("Mul", ["is_far4", "masked"], ["scores"]),
    ]
    node = attention(graph)
    node.input.append("scores")
    index = list(graph.node).index(node)
    for offset, each in enumerate(nodes):
        graph.node.insert(index + offset, each)


def test_a_window_is_part_of_attention(kernels: Kernels, tmp_path: Path) -> None:
    path = Encoder().save(tmp_path / GRAPH, add_window)
    after = rewritten(path)
    assert is_packed(after)
    attentions = [node for node in after.node if node.op_type == "MaskedAttention"]
    assert [helper.get_node_attr_value(node, "window") for node in attentions] == [6, 0]
    given = feeds()
    result = run(path, kernels, given)
    np.testing.assert_allclose(result, run(path, None, given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("settings", [{"size": -1}, {"masked": -100.0}])
def test_a_bias_that_is_no_window_stays(tmp_path: Path, settings: dict[str, Any]) -> None:
    path = Encoder().save(tmp_path / GRAPH, lambda graph: add_window(graph, **settings))
    assert kinds(rewritten(path))["MultiHeadAttention"] == 1


def other_lengths(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "MultiHeadAttention":
            node.input[4] = "extents"
    graph.input.append(helper.make_tensor_value_info("extents", TensorProto.INT32, ["e"]))


def other_attribute(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        if node.op_type == "MultiHeadAttention":
            node.attribute.append(helper.make_attribute("unidirectional", 1))


@pytest.mark.parametrize("change", [other_lengths, other_attribute])
def test_attention_of_another_kind_stays(tmp_path: Path, change: Change) -> None:
    after = rewritten(Encoder().save(tmp_path / GRAPH, change))
    assert kinds(after)["MultiHeadAttention"] == LAYERS
    assert not kinds(after)["Pack"]


@pytest.mark.parametrize("clears", [False, True])
def test_vectors_of_tokens_that_are_not_attended_to_are_kept(tmp_path: Path, clears: bool) -> None:
    """ColBERT's queries have some: their graphs do not clear the ids of padding."""

    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if not clears and node.op_type == "Gather" and node.input[1] == "tokens":
                node.input[1] = "input_ids"

    after = rewritten(Encoder().save(tmp_path / GRAPH, change, output="embeddings"))
    assert kinds(after)["MaskedAttention"] == (LAYERS if clears else 0)


@pytest.mark.parametrize("graph", ["hybrid/model.full.onnx", "sentiment/model.onnx"])
def test_the_starters_are_rewritten(graph: str) -> None:
    after = rewritten(STARTER_FOLDER / graph)
    assert is_packed(after)
    assert kinds(after)["Unpack"] == kinds(after)["TokenPositions"] == 1
    assert not kinds(after)["MultiHeadAttention"]
