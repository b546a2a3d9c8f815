"""Joins small operators of a graph to those of the kernels."""

from collections import Counter
from collections.abc import Collection

from onnx import GraphProto, NodeProto, TensorProto, helper

from maskdial.kernels.graph import DOMAIN, attributes_of

_PRODUCT_INPUTS = 4
"""A product's rows, weight, scale and bias."""
_MOST_PRODUCTS = 3
"""Of one ``Linears``; ``src/projection.h``."""
_NORMED = {"Linear": "NormLinear", "Linears": "NormLinears", "Linear4": "NormLinear4"}
_BRANCHES = frozenset({"Linear", "Linear4", "SimplifiedLayerNormalization"})
"""What computes the rows that a layer adds to its input."""
_ADDED_NORM = "SkipSimplifiedLayerNormalization", 3
"""And its inputs: two values to be added, and the norm's weight."""
_NUM_NORM_OUTPUTS = 4
"""The norm, two statistics, and the sum."""
_EPSILON = 1e-5
"""Of norms that have no such attribute."""


def join_biases(graph: GraphProto) -> None:
    """Lets ``Linear`` add a bias where an ``Add`` follows it; the results are the same bits."""
    joiner = _Joiner(graph)
    for node in joiner.nodes:
        if node.op_type != "Add":
            continue
        for name, bias in (node.input, reversed(node.input)):
            linear = joiner.only_used_here(name)
            if linear is None or linear.op_type != "Linear" or len(linear.input) != 3:
                continue
            if joiner.dims(bias) == joiner.dims(linear.input[2]) and not _has_gelu(linear):
                linear.input.append(bias)
                joiner.replace(node, linear, linear)
                break
    joiner.finish()


def join_products(graph: GraphProto) -> None:
    """Lets ``Linears`` compute products of the same value: its rows are quantized once."""
    joiner = _Joiner(graph)
    groups: dict[tuple[object, ...], list[NodeProto]] = {}
    for node in joiner.nodes:
        if node.op_type == "Linear" and len(node.input) <= _PRODUCT_INPUTS and not _has_gelu(node):
            attributes = sorted(attributes_of(node).items())
            groups.setdefault((node.input[0], *attributes), []).append(node)
    for group in groups.values():
        for start in range(0, len(group) - 1, _MOST_PRODUCTS):
            joiner.join_products(group[start : start + _MOST_PRODUCTS])
    joiner.finish()


def join_norms(graph: GraphProto, rows: Collection[str]) -> None:
    """Lets ``AddNorm`` add and normalize where only the layer norm of a sum is used.

    ``rows`` are values of one shape but for their last dimension; others broadcast perhaps.
    """
    joiner = _Joiner(graph)
    for node in joiner.nodes:
        if node.op_type != "LayerNormalization" or any(node.output[1:]):
            continue
        attributes, (source, *weights) = attributes_of(node), node.input
        add = joiner.only_used_here(source)
        if add is None or add.op_type != "Add" or attributes.get("axis", -1) != -1:
            continue
        widths = {joiner.width(name) if name in rows else 0 for name in add.input}
        if widths == {*joiner.dims(weights[0])} and all(map(joiner.dims, weights)):
            epsilon = attributes.get("epsilon", _EPSILON)
            inputs = [*add.input, *weights]
            result = helper.make_node("AddNorm", inputs, [""], domain=DOMAIN, epsilon=epsilon)
            joiner.replace(node, add, result)
    joiner.finish()


