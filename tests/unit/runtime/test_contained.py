"""A graph that is loaded from bytes reads no other file, wherever it has a tensor."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from maskdial.bundle.adapter import AdapterHead
from maskdial.errors import BundleError
from maskdial.kernels.contained import check_contained
from maskdial.runtime.head import Head

COLUMNS = 4
HIDDEN = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["rows", COLUMNS])
LOGITS = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1])
OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
Place = Callable[[TensorProto], onnx.ModelProto]


def inside(values: list[float]) -> TensorProto:
    return helper.make_tensor("w", TensorProto.FLOAT, [len(values)], values)


def external(**keys: str) -> TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in keys.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def model(
    nodes: list[onnx.NodeProto], initializers: tuple[TensorProto, ...] = (), **more: object
) -> onnx.ModelProto:
    nodes.append(helper.make_node("Identity", ["w"], ["logits"]))
    graph = helper.make_graph(nodes, "g", [HIDDEN], [LOGITS], list(initializers))
    return helper.make_model(graph, opset_imports=OPSETS, ir_version=9, **more)


def constant(tensor: TensorProto, name: str = "w") -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=tensor)


def as_initializer(tensor: TensorProto) -> onnx.ModelProto:
    return model([], (tensor,))


def as_attribute(tensor: TensorProto) -> onnx.ModelProto:
    return model([constant(tensor)])


def in_a_subgraph(tensor: TensorProto) -> onnx.ModelProto:
    result = helper.make_tensor_value_info("inner", TensorProto.FLOAT, [1])
    branches = {
        name: helper.make_graph([constant(tensor, "inner")], name, [], [result])
        for name in ("then_branch", "else_branch")
    }
    truth = helper.make_tensor("t", TensorProto.BOOL, [], [True])
    return model([constant(truth, "t"), helper.make_node("If", ["t"], ["w"], **branches)])


def in_a_function(tensor: TensorProto) -> onnx.ModelProto:
    body = helper.make_function("own", "F", [], ["f"], [constant(tensor, "f")], OPSETS[:1])
    call = helper.make_node("F", [], ["w"], domain="own")
    return model([call], functions=[body])


def among_sparse(tensor: TensorProto) -> onnx.ModelProto:
    whole = model([constant(inside([1.0]))])
    sparse = whole.graph.sparse_initializer.add(dims=[1])
    sparse.values.CopyFrom(tensor)
    return whole


def in_training(tensor: TensorProto) -> onnx.ModelProto:
    whole = model([constant(inside([1.0]))])
    whole.training_info.add().algorithm.initializer.append(tensor)
    return whole


PLACES = (as_initializer, as_attribute, in_a_subgraph, in_a_function, among_sparse, in_training)


def load(content: bytes) -> Head:
    settings = AdapterHead(task="classify", labels=("a",), rows="first", sha256="0" * 64)
    return Head("tricky", settings, content, COLUMNS)


@pytest.mark.parametrize("place", PLACES)
def test_a_head_reads_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    (tmp_path / "keys.txt").write_bytes(b"alice:topsecret")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BundleError, match="'tricky': its head has data in another file"):
        load(place(external(location="keys.txt")).SerializeToString())


@pytest.mark.parametrize("place", PLACES[:4])
def test_a_head_with_its_data_is_computed(place: Place) -> None:
    assert load(place(inside([0.5])).SerializeToString())(np.zeros((1, COLUMNS), np.float32)) == 0.5


def test_halves_of_a_place_are_one(tmp_path: Path) -> None:
    """Protobuf joins the parts of a message that come apart, and each of them alone is refused."""
    located = TensorProto(name="w", data_location=TensorProto.EXTERNAL)
    named = external(location="keys.txt")
    named.ClearField("data_location")
    for tensor in (located, named):
        with pytest.raises(BundleError, match="data in another file"):
            check_contained(as_attribute(tensor).SerializeToString(), "it")


@pytest.mark.parametrize(
    "content", [b"\xff" * 20, b"\x18\0\0\0ORTM\0\0\0\0", b"\x08\x0a\x12\x04ORTM"]
)
def test_what_is_no_onnx_is_refused(content: bytes) -> None:
    with pytest.raises(BundleError, match="is no ONNX graph"):
        load(content)
