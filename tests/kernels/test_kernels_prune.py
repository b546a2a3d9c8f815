"""The last layer, narrowed to the tokens that the head reads: the same bits, or left as it was."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.manifest import GRAPH, CacheChoice
from maskdial.kernels import rewrite as rewriting
from maskdial.kernels.installed import Kernels
from maskdial.kernels.rewrite import rewrite
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.runtime.piece import Piece
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions
from tests.kernels.encoder import LENGTHS, SIZE, Change, Encoder, feeds, kinds, rewritten

HYBRID = STARTER_FOLDER / "hybrid"


def first_tokens(graph: onnx.GraphProto) -> None:
    """The head reads each text's first token, as a classifier's does."""
    reshape, gather = graph.node[-2:]
    gather.input[:] = [reshape.input[0], "zero"]
    gather.attribute.append(helper.make_attribute("axis", 1))
    graph.node.remove(reshape)


def masked_tokens(_graph: onnx.GraphProto) -> None:
    """The head reads the tokens that the request names."""


def answers(path: Path, kernels: Kernels, given: dict[str, Any]) -> NDArray[np.float32]:
    return Session(path, SessionOptions(intra_op_threads=2, kernels=kernels)).run(given)


@pytest.mark.parametrize("change", [masked_tokens, first_tokens])
def test_a_head_gets_the_same_bits(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    path = Encoder(int8=True).save(tmp_path / GRAPH, change)
    given = feeds()
    if change is masked_tokens:
        given["rows"] = np.random.default_rng(0).permutation(given["rows"])[:20]
    after = kinds(rewritten(path))
    assert after["Unpack"] == 0
    assert after["PackedRows" if change is masked_tokens else "FirstRows"] == 1
    narrowed = answers(path, kernels, given)
    monkeypatch.setattr(rewriting, "prune_last_layer", lambda _graph: None)
    assert kinds(rewritten(path))["Unpack"] == 1
    np.testing.assert_array_equal(narrowed, answers(path, kernels, given))
    assert narrowed.shape == (20 if change is masked_tokens else len(LENGTHS), SIZE)


def test_company_changes_no_bit(kernels: Kernels, tmp_path: Path) -> None:
    path = Encoder(int8=True).save(tmp_path / GRAPH, first_tokens)
    given = feeds()
    together = answers(path, kernels, given)
    for row, length in enumerate(LENGTHS):
        alone = {
            "input_ids": given["input_ids"][row : row + 1, :length],
            "lengths": np.array([length], np.int32),
            "rows": np.arange(1),
        }
        np.testing.assert_array_equal(answers(path, kernels, alone)[0], together[row])


def returns_hidden(graph: onnx.GraphProto) -> None:
    graph.output.append(helper.make_tensor_value_info(graph.node[-2].input[0], 1, None))


def reads_twice(graph: onnx.GraphProto) -> None:
    graph.node.append(helper.make_node("Gather", ["all_rows", "rows"], ["again"]))
    graph.output.append(helper.make_tensor_value_info("again", 1, None))


def reads_last_tokens(graph: onnx.GraphProto) -> None:
    first_tokens(graph)
    graph.initializer.append(numpy_helper.from_array(np.array(-1), "last"))
    graph.node[-1].input[1] = "last"


def keeps_an_axis(graph: onnx.GraphProto) -> None:
    first_tokens(graph)
    graph.node[-1].input[1] = "axis0"


def chooses_by_content(graph: onnx.GraphProto) -> None:
    """The rows that the head reads depend on values, not only on the request."""
    chosen = helper.make_node("Where", ["any", "rows", "rows"], ["chosen"])
    graph.initializer.append(numpy_helper.from_array(np.array(True), "any"))
    graph.node.insert(len(graph.node) - 1, chosen)
    graph.node[-1].input[1] = "chosen"


def returns_attention(graph: onnx.GraphProto) -> None:
    attended = [node for node in graph.node if node.op_type == "MultiHeadAttention"][-1].output[0]
    graph.output.append(helper.make_tensor_value_info(attended, 1, None))


def has_a_branch(graph: onnx.GraphProto) -> None:
    """A graph within a node may read any value."""
    branch = helper.make_graph(
        [helper.make_node("Identity", ["all_rows"], ["same"])],
        "branch",
        [],
        [helper.make_tensor_value_info("same", 1, None)],
    )
    graph.initializer.append(numpy_helper.from_array(np.array(True), "any"))
    choice = helper.make_node("If", ["any"], ["either"], then_branch=branch, else_branch=branch)
    graph.node.append(choice)
    graph.output.append(helper.make_tensor_value_info("either", 1, None))


def has_a_float_product(graph: onnx.GraphProto) -> None:
    """Its bits depend on how many rows there are."""
    weight = np.random.default_rng(0).standard_normal((SIZE, SIZE), np.float32)
    graph.initializer.append(numpy_helper.from_array(weight, "mixing"))
    reshape = graph.node[-2]
    product = helper.make_node("MatMul", [reshape.input[0], "mixing"], ["mixed"])
    reshape.input[0] = "mixed"
    graph.node.insert(len(graph.node) - 2, product)


@pytest.mark.parametrize(
    "change",
    [
        returns_hidden,
        reads_twice,
        reads_last_tokens,
        keeps_an_axis,
        chooses_by_content,
        returns_attention,
        has_a_branch,
        has_a_float_product,
    ],
)
def test_what_others_need_stays_whole(kernels: Kernels, tmp_path: Path, change: Change) -> None:
    path = Encoder(int8=True).save(tmp_path / GRAPH, change)
    after = kinds(rewritten(path))
    assert after["Pack"] == 1
    assert not after["PackedRows"] + after["FirstRows"]
    session = Session(path, SessionOptions(kernels=kernels))
    assert np.isfinite(session.run(feeds())).all()


def test_products_of_floats_stay_whole(tmp_path: Path) -> None:
    assert kinds(rewritten(Encoder().save(tmp_path / GRAPH)))["Unpack"] == 1


def test_a_row_that_is_padding_is_an_error(kernels: Kernels, tmp_path: Path) -> None:
    session = Session(Encoder(int8=True).save(tmp_path / GRAPH), SessionOptions(kernels=kernels))
    with pytest.raises(Exception, match="inputs of PackedRows do not fit: rows"):
        session.run(feeds() | {"rows": np.array([LENGTHS[0]])})


@pytest.mark.parametrize("kv_cache", ["float", "int16", "int8"])
def test_a_causal_starter_gets_the_same_bits(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, kv_cache: CacheChoice
) -> None:
    bundle = load_bundle("starter", HYBRID)
    ids = np.random.default_rng(0).integers(10, bundle.manifest.vocab_size, 60)
    results = []
    for narrows in (True, False):
        if not narrows:
            monkeypatch.setattr(rewriting, "prune_last_layer", lambda _graph: None)
        options = SessionOptions(intra_op_threads=2, kernels=kernels, kv_cache=kv_cache)
        session, layout = Session(bundle.graph, options), bundle.manifest.kv
        assert layout is not None
        graph = onnx.load_from_string(rewrite(bundle.graph, kv_cache).model).graph
        attention = [node for node in graph.node if node.op_type.endswith("CausalAttention")][-1]
        assert len(attention.input) == (13 if narrows else 12)
        vocab_size = bundle.manifest.vocab_size
        runner = Runner(
            session,
            layout.stored_as(session.kv_cache),
            slots=3,
            max_length=64,
            vocab_size=vocab_size,
        )
        passes = [
            runner.prefill(0, ids[:40], 0),
            runner.prefill(1, ids[:20], 0, 7),
            runner.decode(ids[40:42], np.array([40, 20]), np.array([0, 1])),
            runner.prefill_together(1, [ids[5:20], ids[20:23]]),
        ]
        passes = [np.array(each) for each in passes]
        assert runner.decode_and_prefill is not None
        together = runner.decode_and_prefill(
            ids[:3], np.array([41, 0, 3]), np.array([2, 0]), [Piece.of(1, ids[:9], 0)]
        )
        results.append([*passes, np.array(together)])
    for narrowed, plain in zip(*results, strict=True):
        np.testing.assert_array_equal(narrowed, plain)


def test_hidden_states_of_layers_leave_the_last_one_narrowed(
    kernels: Kernels, circling_eagle: Path
) -> None:
    """And no bit of the logits depends on whether they are given."""
    bundle = load_bundle("eagle", circling_eagle / "bundle")
    head, layout = bundle.manifest.draft_head, bundle.manifest.kv
    assert head is not None
    assert layout is not None
    ids = np.random.default_rng(0).integers(5, bundle.manifest.vocab_size, 40)
    results = []
    for size in (head.hidden_size, 0):
        options = SessionOptions(kernels=kernels, kv_cache="auto", gives_hidden=size > 0)
        session = Session(bundle.graph, options)
        rewritten = rewrite(bundle.graph, "auto", gives_hidden=size > 0)
        graph = onnx.load_from_string(rewritten.model).graph
        attention = [node for node in graph.node if node.op_type.endswith("CausalAttention")][-1]
        assert len(attention.input) == 13
        runner = Runner(
            session,
            layout.stored_as(session.kv_cache),
            slots=1,
            max_length=64,
            vocab_size=bundle.manifest.vocab_size,
            hidden_size=size,
        )
        first = np.array(runner.prefill(0, ids[:30], 0, 5))
        results.append([first, np.array(runner.prefill(0, ids[30:33], 30, 3))])
        if size:
            assert runner.hidden([0])[0].shape == (3, size)
    for given, left in zip(*results, strict=True):
        np.testing.assert_array_equal(given, left)


def test_hidden_states_that_nobody_asks_for_leave_the_graph(tmp_path: Path) -> None:
    """Otherwise the last layer would compute all tokens of prompts, for nothing."""
    model = onnx.load(HYBRID / GRAPH, load_external_data=False)
    read = next(node.input[0] for node in model.graph.node if node.output[0] == "index_select")
    model.graph.node.append(helper.make_node("Identity", [read], ["hidden"]))
    hidden = helper.make_tensor_value_info("hidden", onnx.TensorProto.FLOAT, None)
    model.graph.output.append(hidden)
    path = tmp_path / GRAPH
    path.write_bytes(model.SerializeToString())
    for gives_hidden in (True, False):
        graph = onnx.load_from_string(rewrite(path, gives_hidden=gives_hidden).model).graph
        assert ("hidden" in {value.name for value in graph.output}) == gives_hidden
        attention = [node for node in graph.node if node.op_type.endswith("CausalAttention")][-1]
        assert len(attention.input) == (12 if gives_hidden else 13)
