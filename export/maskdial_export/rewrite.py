"""Rewrites of the traced graph that no library does for us."""

import numpy as np
import onnx_ir as ir


def _constant(value: ir.Value | None) -> np.ndarray | None:
    return None if value is None or value.const_value is None else value.const_value.numpy()


def _add_initializer(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    graph.register_initializer(value)
    return value


def share_transposed_weights(graph: ir.Graph) -> None:
    """Lets an output layer that is tied to the embedding read the embedding itself.

    The tracer stores the output layer's weight transposed, (hidden_size, vocab_size), beside the
    embedding (vocab_size, hidden_size) that it equals. ``MatMul`` becomes ``Gemm`` with ``transB``,
    on rows flattened to two dimensions, and the second copy is gone.
    """
    embeddings = {
        node.inputs[0] for node in graph if node.op_type == "Gather" and node.inputs[0] is not None
    }
    for node in list(graph):
        if node.op_type not in ("MatMul", "FusedMatMul") or _transposes(node):
            continue
        weight = _constant(node.inputs[1])
        if weight is None or weight.ndim != 2:
            continue
        for embedding in embeddings:
            table = _constant(embedding)
            if table is None or table.shape != weight.shape[::-1]:
                continue
            if np.array_equal(table, weight.T):
                _multiply_transposed(graph, node, embedding)
                break


def _transposes(node: ir.Node) -> bool:
    return any(node.attributes.get_int(name, 0) for name in ("transA", "transB"))


def _multiply_transposed(graph: ir.Graph, node: ir.Node, embedding: ir.Value) -> None:
    hidden_size = embedding.const_value.shape[1]
    vocab_size = embedding.const_value.shape[0]
    alpha = node.attributes.get_float("alpha", 1.0)
    name = node.outputs[0].name
    flat_shape = _add_initializer(graph, f"{name}.flat_shape", np.array([-1, hidden_size]))
    full_shape = _add_initializer(graph, f"{name}.full_shape", np.array([1, -1, vocab_size]))
    flat = ir.node("Reshape", [node.inputs[0], flat_shape])
    product = ir.node("Gemm", [flat.outputs[0], embedding], {"transB": 1, "alpha": alpha})
    full = ir.node("Reshape", [product.outputs[0], full_shape])
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], [flat, product, full], node.outputs, full.outputs
    )


def pack_projections(graph: ir.Graph) -> None:
    pass
