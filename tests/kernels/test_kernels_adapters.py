"""Adapters of rows: what the kernels' products add, and what they leave as it is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from loadtests.__main__ import main as loadtests
from maskdial.bundle.adapter import LowRank, Projection
from maskdial.bundle.bundle import load_bundles
from maskdial.kernels.adapters import PackedAdapter
from maskdial.kernels.installed import Kernels
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.golden import causal_logits, masked_logits
from maskdial.runtime.piece import Piece
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions
from tests.adapters import random_matrices
from tests.kernels.conftest import TYPES

HYBRID = STARTER_FOLDER / "hybrid"
SENTIMENT = STARTER_FOLDER / "sentiment"
INPUTS, OUTPUTS, ROWS = 70, 100, 29
STEP = 0.02
FIXED = {"step": STEP, "by_row": 0, "transposed": 0, "gelu": 0}
# Of each operator: rows before the weights, products, inputs of each, and the adapters' index.
LINEARS = {
    "Linear": (1, 1, 3, 7),
    "gated": (1, 2, 3, 7),
    "gelu": (1, 1, 3, 7),
    "Linears": (1, 3, 3, 10),
    "NormLinear": (3, 2, 3, 9),
    "NormLinears": (3, 2, 3, 12),
    "Linear4": (1, 2, 5, 11),
    "NormLinear4": (3, 1, 5, 13),
}

Arrays = dict[str, NDArray[Any]]


def open_linear(kernels: Kernels, kind: str, *, adapts: bool) -> ort.InferenceSession:
    """A session of an operator with random weights, whose products are named 0, 1 and 2."""
    num_rows, num_products, num_inputs, adapters = LINEARS[kind]
    generator = np.random.default_rng(3)
    names, constants = ["x", "residual", "norm"][:num_rows], Arrays()
    for product in range(num_products):
        its: Arrays = {"weight": generator.integers(-90, 90, (INPUTS, OUTPUTS)).astype(np.int8)}
        its["scale"] = generator.random(OUTPUTS, np.float32) / 100
        if num_inputs == 5:
            blocks = (OUTPUTS, -(-INPUTS // 32))
            its = {"weight": generator.integers(0, 256, (*blocks, 16)).astype(np.uint8)}
            its["scale"] = generator.random(blocks, np.float32).reshape(-1) / 10
        constants |= {f"{name}.{product}": array for name, array in its.items()}
        names += [f"weight.{product}", f"scale.{product}", *[""] * (num_inputs - 2)]
    while not names[-1]:
        names.pop()
    attributes: dict[str, Any] = dict(FIXED)
    if num_inputs == 5:
        attributes = {"num_inputs": INPUTS, "gelu": 0}
    attributes["gelu"] = int(kind == "gelu")
    if num_rows == 3:
        attributes["epsilon"] = 1e-5
    if adapts:
        names += [""] * (adapters - len(names)) + ["adapters"]
        attributes["projections"] = "\n".join(map(str, range(num_products)))
    several = num_products if kind.endswith("s") else 1
    results = ["sum"] * (num_rows == 3) + [f"y{i}" for i in range(several)]
    op_type = "Linear" if kind in ("gated", "gelu") else kind
    node = helper.make_node(op_type, names, results, domain="maskdial", **attributes)
    given = [n for n in names if n in ("x", "residual", "norm", "adapters")]
    kinds = {name: np.int64 if name == "adapters" else np.float32 for name in given}
    inputs = [
        helper.make_tensor_value_info(name, TYPES[np.dtype(kind_)], None)
        for name, kind_ in kinds.items()
    ]
    outputs = [helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, None) for y in results]
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    return open_graph(kernels, helper.make_graph([node], "linear", inputs, outputs, stored))


def open_graph(kernels: Kernels, graph: onnx.GraphProto) -> ort.InferenceSession:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("maskdial", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.register_custom_ops_library(str(kernels.path))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def draw(
    kernels: Kernels, seed: int, rank: int, dtype: type, places: dict[str, tuple[int, int]]
) -> tuple[PackedAdapter, dict[str, LowRank]]:
    """An adapter of some products: ``places`` are each one's first column and its number."""
    generator = np.random.default_rng(seed)
    adapter, drawn = PackedAdapter(kernels.path), {}
    for product, (first, size) in places.items():
        a: NDArray[Any] = (generator.normal(size=(rank, INPUTS)) / 10).astype(dtype)
        b: NDArray[Any] = generator.normal(size=(rank, size)).astype(dtype)
        drawn[product] = LowRank(a, b)
        adapter.add(drawn[product], Projection(INPUTS, size, product, first, OUTPUTS))
    return adapter, drawn


