"""Rewrites a graph for ONNX Runtime's WebGPU provider, which lacks some operators and forms.

- ``FusedMatMul``, which multiplies by the transposed embeddings, becomes ``Gemm``.
- Products of int8 weights become ``MatMul`` of the floats that they stand for, which ONNX Runtime
  computes when it loads the graph. Inputs are not rounded.
- ``MultiHeadAttention`` takes no ``key_padding_mask`` there: the texts' lengths become a bias for
  the scores, which all layers share, or which is added to a layer's own (a window's).

The graph on disk stays as it is, and so do the graphs for copies, which are built here as well.
"""

from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import NodeProto, TensorProto, helper, numpy_helper

from maskdial.errors import BundleError
from maskdial.kernels.graph import LENGTHS, Graph, attributes_of
from maskdial.kernels.rewrite import int8_product

_KEY_PADDING_MASK, _BIAS = 4, 5  # inputs of MultiHeadAttention
_PREFIX = "webgpu."
_Value = tuple[str, int, list[str | int]]  # name, element type and shape
_MASKED = {TensorProto.FLOAT: -1e30, TensorProto.FLOAT16: -6e4}
"""A score that no key has: finite, since the difference of two infinite ones is not a number."""


def rewrite_for_webgpu(graph: Path) -> bytes:
    """The serialized graph; its external data stays where it is.

    Raises:
        BundleError: the file is not a graph, or has attention that WebGPU lacks.
    """
    try:
        model = onnx.load(graph, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise BundleError(f"cannot read {graph}: {error}") from error
    view = Graph(model.graph)
    if any(attributes_of(node).get("softcap") for node in view.nodes):
        raise BundleError("WebGPU's attention ignores the cap of its scores (softcap)")
    _rewrite_int8_products(view)
    _rewrite_products(view)
    _rewrite_attention(view)
    serialized: bytes = model.SerializeToString()
    return serialized


def _rewrite_int8_products(graph: Graph) -> None:
    replacements: dict[int, list[NodeProto]] = {}
    for node in graph.nodes:
        product = int8_product(graph, node)
        if product is None:
            continue
        weight, scale, bias = product.weights
        name = f"{_PREFIX}{product.output}"
        floats, scaled, summed = (f"{name}.{part}" for part in ("floats", "weight", "product"))
        nodes = [helper.make_node("Cast", [weight], [floats], to=TensorProto.FLOAT)]
        if product.attributes["transposed"]:
            nodes.append(helper.make_node("Transpose", [floats], [f"{floats}.t"], perm=[1, 0]))
            floats = f"{floats}.t"
        nodes.append(helper.make_node("Mul", [floats, scale], [scaled]))
        output = summed if bias else product.output
        nodes.append(helper.make_node("MatMul", [product.source, scaled], [output]))
        if bias:
            nodes.append(helper.make_node("Add", [summed, bias], [product.output]))
        replacements[id(product.last)] = nodes
    nodes = [each for node in graph.nodes for each in replacements.get(id(node), [node])]
    graph.set_nodes(nodes)
    graph.remove_unused()
    if "MatMulIntegerToFloat" in graph.kinds:
        raise BundleError("WebGPU has no products of integers as the graph has them")


def _rewrite_products(graph: Graph) -> None:
    """`Gemm` multiplies matrices only, as the rows of logits are; half precision wraps them."""
    replacements: dict[int, NodeProto | None] = {}
    for node in graph.nodes:
        attributes = attributes_of(node)
        if node.op_type != "FusedMatMul" or not attributes.keys() <= {"transB", "alpha"}:
            continue
        (source, weight), (product,) = node.input, node.output
        before = graph.producers.get(source)
        after = graph.users(product)
        if before is not None and before.op_type == "Unsqueeze":
            if len(after) != 1 or after[0].op_type != "Squeeze":
                continue
            source, (product,) = before.input[0], after[0].output
            replacements[id(after[0])] = None
        replacements[id(node)] = helper.make_node("Gemm", [source, weight], [product], **attributes)
    graph.replace(replacements)


def _rewrite_attention(graph: Graph) -> None:
    """Replaces each layer's mask of lengths by a bias (batch, 1, length, length)."""
    masked = [
        node
        for node in graph.nodes
        if node.op_type == "MultiHeadAttention"
        and len(node.input) > _KEY_PADDING_MASK
        and node.input[_KEY_PADDING_MASK]
    ]
    if not masked:
        return
    if {node.input[_KEY_PADDING_MASK] for node in masked} != {LENGTHS}:
        raise BundleError(
            "WebGPU cannot mask attention as the graph does (attention sinks, or half precision)"
        )
    bias, nodes, constants = _length_bias(TensorProto.FLOAT)
    layers = {id(node) for node in masked}
    biases: dict[str, str] = {}  # of windows, by the name of what is added
    for node in graph.nodes:
        if id(node) not in layers:
            nodes.append(node)
            continue
        inputs = list(node.input)
        own = inputs[_BIAS] if len(inputs) > _BIAS else ""
        if own and own not in biases:
            biases[own] = f"{_PREFIX}{own}"
            nodes.append(helper.make_node("Add", [own, bias], [biases[own]]))
        rest = inputs[_BIAS + 1 :]
        inputs = [*inputs[:_KEY_PADDING_MASK], "", biases.get(own, bias), *rest]
        attention = helper.make_node(
            node.op_type, inputs, node.output, domain=node.domain, **attributes_of(node)
        )
        nodes.append(attention)
    graph.set_nodes(nodes, constants)


def _length_bias(element: int) -> tuple[str, list[NodeProto], list[TensorProto]]:
    """The bias that hides the padding of each text: its name, nodes and constants."""
    constants = {
        "zero": np.array(0, np.int32),
        "one": np.array(1, np.int32),
        "length_at": np.array([1], np.int64),
        "flat": np.array([], np.int64),
        "to_column": np.array([1], np.int64),
        "to_heads": np.array([1, 2], np.int64),
        "once": np.array([1], np.int64),
        "seen": np.array(0, helper.tensor_dtype_to_np_dtype(element)),
        "hidden": np.array(_MASKED[element], helper.tensor_dtype_to_np_dtype(element)),
    }

    def node(kind: str, inputs: list[str], output: str, **attributes: int) -> NodeProto:
        ours = [name if name in ("input_ids", LENGTHS) else _PREFIX + name for name in inputs]
        return helper.make_node(kind, ours, [_PREFIX + output], **attributes)

    nodes = [
        node("Shape", ["input_ids"], "shape"),
        node("Gather", ["shape", "length_at"], "length"),
        node("Gather", ["shape", "length_at"], "length_again"),
        node("Reshape", ["length", "flat"], "scalar"),
        node("Cast", ["scalar"], "end", to=TensorProto.INT32),
        node("Range", ["zero", "end", "one"], "positions"),
        node("Unsqueeze", [LENGTHS, "to_column"], "column"),
        node("Less", ["positions", "column"], "valid"),
        node("Where", ["valid", "seen", "hidden"], "scores"),
        node("Unsqueeze", ["scores", "to_heads"], "row"),
        node("Concat", ["once", "once", "length_again", "once"], "sizes", axis=0),
        node("Expand", ["row", "sizes"], "bias"),
    ]
    tensors = [numpy_helper.from_array(each, _PREFIX + name) for name, each in constants.items()]
    return f"{_PREFIX}bias", nodes, tensors


def copy_graphs() -> dict[str, bytes]:
    """Graphs that copy rows of 4-byte elements: ``down`` from a device, ``up`` to it, ``across``.

    They take ``source`` (rows, width) or ``values`` (copied, width), and int64 ``from`` (copied,)
    and ``to`` (copied, 1); ``target`` (rows, width) is bound as an input and as the output.
    """
    source: _Value = ("source", TensorProto.INT32, ["source_rows", "width"])
    target: _Value = ("target", TensorProto.INT32, ["target_rows", "width"])
    written: _Value = ("written", TensorProto.INT32, ["target_rows", "width"])
    values: _Value = ("values", TensorProto.INT32, ["copied", "width"])
    take: _Value = ("from", TensorProto.INT64, ["copied"])
    put: _Value = ("to", TensorProto.INT64, ["copied", 1])
    gather = helper.make_node("Gather", ["source", "from"], ["values"])
    scatter = helper.make_node("ScatterND", ["target", "to", "values"], ["written"])
    graphs: dict[str, tuple[list[NodeProto], list[_Value], _Value]] = {
        "down": ([gather], [source, take], values),
        "up": ([scatter], [target, put, values], written),
        "across": ([gather, scatter], [source, take, target, put], written),
    }
    info = helper.make_tensor_value_info
    models = {}
    for name, (nodes, inputs, output) in graphs.items():
        graph = helper.make_graph(nodes, name, [info(*each) for each in inputs], [info(*output)])
        opsets = [helper.make_opsetid("", 18)]
        models[name] = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return {name: model.SerializeToString() for name, model in models.items()}
