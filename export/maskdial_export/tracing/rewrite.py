"""Rewrites of the traced graph that go beyond onnxscript's optimizer."""

import ast
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]
_SCOPES = (
    "pkg.torch.onnx.name_scopes"  # set by torch: the modules around an operator, outermost first
)
MODULES = "maskdial.modules"
PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")
NAMED = (*PRODUCTS, "Gather")
# Fused norms, and which of their inputs is the weight
_NORM_WEIGHTS = {"SimplifiedLayerNormalization": 1, "SkipSimplifiedLayerNormalization": 2}
_ROW_WISE = (
    *PRODUCTS,
    "Add",
    "BiasGelu",
    "Cast",
    "FastGelu",
    "Gelu",
    "LayerNormalization",
    "Mul",
    "Tanh",
)


def constant(value: ir.Value | None) -> Array | None:
    """The array of an initializer or constant; None if the value is computed."""
    return None if value is None or value.const_value is None else value.const_value.numpy()


def add_initializer(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """The initializer of that name, added if the graph does not have it yet."""
    if name in graph.initializers:
        return graph.initializers[name]
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    graph.register_initializer(value)
    return value


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Replaces a value everywhere; a graph output keeps its name."""
    if old.is_graph_output():
        new.name, old.name = old.name, None
        new.type = new.type or old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def name_modules(graph: ir.Graph) -> None:
    """Labels each matrix product and lookup with its module's name in the checkpoint."""
    for node in graph:
        scopes = node.metadata_props.get(_SCOPES)
        if scopes is not None and node.op_type in NAMED:
            module = ast.literal_eval(scopes)[-2]  # the last one is the operator
            node.metadata_props[MODULES] = module.removeprefix("model.")  # our wrapper's attribute


def modules_of(node: ir.Node) -> tuple[str, ...]:
    """The modules that a product or lookup belongs to; several if they were packed."""
    return tuple(filter(None, node.metadata_props.get(MODULES, "").split(",")))


def packs_of(graph: ir.Graph) -> list[tuple[str, ...]]:
    """The groups of modules that are multiplied as one product."""
    packs = (modules_of(node) for node in graph)
    return [modules for modules in packs if len(modules) > 1]


def _join_modules(node: ir.Node, sources: Sequence[ir.Node]) -> None:
    node.metadata_props[MODULES] = ",".join(name for each in sources for name in modules_of(each))


def share_transposed_weights(graph: ir.Graph) -> None:
    """Lets a tied output layer read the embedding table, so that the weights are stored once.

    The tracer stores the output layer's weight a second time, transposed to
    (hidden_size, vocab_size). ``MatMul`` becomes ``Gemm`` with ``transB`` on the embedding
    (vocab_size, hidden_size), with rows flattened to two dimensions.
    """
    embeddings = [node.inputs[0] for node in graph if node.op_type == "Gather"]
    for node in list(graph):
        if node.op_type not in ("MatMul", "FusedMatMul") or _transposes(node):
            continue
        weight = constant(node.inputs[1])
        if weight is None or weight.ndim != 2:
            continue
        for embedding in embeddings:
            table = constant(embedding)
            if table is None or table.shape != weight.shape[::-1]:
                continue
            if embedding is not None and np.array_equal(table, weight.T):
                _multiply_transposed(graph, node, embedding, *table.shape)
                break


def _transposes(node: ir.Node) -> bool:
    return any(node.attributes.get_int(name, False) for name in ("transA", "transB"))


def _multiply_transposed(
    graph: ir.Graph, node: ir.Node, embedding: ir.Value, vocab_size: int, hidden_size: int
) -> None:
    alpha = node.attributes.get_float("alpha", 1.0)
    name = node.outputs[0].name
    flat_shape = add_initializer(graph, f"{name}.flat_shape", np.array([-1, hidden_size]))
    nodes = []
    # Where rows were gathered the batch is 1, and the shape needs no computing in every pass.
    shape = node.outputs[0].shape
    if shape is not None and len(shape) == 3 and shape[0] == 1:
        full_shape = add_initializer(graph, f"{name}.full_shape", np.array([1, -1, vocab_size]))
    else:
        width = add_initializer(graph, f"{name}.width", np.array([vocab_size]))
        rows = ir.node("Shape", [node.inputs[0]], {"start": 0, "end": -1})
        joined = ir.node("Concat", [rows.outputs[0], width], {"axis": 0})
        full_shape = joined.outputs[0]
        nodes = [rows, joined]
    flat = ir.node("Reshape", [node.inputs[0], flat_shape])
    product = ir.node("Gemm", [flat.outputs[0], embedding], {"transB": 1, "alpha": alpha})
    _join_modules(product, [node])
    full = ir.node("Reshape", [product.outputs[0], full_shape])
    ir.convenience.replace_nodes_and_values(
        graph, node, [node], [*nodes, flat, product, full], node.outputs, full.outputs
    )


def cancel_reshapes(graph: ir.Graph) -> None:
    """Removes reshapes that undo each other: models split heads, and operators join them."""
    for node in graph:
        if node.op_type != "Reshape" or node.outputs[0] in graph.outputs:  # which keep their names
            continue
        source = _before_reshape(node.outputs[0])
        if source is not None and _same_shape(source.shape, node.outputs[0].shape):
            ir.convenience.replace_all_uses_with(node.outputs[0], source)


_SWAP = (0, 2, 1)
_ELEMENTWISE = frozenset({"Add", "Cast", "Identity", "Mul", "Sigmoid", "Sub"})


def cancel_transposes(graph: ir.Graph) -> None:
    """Removes the transposes around a recurrent layer's channels, (batch, channels, length).

    The operators between two of them that undo each other compute (batch, length, channels), so
    that the products after them are those of rows. Operators that are left without use remain.
    """
    swapped: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        sources = [value for value in node.inputs if value is not None]
        if node.op_type == "Transpose" and tuple(node.attributes.get_ints("perm", ())) == _SWAP:
            (source,) = sources
            before = swapped.get(source)
            if before is None:
                swapped[node.outputs[0]] = source
            else:
                replace_value(node.outputs[0], before)
        elif sources and sources[0] in swapped and _keeps_layout(node, sources, swapped):
            inputs = [swapped.get(value, value) for value in sources]
            attributes = dict(node.attributes)
            if node.op_type == "Split":
                attributes["axis"] = ir.AttrInt64("axis", _SWAP[attributes["axis"].as_int()])
            twin = ir.node(
                node.op_type, inputs, attributes, domain=node.domain, num_outputs=len(node.outputs)
            )
            for old, new in zip(node.outputs, twin.outputs, strict=True):
                new.type = old.type
                if old.shape is not None and len(old.shape) == len(_SWAP):
                    new.shape = ir.Shape([old.shape[axis] for axis in _SWAP])
                swapped[old] = new
            graph.insert_after(node, twin)


def _keeps_layout(
    node: ir.Node, sources: Sequence[ir.Value], swapped: dict[ir.Value, ir.Value]
) -> bool:
    """Whether a node computes the same of swapped inputs, with its results swapped."""
    if node.op_type == "Split":
        return node.attributes.get_int("axis", 0) in (1, 2)
    numbers = (constant(value) for value in sources if value not in swapped)
    return node.op_type in _ELEMENTWISE and all(
        number is not None and number.ndim == 0 for number in numbers
    )


def _same_shape(left: ir.Shape | None, right: ir.Shape | None) -> bool:
    if left is None or right is None or len(left) != len(right):
        return False
    pairs = zip(left, right, strict=True)
    return all(one == other and one != ir.SymbolicDim(None) for one, other in pairs)


def flatten_heads(graph: ir.Graph) -> None:
    """Runs a head on the gathered rows, (num_rows, hidden_size).

    transformers' heads need a batch dimension, which the trace adds around them. Removing it from
    the logits would copy them all.
    """
    for squeeze in list(graph):
        if squeeze.op_type != "Squeeze" or squeeze.outputs[0] not in graph.outputs:
            continue
        unsqueeze = _before_row_wise(squeeze.inputs[0])
        if unsqueeze is None:
            continue
        for node in (unsqueeze, squeeze):
            source = node.inputs[0]
            assert source is not None
            replace_value(node.outputs[0], source)
            graph.remove(node, safe=True)


def _before_row_wise(value: ir.Value | None) -> ir.Node | None:
    """The ``Unsqueeze`` before a chain of row-wise operators."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Unsqueeze":
            return node
        computed = [each for each in node.inputs if each is not None and constant(each) is None]
        if node.op_type not in _ROW_WISE or len(computed) != 1:
            return None
        value.shape = None  # it had the batch
        value = computed[0]
    return None


def sum_in_order(graph: ir.Graph) -> None:
    """Replaces sums over a text's tokens, (batch, length, width), by running sums.

    ``ReduceSum`` adds in an order that depends on the length, so the last bits of a mean over
    tokens would depend on the padding. A running sum always adds token by token, and masked tokens
    add zeros. float16 sums stay: they are for CUDA, where a running sum takes time quadratic in the
    length.
    """
    for node in list(graph):
        if node.op_type != "ReduceSum" or node.attributes.get_int("keepdims", True):
            continue
        summed, axes = node.inputs[0], constant(node.inputs[1])
        if summed is None or summed.shape is None or len(summed.shape) != 3 or axes is None:
            continue
        if axes.tolist() != [1] or _was_half(summed):
            continue
        axis = add_initializer(graph, "sum.axis", np.array(1))
        last = add_initializer(graph, "sum.last", np.array(-1))
        running = ir.node("CumSum", [summed, axis])
        total = ir.node("Gather", [running.outputs[0], last], {"axis": 1})
        graph.insert_before(node, [running, total])
        replace_value(node.outputs[0], total.outputs[0])
        graph.remove(node, safe=True)


def _was_half(value: ir.Value) -> bool:
    producer = value.producer()
    source = None if producer is None or producer.op_type != "Cast" else producer.inputs[0]
    return ir.DataType.FLOAT16 in (value.dtype, None if source is None else source.dtype)


def part_skip_layer_norms(graph: ir.Graph) -> None:
    """Splits ``SkipLayerNormalization`` into ``Add`` and ``LayerNormalization``.

    With ONNX Runtime 1.31 on the CPU the fused operator takes 3 ns per element, the parts together
    0.5. (``SkipSimplifiedLayerNormalization`` is as fast as its parts.)
    """
    for node in list(graph):
        if node.op_type != "SkipLayerNormalization":
            continue
        source, skip, gamma, beta, bias = [*node.inputs, None, None][:5]
        nodes = []
        if bias is not None:
            nodes.append(ir.node("Add", [source, bias]))
            source = nodes[-1].outputs[0]
        nodes.append(ir.node("Add", [source, skip]))
        total = nodes[-1].outputs[0]
        attributes = {"axis": -1, "epsilon": node.attributes.get_float("epsilon", 1e-12)}
        nodes.append(ir.node("LayerNormalization", [total, gamma, beta], attributes))
        old, new = [node.outputs[0]], [nodes[-1].outputs[0]]
        if len(node.outputs) > 3:
            old.append(node.outputs[3])
            new.append(total)
        ir.convenience.replace_nodes_and_values(graph, node, [node], nodes, old, new)


def narrow_norms(graph: ir.Graph) -> None:
    """Casts the weights of float16 norms to float16.

    Gemma multiplies by ``1 + weight`` in float32 and rounds the product, but
    ``SkipSimplifiedLayerNormalization`` has a single type for all inputs and outputs.
    """
    for node in list(graph):
        index = _NORM_WEIGHTS.get(node.op_type)
        if index is None or node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.FLOAT16:
            continue
        weight, output = constant(node.inputs[index]), node.outputs[0]
        if weight is None or weight.dtype != np.float32:
            continue
        casts = [use.node for use in output.uses()]
        if not all(map(_halves, casts)):
            continue
        name = f"{output.name}.weight"
        node.replace_input_with(index, add_initializer(graph, name, weight.astype(np.float16)))
        output.type = ir.TensorType(ir.DataType.FLOAT16)
        for cast in casts:
            replace_value(cast.outputs[0], output)
            graph.remove(cast, safe=True)


def _halves(node: ir.Node) -> bool:
    """Whether a node casts to float16."""
    return node.op_type == "Cast" and node.attributes.get_int("to") == ir.DataType.FLOAT16


def give_attention_biases(graph: ir.Graph) -> None:
    """Passes the biases of query, key and value to MultiHeadAttention, which adds them itself."""
    for node in graph:
        if node.op_type != "MultiHeadAttention" or any(node.inputs[3:4]):
            continue
        parts = [_projection(value) for value in node.inputs[:3]]
        biases = [part[2] for part in parts if part is not None and part[2] is not None]
        if len(biases) < 3:
            continue
        name = f"{node.outputs[0].name}.bias"
        node.replace_input_with(3, add_initializer(graph, name, np.concatenate(biases)))
        for index, part in enumerate(parts):
            assert part is not None
            node.replace_input_with(index, part[0].outputs[0])


def pack_projections(graph: ir.Graph) -> None:
    """Computes GroupQueryAttention's query, key and value by one ``MatMul``, as a packed tensor.

    If a model splits them from one projection, the tensor before the split is used. Models with
    other operators between projection and attention are left unchanged.
    """
    for node in list(graph):
        if node.op_type != "GroupQueryAttention":
            continue
        sources = [_before_reshape(value) for value in node.inputs[:3]]
        packed = _before_split(sources) or _project_once(graph, node, sources)
        if packed is not None:
            node.replace_input_with(0, packed)
            node.replace_input_with(1, None)
            node.replace_input_with(2, None)


def project_packs(graph: ir.Graph, packs: Sequence[tuple[str, ...]]) -> None:
    """Replaces the products of each pack of modules by one product and a ``Split``.

    The packed weight is then the same as in a graph whose attention takes packed projections, so
    both can share it. A pack that is not made of plain products in this graph is left unchanged.
    """
    products = {modules_of(node): node for node in graph if node.op_type == "MatMul"}
    for pack in packs:
        if any((name,) not in products for name in pack):
            continue
        nodes = [products[(name,)] for name in pack]
        outputs = [_biased(node) for node in nodes]
        parts = [_projection(output) for output in outputs]
        first = next(node for node in graph if node in nodes)
        packed = _project_once(graph, first, outputs)
        if packed is None:
            continue
        sizes = np.array([part[1].shape[1] for part in parts if part is not None])
        name = f"{first.outputs[0].name}.sizes"
        split = ir.node(
            "Split",
            [packed, add_initializer(graph, name, sizes)],
            {"axis": -1},
            num_outputs=len(pack),
        )
        graph.insert_before(first, [split])
        for old, new in zip(outputs, split.outputs, strict=True):
            new.shape, new.type = old.shape, old.type
            replace_value(old, new)


def _biased(product: ir.Node) -> ir.Value:
    """A product's result, after its bias if its only user adds one."""
    (output,) = product.outputs
    users = [user for user, _ in output.uses()]
    if len(users) == 1 and users[0].op_type == "Add":
        biased = users[0].outputs[0]
        if _projection(biased) is not None:
            return biased
    return output


def _before_reshape(value: ir.Value | None) -> ir.Value | None:
    """The value before any reshapes."""
    while value is not None and (producer := value.producer()) is not None:
        if producer.op_type != "Reshape":
            break
        value = producer.inputs[0]
    return value


def _before_split(sources: Sequence[ir.Value | None]) -> ir.Value | None:
    producers = [None if value is None else value.producer() for value in sources]
    split = producers[0]
    if split is None or split.op_type != "Split" or split.attributes.get_int("axis", 0) != 2:
        return None
    return split.inputs[0] if list(split.outputs) == list(sources) else None


def _project_once(
    graph: ir.Graph, attention: ir.Node, sources: Sequence[ir.Value | None]
) -> ir.Value | None:
    """Replaces products of one input by a single ``MatMul`` (and ``Add``); None if they differ."""
    parts = [_projection(value) for value in sources]
    weights, biases, inputs, products = [], [], set(), []
    for part in parts:
        if part is None:
            return None
        inputs.add(part[0].inputs[0])
        products.append(part[0])
        weights.append(part[1])
        biases.append(part[2])
    if len(inputs) != 1 or len({bias is None for bias in biases}) != 1:
        return None
    name = f"{attention.outputs[0].name}.qkv"
    weight = add_initializer(graph, f"{name}.weight", np.concatenate(weights, axis=1))
    nodes = [ir.node("MatMul", [inputs.pop(), weight])]
    _join_modules(nodes[0], products)
    given = [bias for bias in biases if bias is not None]
    if given:
        bias = add_initializer(graph, f"{name}.bias", np.concatenate(given))
        nodes.append(ir.node("Add", [nodes[0].outputs[0], bias]))
    graph.insert_before(attention, nodes)
    return nodes[-1].outputs[0]


def _projection(value: ir.Value | None) -> tuple[ir.Node, Array, Array | None] | None:
    """The product, weight and bias that compute a value; None if it is no such product."""
    node = None if value is None else value.producer()
    bias = None
    if node is not None and node.op_type == "Add":
        bias = constant(node.inputs[1])
        node = None if bias is None or node.inputs[0] is None else node.inputs[0].producer()
    if node is None or node.op_type != "MatMul":
        return None
    weight = constant(node.inputs[1])
    return None if weight is None else (node, weight, bias)