def rows_of(kind: str) -> Arrays:
    generator = np.random.default_rng(5)
    feeds: Arrays = {"x": generator.normal(size=(ROWS, INPUTS)).astype(np.float32)}
    if LINEARS[kind][0] == 3:
        feeds["residual"] = generator.normal(size=(ROWS, INPUTS)).astype(np.float32)
        feeds["norm"] = generator.random(INPUTS, np.float32) + 0.5
    return feeds


@pytest.mark.parametrize("kind", LINEARS)
def test_rows_of_several_adapters(kernels: Kernels, processor: str, kind: str) -> None:
    plain = open_linear(kernels, kind, adapts=False)
    session = open_linear(kernels, kind, adapts=True)
    adapters = [
        draw(kernels, 1, 8, np.float16, {"0": (0, OUTPUTS), "1": (0, OUTPUTS)})[0],
        draw(kernels, 2, 5, np.float32, {"0": (16, 23)})[0],
        draw(kernels, 3, 4, np.float16, {"none": (0, OUTPUTS)})[0],
    ]
    choices = np.random.default_rng(6).integers(0, 4, ROWS)
    ids = np.array([0, *(each.address for each in adapters)])[choices]
    feeds = rows_of(kind)
    expected = plain.run(None, feeds)
    mixed = session.run(None, feeds | {"adapters": ids})
    unadapted = session.run(None, feeds | {"adapters": np.zeros(ROWS, np.int64)})
    for base, none, some in zip(expected, unadapted, mixed, strict=True):
        np.testing.assert_array_equal(none.view(np.int32), base.view(np.int32))
        without = choices == 0
        np.testing.assert_array_equal(some[without].view(np.int32), base[without].view(np.int32))
    assert not np.allclose(mixed[-1][choices == 1], expected[-1][choices == 1], atol=0.1)
    for row in range(ROWS):  # each alone
        own = {name: array[row : row + 1] for name, array in feeds.items() if name != "norm"}
        own |= {"adapters": ids[row : row + 1]}
        if "norm" in feeds:
            own["norm"] = feeds["norm"]
        for some, alone in zip(mixed, session.run(None, own), strict=True):
            np.testing.assert_array_equal(some[row], alone[0])