def join_rms_norms(graph: GraphProto) -> None:
    """Lets the operator that multiplies the RMS norm of a sum compute sum and norm, too.

    This comes last: the other functions do not know the operators that it makes.
    """
    joiner = _Joiner(graph)
    for node in joiner.nodes:
        if (node.op_type, len(node.input), len(node.output)) != (*_ADDED_NORM, _NUM_NORM_OUTPUTS):
            continue
        (x, residual, norm), (normed, *statistics, total) = node.input, node.output
        product = joiner.only_user(normed)
        if product is None or product.op_type not in _NORMED or product.input[0] != normed:
            continue
        # ONNX Runtime's operator also adds rows that broadcast.
        adds_rows = any(joiner.kind(name) in _BRANCHES for name in (x, residual))
        if adds_rows and joiner.dims(norm) and not any(map(joiner.is_used, statistics)):
            joiner.replace_both(
                node,
                product,
                helper.make_node(
                    _NORMED[product.op_type],
                    [x, residual, norm, *product.input[1:]],
                    [total, *product.output],
                    domain=DOMAIN,
                    epsilon=attributes_of(node).get("epsilon", _EPSILON),
                    **attributes_of(product),
                ),
            )
    joiner.finish()


class _Joiner:
    """The nodes of a graph, of which two become one at a time."""

    def __init__(self, graph: GraphProto) -> None:
        self.nodes = list(graph.node)
        self._graph = graph
        self._initializers = {each.name: each for each in graph.initializer}
        self._producers = {name: node for node in self.nodes for name in node.output if name}
        self._uses = Counter(name for node in self.nodes for name in node.input)
        self._uses.update(value.name for value in graph.output)
        self._replaced: dict[int, NodeProto | None] = {}

    def only_used_here(self, name: str) -> NodeProto | None:
        """The node that computes a value, if the value has one use."""
        return self._producers.get(name) if self._uses[name] == 1 else None

    def only_user(self, name: str) -> NodeProto | None:
        """The node that uses a value, if it is the only one."""
        users = [node for node in self.nodes if name in node.input]
        return users[0] if self._uses[name] == len(users) == 1 else None

    def is_used(self, name: str) -> bool:
        """Whether anything uses a value."""
        return self._uses[name] > 0

    def kind(self, name: str) -> str:
        """The operator that computes a value; empty if none does."""
        node = self._producers.get(name)
        return "" if node is None else str(node.op_type)

    def dims(self, name: str) -> list[int]:
        """The dimensions of an initializer; empty for any other value."""
        return list(self._initializers.get(name, TensorProto()).dims)

    def width(self, name: str) -> int:
        """The last dimension of a value as the weights of its operator have it; 0 if not known."""
        node = self._producers.get(name)
        if node is not None and node.op_type == "Linear4":
            return (self.dims(node.input[1]) or [0])[0]
        place = {"Linear": 2, "LayerNormalization": 1, "AddNorm": 2, "MatMul": 1, "Add": 1}
        if node is None or node.op_type not in place:
            return 0
        return (self.dims(node.input[place[node.op_type]]) or [0])[-1]

    def replace(self, last: NodeProto, first: NodeProto, joined: NodeProto) -> None:
        """Puts one node where the later one of two is, with its result."""
        result = last.output[0]
        self._replaced[id(first)] = None
        self._replaced[id(last)] = joined
        joined.output[0] = result
        self._producers[result] = joined

    def replace_both(self, first: NodeProto, last: NodeProto, joined: NodeProto) -> None:
        """Puts one node, with the results of two, where the first of them is."""
        self._replaced |= {id(first): joined, id(last): None}

    def join_products(self, products: list[NodeProto]) -> None:
        """Puts one node where the first of some products is, with their results."""
        if len(products) == 1:
            return
        inputs, missing = [products[0].input[0]], 0
        for product in products:
            inputs += [""] * missing + list(product.input[1:])
            missing = _PRODUCT_INPUTS - len(product.input)
        attributes = attributes_of(products[0])
        outputs = [product.output[0] for product in products]
        joined = helper.make_node("Linears", inputs, outputs, domain=DOMAIN, **attributes)
        self._replaced |= {id(product): None for product in products}
        self._replaced[id(products[0])] = joined

    def finish(self) -> None:
        """Writes the nodes back."""
        nodes = [self._replaced.get(id(node), node) for node in self.nodes]
        kept = [node for node in nodes if node is not None]
        del self._graph.node[:]
        self._graph.node.extend(kept)


def _has_gelu(linear: NodeProto) -> bool:
    return bool(attributes_of(linear)["gelu"])
