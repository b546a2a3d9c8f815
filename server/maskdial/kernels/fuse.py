"""Fuses small operators of a graph with those of the kernels."""

from collections.abc import Collection

from onnx import NodeProto, helper

from maskdial.kernels.graph import BLOCK_PRODUCTS, DOMAIN, QUANTIZED, Graph, attributes_of

_PRODUCT_INPUTS = 4
"""A product's rows, weight, scale and bias."""
MAX_PRODUCTS = 3
"""Of one ``Linears``; ``src/projection.h``."""
_NORMED = {name: f"Norm{name}" for name in ("Linear", "Linears", "Linear4", "Linear8")}
_BRANCHES = QUANTIZED | {"SimplifiedLayerNormalization"}
"""Operators that compute the rows that a layer adds to its input."""
_ADDED_NORM = "SkipSimplifiedLayerNormalization", 3
"""And its inputs: the two terms of the sum, and the norm's weight."""
_NUM_NORM_OUTPUTS = 4
"""The norm, two statistics, and the sum."""
_EPSILON = 1e-5
"""Of norms that have no such attribute."""

_Replacements = dict[int, NodeProto | None]


def fuse_biases(graph: Graph) -> None:
    """Fuses ``Linear`` with the ``Add`` of a bias that follows; the results are the same bits."""
    replaced: _Replacements = {}
    for node in graph.nodes:
        if node.op_type != "Add":
            continue
        for name, bias in (node.input, reversed(node.input)):
            linear = graph.producer(name, "Linear")
            if linear is None or graph.num_uses(name) != 1 or len(linear.input) != 3:
                continue
            if graph.dims(bias) == graph.dims(linear.input[2]) and not _has_gelu(linear):
                fused = NodeProto()
                fused.CopyFrom(linear)
                fused.input.append(bias)
                fused.output[0] = node.output[0]
                replaced |= {id(linear): None, id(node): fused}
                break
    graph.replace(replaced)


def fuse_products(graph: Graph) -> None:
    """Fuses products of the same value to ``Linears``: its rows are quantized once."""
    groups: dict[tuple[object, ...], list[NodeProto]] = {}
    for node in graph.nodes:
        if node.op_type == "Linear" and len(node.input) <= _PRODUCT_INPUTS and not _has_gelu(node):
            attributes = sorted(attributes_of(node).items())
            groups.setdefault((node.input[0], *attributes), []).append(node)
    replaced: _Replacements = {}
    for group in groups.values():
        for start in range(0, len(group) - 1, MAX_PRODUCTS):
            products = group[start : start + MAX_PRODUCTS]
            if len(products) > 1:
                replaced |= {id(product): None for product in products}
                replaced[id(products[0])] = _linears(products)
    graph.replace(replaced)


def fuse_norms(graph: Graph, rows: Collection[str]) -> None:
    """Fuses the layer norm of a sum with the sum, if nothing else uses the sum: ``AddNorm``.

    ``rows`` are values whose shapes differ in the last dimension only; others may broadcast.
    """
    replaced: _Replacements = {}
    for node in graph.nodes:
        if node.op_type != "LayerNormalization" or any(node.output[1:]):
            continue
        attributes, (source, *weights) = attributes_of(node), node.input
        add = graph.producer(source, "Add")
        if add is None or graph.num_uses(source) != 1 or attributes.get("axis", -1) != -1:
            continue
        widths = {_width(graph, name) if name in rows else 0 for name in add.input}
        if widths == {*graph.dims(weights[0])} and all(map(graph.dims, weights)):
            epsilon = attributes.get("epsilon", _EPSILON)
            inputs, outputs = [*add.input, *weights], [node.output[0]]
            norm = helper.make_node("AddNorm", inputs, outputs, domain=DOMAIN, epsilon=epsilon)
            replaced |= {id(add): None, id(node): norm}
    graph.replace(replaced)


def fuse_rms_norms(graph: Graph) -> None:
    """Fuses a sum and its RMS norm with the product that alone reads the norm.

    This rewrite comes last: the others do not know the operators that it makes.
    """
    replaced: _Replacements = {}
    for node in graph.nodes:
        if (node.op_type, len(node.input), len(node.output)) != (*_ADDED_NORM, _NUM_NORM_OUTPUTS):
            continue
        (x, residual, norm), (normed, *statistics, total) = node.input, node.output
        product = graph.only_user(normed)
        if product is None or product.op_type not in _NORMED or product.input[0] != normed:
            continue
        # ONNX Runtime's operator also adds rows that broadcast.
        terms = (graph.producers.get(name) for name in (x, residual))
        adds_rows = any(term is not None and term.op_type in _BRANCHES for term in terms)
        if adds_rows and graph.dims(norm) and not any(map(graph.num_uses, statistics)):
            fused = helper.make_node(
                _NORMED[product.op_type],
                [x, residual, norm, *product.input[1:]],
                [total, *product.output],
                domain=DOMAIN,
                epsilon=attributes_of(node).get("epsilon", _EPSILON),
                **attributes_of(product),
            )
            replaced |= {id(node): fused, id(product): None}
    graph.replace(replaced)


def _linears(products: list[NodeProto]) -> NodeProto:
    """One node with the results of some products."""
    inputs, missing = [products[0].input[0]], 0
    for product in products:
        inputs += [""] * missing + list(product.input[1:])
        missing = _PRODUCT_INPUTS - len(product.input)
    outputs = [product.output[0] for product in products]
    attributes = attributes_of(products[0])
    return helper.make_node("Linears", inputs, outputs, domain=DOMAIN, **attributes)


def _width(graph: Graph, name: str) -> int:
    """The last dimension of a value, by the weights of its operator; 0 if not known."""
    node = graph.producers.get(name)
    if node is not None and node.op_type in BLOCK_PRODUCTS:
        return (graph.dims(node.input[1]) or [0])[0]
    weight = {"Linear": 2, "LayerNormalization": 1, "AddNorm": 2, "MatMul": 1, "Add": 1}
    if node is None or node.op_type not in weight:
        return 0
    return (graph.dims(node.input[weight[node.op_type]]) or [0])[-1]


def _has_gelu(linear: NodeProto) -> bool:
    return bool(attributes_of(linear)["gelu"])