def test_all_instruction_sets_add_the_same(
    kernels: Kernels, instruction_sets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    places = {"0": (3, 41), "1": (50, 50)}  # not at vectors
    adapter, _ = draw(kernels, 1, 6, np.float16, places)
    for name in instruction_sets:
        monkeypatch.setenv("MASKDIAL_KERNELS_ISA", name)
        session = open_linear(kernels, "gated", adapts=True)
        feeds = rows_of("gated") | {"adapters": np.full(ROWS, adapter.address)}
        found.append(session.run(None, feeds)[0])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_what_is_added_is_the_product_of_the_matrices(
    kernels: Kernels, processor: str, dtype: type
) -> None:
    """To products of another operator, of which one computes two layers."""
    adapter, drawn = draw(kernels, 1, 7, dtype, {"0": (0, 37)})
    second = draw(kernels, 2, 3, dtype, {"0": (37, 63)})[1]["0"]
    adapter.add(second, Projection(INPUTS, 63, "0", 37, OUTPUTS))
    # Ranks are filled up to multiples of 4, columns to blocks of 16.
    assert adapter.num_bytes == (8 * (80 + 48) + 4 * (80 + 80)) * np.dtype(dtype).itemsize
    inputs = {"x": np.float32, "y": np.float32, "adapters": np.int64}
    node = helper.make_node("Adapt", list(inputs), ["z"], domain="maskdial", projections="0")
    values = [helper.make_tensor_value_info(n, TYPES[np.dtype(k)], None) for n, k in inputs.items()]
    output = helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)
    session = open_graph(kernels, helper.make_graph([node], "adapt", values, [output]))
    generator = np.random.default_rng(1)
    x = generator.normal(size=(2, 3, INPUTS)).astype(np.float32)
    y = generator.normal(size=(2, 3, OUTPUTS)).astype(np.float32)
    ids = np.array([adapter.address, 0, adapter.address, 0, 0, adapter.address])
    (z,) = session.run(None, {"x": x, "y": y, "adapters": ids})
    parts = [each.astype(np.float64) for each in (*drawn["0"], *second)]
    added = np.concatenate([x @ parts[0].T @ parts[1], x @ parts[2].T @ parts[3]], axis=2)
    has = (ids != 0).reshape(2, 3)
    np.testing.assert_allclose(z[has], (y + added)[has], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(z[~has], y[~has])
    with pytest.raises(Exception, match="inputs of Adapt do not fit: adapters and rows"):
        session.run(None, {"x": x, "y": y, "adapters": ids[1:]})


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_of_tables_get_those_of_the_adapter(
    kernels: Kernels, processor: str, dtype: type
) -> None:
    """Each token of a text looks up its column of A."""
    adapter, drawn = draw(kernels, 1, 5, dtype, {"words": (0, OUTPUTS)})
    inputs = {"ids": np.int64, "y": np.float32, "adapters": np.int64}
    node = helper.make_node(
        "AdaptLookup", list(inputs), ["z"], domain="maskdial", projections="words"
    )
    values = [helper.make_tensor_value_info(n, TYPES[np.dtype(k)], None) for n, k in inputs.items()]
    output = helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)
    session = open_graph(kernels, helper.make_graph([node], "adapt", values, [output]))
    ids = np.array([[0, 33, INPUTS - 1], [16, 15, 64]])
    y = np.random.default_rng(1).normal(size=(2, 3, OUTPUTS)).astype(np.float32)
    addresses = np.array([adapter.address, 0, adapter.address, adapter.address, 0, 0])
    (z,) = session.run(None, {"ids": ids, "y": y, "adapters": addresses})
    a, b = (each.astype(np.float64) for each in drawn["words"])
    has = (addresses != 0).reshape(2, 3)
    np.testing.assert_allclose(z[has], (y + a.T[ids] @ b)[has], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(z[~has], y[~has])
    for changes, words in (
        ({"ids": ids + 1}, "ids and an adapter's table"),
        ({"ids": ids - 1}, "ids and an adapter's table"),
        ({"adapters": addresses[1:]}, "adapters and rows"),
        ({"y": y[:, 1:]}, "ids and y"),
    ):
        with pytest.raises(Exception, match=f"inputs of AdaptLookup do not fit: {words}"):
            session.run(None, {"ids": ids, "y": y, "adapters": addresses} | changes)


def test_rows_beyond_the_calibrated_range_are_not_clipped(kernels: Kernels) -> None:
    """A fixed scale was chosen without the adapter; adapted rows have scales of their own."""
    session = open_linear(kernels, "Linear", adapts=True)
    nothing, _ = draw(kernels, 1, 4, np.float16, {"none": (0, 4)})
    generator = np.random.default_rng(4)
    x = np.float32(3 * 127 * STEP) * generator.uniform(-1, 1, (4, INPUTS)).astype(np.float32)
    eye = np.eye(INPUTS, dtype=np.float32) * np.float32(100 * STEP)
    zeros = np.zeros(INPUTS, np.int64)
    # The weights, as the operator multiplies by them.
    rows = session.run(None, {"x": eye, "adapters": zeros})[0] / (100 * STEP)
    expected = x @ rows
    adapted = session.run(None, {"x": x, "adapters": np.full(4, nothing.address)})[0]
    clipped = session.run(None, {"x": x, "adapters": zeros[:4]})[0]
    spread = expected.std()
    assert np.abs(adapted - expected).max() < 0.05 * spread
    assert np.abs(clipped - expected).max() > 0.5 * spread


def open_hybrid(kernels: Kernels, *, adapters: bool, threads: int = 1) -> Runner:
    """The starter's causal graph."""
    bundle = load_bundles("hybrid", HYBRID)[0]
    options = SessionOptions(
        kernels=kernels, intra_op_threads=threads, kv_cache="auto", adapters=adapters
    )
    session = Session(bundle.graph, options)
    assert bundle.manifest.kv is not None
    layout = bundle.manifest.kv.stored_as(session.kv_cache)
    vocab_size = bundle.manifest.vocab_size
    return Runner(session, layout, slots=4, max_length=64, vocab_size=vocab_size, max_tokens=256)


def test_texts_of_several_adapters_in_one_pass(kernels: Kernels) -> None:
    """Prompts and steps of a model: each text has the bits that it has alone, or of the base."""
    runner, base = open_hybrid(kernels, adapters=True), open_hybrid(kernels, adapters=False)
    projections = runner._session.projections
    loaded = []
    for seed, layers in ((1, ""), (2, "q_proj")):
        loaded.append(PackedAdapter(kernels.path))
        for layer, each in random_matrices(HYBRID, seed, layers=layers).items():
            loaded[-1].add(each, projections[layer])
    ids = [0, loaded[0].address, loaded[1].address, loaded[0].address]
    generator = np.random.default_rng(7)
    texts = [generator.integers(10, 5000, size) for size in (20, 7, 31, 12)]

    def alone(which: Runner, text: int, slot: int = 0) -> list[NDArray[Any]]:
        """The logits of a text's last token, and of two steps."""
        if which.adapters is not None:
            which.adapters[:] = 0
            which.adapters[slot] = ids[text]
        found = [np.array(which.prefill(slot, texts[text], 0))[0]]
        for step in (50, 60):
            lengths = np.array(which.cache.lengths[: slot + 1], np.int64)
            token_ids = np.full(slot + 1, step)
            found.append(np.array(which.decode(token_ids, lengths, np.array([slot])))[0])
        return found

    expected = [alone(runner, text) for text in range(4)]
    for mine, its in zip(expected[0], alone(base, 0), strict=True):
        np.testing.assert_array_equal(mine, its)
    assert np.abs(expected[1][0] - expected[3][0]).max() > 0.1
    assert runner.adapters is not None
    runner.adapters[:] = ids
    together = np.array(runner.prefill_together(0, texts[:2]))
    np.testing.assert_array_equal(together, [expected[0][0], expected[1][0]])
    both = runner.decode_and_prefill
    assert both is not None
    lengths = np.array([20, 7, 0, 0])
    prompts = [Piece.of(2, texts[2], 0), Piece.of(3, texts[3], 0)]
    mixed = np.array(both(np.full(4, 50), lengths, np.array([0, 1]), prompts))
    np.testing.assert_array_equal(
        mixed, [expected[0][1], expected[1][1], expected[2][0], expected[3][0]]
    )
    lengths = np.array([21, 8, 31, 12])
    steps = np.array(runner.decode(np.array([60, 60, 50, 50]), lengths, np.arange(4)))
    np.testing.assert_array_equal(
        steps, [expected[0][2], expected[1][2], expected[2][1], expected[3][1]]
    )


@pytest.mark.parametrize(("path", "index"), [(HYBRID, 1), (SENTIMENT, 0)])
def test_masked_texts_of_several_adapters_in_one_pass(
    kernels: Kernels, path: Path, index: int
) -> None:
    """With all rows in the last layer, and with those only that the head reads."""
    graph = load_bundles("starter", path)[index].graph
    options = SessionOptions(kernels=kernels, intra_op_threads=1)
    base, session = Session(graph, options), Session(graph, replace(options, adapters=True))
    loaded = []
    for seed in (1, 2):
        loaded.append(PackedAdapter(kernels.path))
        for layer, each in random_matrices(path, seed).items():
            loaded[-1].add(each, session.projections[layer])
    lengths = np.array([12, 5, 9, 12], np.int32)
    ids = np.random.default_rng(3).integers(5, 5000, (4, 12))
    addresses = np.array([0, loaded[0].address, loaded[1].address, loaded[0].address])

    def run(which: Session, *texts: int) -> NDArray[np.float32]:
        longest = lengths[list(texts)].max()
        rows = np.arange(len(texts)) * longest + 2
        some = list(texts)
        feeds = {"input_ids": ids[some, :longest], "lengths": lengths[some], "rows": rows}
        return which.run(feeds | {"adapters": addresses[some]})

    together = run(session, 0, 1, 2, 3)
    for text in range(4):
        np.testing.assert_array_equal(together[text], run(session, text)[0])
    np.testing.assert_array_equal(together[0], run(base, 0)[0])
    assert np.abs(together[1:] - run(base, 1, 2, 3)).max(axis=1).min() > 1e-3


@pytest.mark.parametrize(("path", "index"), [(HYBRID, 0), (HYBRID, 1), (SENTIMENT, 0)])
def test_graphs_that_take_adapters_answer_the_same_without_one(
    kernels: Kernels, path: Any, index: int
) -> None:
    bundle = load_bundles("starter", path)[index]
    found = []
    for adapters in (False, True):
        options = SessionOptions(kernels=kernels, intra_op_threads=1, adapters=adapters)
        session = Session(bundle.graph, options)
        assert bool(session.projections) == adapters
        if bundle.manifest.kv is None:
            found.append(masked_logits(session, bundle.manifest.golden))
        else:
            vocab_size = bundle.manifest.vocab_size
            runner = Runner(
                session, bundle.manifest.kv, slots=1, max_length=64, vocab_size=vocab_size
            )
            found.append(causal_logits(runner, bundle.manifest.golden))
    np.testing.assert_array_equal(found[1], found[0])


def test_the_load_test_times_steps_with_and_without(kernels: Kernels, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = ["adapters", "--bundle", str(HYBRID), "--rank", "4", "--layers", "q_proj"]
    assert loadtests([*command, "--seconds", "0.01", "--output", str(report)]) == 0
    content = json.loads(report.read_text())
    assert content["layers"] == 6
    assert content["bytes"] == 6 * 2 * 4 * (256 + 256)
    assert len(content["milliseconds"]) == 5
    assert loadtests([*command[:-1], "nothing", "--seconds", "0.01"]) == 1
