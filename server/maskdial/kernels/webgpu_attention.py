"""Rewrites the attention of masked graphs for ONNX Runtime's WebGPU provider.

``MultiHeadAttention`` takes no ``key_padding_mask`` there: the texts' lengths become a bias for the
scores, which all layers share, or which is added to a layer's own (a window's).

Its shader for 32 tokens and more reads a block of 8 or 16 keys with one lane of a subgroup each. On
an adapter whose subgroups are smaller, as those of 4 lanes in software, it computes something else.
There attention becomes two ``MatMul`` and a ``Softmax``.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from maskdial.errors import BundleError
from maskdial.kernels.graph import LENGTHS, Graph, attributes_of

_ADDED, _KEY_PADDING_MASK, _BIAS = 3, 4, 5  # inputs of MultiHeadAttention
_PREFIX = "webgpu."
_HIDDEN = -1e30
"""The bias of padding: finite, since the difference of two infinite scores is not a number."""


def rewrite_attention(graph: Graph, attention_works: Callable[[], bool]) -> None:
    """Replaces each layer's mask of lengths by a bias (batch, 1, length, length).

    Raises:
        BundleError: a layer masks something else, or does not state how wide its heads are.
    """
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
            "WebGPU cannot mask attention as the graph does (attention sinks, or half precision); "
            "serve the model with --provider cpu"
        )
    works = attention_works()
    bias, nodes, constants = _length_bias()
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
        scores_bias = biases.get(own, bias)
        if not works:
            its_nodes, its_constants = _plain_attention(graph, node, scores_bias)
            nodes += its_nodes
            constants += its_constants
            continue
        rest = inputs[_BIAS + 1 :]
        inputs = [*inputs[:_KEY_PADDING_MASK], "", scores_bias, *rest]
        attention = helper.make_node(
            node.op_type, inputs, node.output, domain=node.domain, **attributes_of(node)
        )
        nodes.append(attention)
    graph.set_nodes(nodes, constants)


def _plain_attention(
    graph: Graph, node: NodeProto, scores_bias: str
) -> tuple[list[NodeProto], list[TensorProto]]:
    """``softmax(q k^T scale + bias) v`` of a ``MultiHeadAttention``: its nodes and constants.

    The scores of all pairs of tokens are in memory at once, (batch, heads, length, length).

    Raises:
        BundleError: the graph does not state how wide the heads are.
    """
    attributes, (output,) = attributes_of(node), node.output
    num_heads, name = attributes["num_heads"], f"{_PREFIX}{output}"
    widths = [graph.width(each) for each in node.input[:3]]
    if not all(widths):
        raise BundleError(
            "WebGPU's attention is wrong on this GPU, and for another form of it the graph has to "
            "state how wide heads are; serve the model with --provider cpu"
        )
    scale = attributes.get("scale") or (widths[0] // num_heads) ** -0.5
    values: dict[str, Any] = {
        "heads": np.array([0, 0, num_heads, -1], np.int64),
        "joined": np.array([0, 0, widths[2]], np.int64),
        "scale": np.array(scale, np.float32),
    }
    nodes: list[NodeProto] = []

    def add(kind: str, inputs: list[str], result: str, **settings: Any) -> str:
        nodes.append(helper.make_node(kind, inputs, [result], **settings))
        return result

    sources = list(node.input[:3])
    if added := node.input[_ADDED]:
        values["widths"] = np.array(widths, np.int64)
        parts = [f"{name}.added.{part}" for part in "qkv"]
        nodes.append(helper.make_node("Split", [added, f"{name}.widths"], parts, axis=0))
        sources = [
            add("Add", [source, part], f"{part}.sum")
            for source, part in zip(sources, parts, strict=True)
        ]
    query, key, value = (
        add(
            "Transpose",
            [add("Reshape", [source, f"{name}.heads"], f"{name}.{part}.heads")],
            f"{name}.{part}",
            perm=[0, 2, 3, 1] if part == "k" else [0, 2, 1, 3],
        )
        for source, part in zip(sources, "qkv", strict=True)
    )
    query = add("Mul", [query, f"{name}.scale"], f"{name}.scaled")
    scores = add("Add", [add("MatMul", [query, key], f"{name}.products"), scores_bias], f"{name}.s")
    weights = add("Softmax", [scores], f"{name}.weights", axis=-1)
    attended = add("MatMul", [weights, value], f"{name}.attended")
    attended = add("Transpose", [attended], f"{name}.rows", perm=[0, 2, 1, 3])
    add("Reshape", [attended, f"{name}.joined"], output)
    tensors = [numpy_helper.from_array(each, f"{name}.{part}") for part, each in values.items()]
    return nodes, tensors


def _length_bias() -> tuple[str, list[NodeProto], list[TensorProto]]:
    """The bias that hides the padding of each text: its name, nodes and constants."""
    constants = {
        "zero": np.array(0, np.int32),
        "one": np.array(1, np.int32),
        "length_at": np.array([1], np.int64),
        "flat": np.array([], np.int64),
        "to_column": np.array([1], np.int64),
        "to_heads": np.array([1, 2], np.int64),
        "once": np.array([1], np.int64),
        "seen": np.array(0, np.float32),
        "hidden": np.array(_HIDDEN, np.float32),
    }

    def node(kind: str, inputs: list[str], output: str, **attributes: int) -> NodeProto:
        ours = [name if name in ("input_ids", LENGTHS) else _PREFIX + name for name in inputs]
        return helper.make_node(kind, ours, [_PREFIX + output], **attributes)

    nodes = [
        node("Shape", ["input_ids"], "shape"),
        node("Gather", ["shape", "length_at"], "length"),
        node("Reshape", ["length", "flat"], "scalar"),
        node("Cast", ["scalar"], "end", to=TensorProto.INT32),
        node("Range", ["zero", "end", "one"], "positions"),
        node("Unsqueeze", [LENGTHS, "to_column"], "column"),
        node("Less", ["positions", "column"], "valid"),
        node("Where", ["valid", "seen", "hidden"], "scores"),
        node("Unsqueeze", ["scores", "to_heads"], "row"),
        node("Concat", ["once", "once", "length", "once"], "sizes", axis=0),
        node("Expand", ["row", "sizes"], "bias"),
    ]
    tensors = [numpy_helper.from_array(each, _PREFIX + name) for name, each in constants.items()]
    return f"{_PREFIX}bias", nodes, tensors


def attention_check(length: int, num_heads: int, head_dim: int) -> bytes:
    """A graph of ``MultiHeadAttention`` alone, over one text.

    It takes ``q``, ``k`` and ``v`` (1, length, num_heads * head_dim) and ``bias`` (1, 1, length,
    length), and gives ``attended``.
    """
    info, rows = helper.make_tensor_value_info, [1, length, num_heads * head_dim]
    names: list[tuple[str, list[int]]] = [(name, rows) for name in "qkv"]
    names.append(("bias", [1, 1, length, length]))
    node = helper.make_node(
        "MultiHeadAttention",
        [*"qkv", "", "", "bias"],
        ["attended"],
        domain="com.microsoft",
        num_heads=num_heads,
    )
    inputs = [info(name, TensorProto.FLOAT, shape) for name, shape in names]
    outputs = [info("attended", TensorProto.FLOAT, rows)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model


def half_check() -> bytes:
    """A graph that doubles ``x``, float16 (4,)."""
    info = helper.make_tensor_value_info
    node = helper.make_node("Add", ["x", "x"], ["twice"])
    inputs, outputs = (info(name, TensorProto.FLOAT16, [4]) for name in ("x", "twice"))
    graph = helper.make_graph([node], "half", [inputs], [outputs])
    opsets = [helper.make_opsetid("", 17)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return model
