"""Rewrites a graph for ONNX Runtime's WebGPU provider, which lacks some operators and forms.

- ``FusedMatMul``, which multiplies by the transposed embeddings, becomes ``Gemm``.
- Products of int8 weights become ``MatMul`` of the floats that they stand for, which ONNX Runtime
  computes when it loads the graph. Inputs are not rounded.
- ``rows`` are gathered as they are: flattening them would be left to the CPU, as 64-bit integers.
- Attention is rewritten by `maskdial.kernels.webgpu_attention`.

Weights that are larger than any buffer are refused.

The graph on disk stays as it is, and so do the graphs for copies, which are built here as well.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import NodeProto, TensorProto, helper

from maskdial.errors import BundleError
from maskdial.kernels.graph import Graph, attributes_of
from maskdial.kernels.rewrite import int8_product
from maskdial.kernels.webgpu_attention import rewrite_attention

_PREFIX = "webgpu."
_Value = tuple[str, int, list[str | int]]  # name, element type and shape


def rewrite_for_webgpu(
    graph: Path, attention_works: Callable[[], bool], max_buffer_bytes: int | None = None
) -> bytes:
    """The serialized graph; its external data stays where it is.

    Args:
        graph: to be rewritten.
        attention_works: whether ``MultiHeadAttention`` is right at all lengths; asked if the graph
            has it.
        max_buffer_bytes: the size of the adapter's largest buffer, if it is known.

    Raises:
        BundleError: the file is not a graph, has attention that WebGPU lacks, or a weight that no
            buffer of the adapter holds.
    """
    try:
        model = onnx.load(graph, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise BundleError(f"cannot read {graph}: {error}") from error
    view = Graph(model.graph)
    if any(attributes_of(node).get("softcap") for node in view.nodes):
        raise BundleError(
            "WebGPU's attention ignores the cap of its scores (softcap); serve the model with "
            "--provider cpu"
        )
    _rewrite_int8_products(view)
    _rewrite_products(view)
    _take_rows(view)
    rewrite_attention(view, attention_works)
    if max_buffer_bytes is not None:
        _check_weights(view, max_buffer_bytes)
    serialized: bytes = model.SerializeToString()
    return serialized


def _check_weights(graph: Graph, limit: int) -> None:
    """Refuses weights that one buffer cannot hold.

    Raises:
        BundleError: there is one.
    """
    # ONNX Runtime computes the floats of int8 weights when it loads the graph.
    of_floats = {node.input[0] for node in graph.nodes if node.op_type == "Cast"}
    for weight in graph.proto.initializer:
        element = TensorProto.FLOAT if weight.name in of_floats else weight.data_type
        num_bytes = prod(weight.dims) * helper.tensor_dtype_to_np_dtype(element).itemsize
        if num_bytes > limit:
            raise BundleError(
                f"the weight {weight.name!r} takes {num_bytes / 1e6:.2f} MB, and the GPU's largest "
                f"buffer holds {limit / 1e6:.2f} MB; export the model in a lower precision, or "
                "serve it with --provider cpu"
            )


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
        raise BundleError(
            "WebGPU has no products of integers as the graph has them; serve the model with "
            "--provider cpu"
        )


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


def _take_rows(graph: Graph) -> None:
    """Removes what flattens ``rows``, which have one dimension."""
    replacements: dict[int, NodeProto | None] = {}
    for node in graph.users("rows"):
        if node.op_type != "Reshape" or graph.integers(node.input[1]) != [-1]:
            continue
        for user in graph.users(node.output[0]):
            for index, name in enumerate(user.input):
                if name == node.output[0]:
                    user.input[index] = "rows"
        replacements[id(node)] = None
    graph.replace(replacements)


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
