"""Rewrites the recurrent layers of causal graphs for rows without padding.

``CausalConv`` (``src/causal_conv.cpp``) takes the place of a convolution that the export wrote as a
sum of shifted products, and ``LinearAttention`` (``src/linear_attention.cpp``) that of ONNX
Runtime's operator of this name, with the normalization and the copies of its queries and keys. Both
get ``new_tokens``, and update the states in place: the graph has no outputs ``present_state.*``.
Masks of the tokens beyond the rows' ``lengths`` are removed, and so is this input.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from onnx import NodeProto, TensorProto, helper

from maskdial.kernels.graph import DOMAIN, LENGTHS, NEW_TOKENS, Graph, attributes_of

_PAST, _PRESENT = "past_state.", "present_state."
_RULES = {b"gated": 5, b"gated_delta": 6}
"""Update rules of ONNX Runtime's operator that have a kernel, and the number of its inputs."""
_MASKING = frozenset({"Cast", "Less", "Reshape", "Unsqueeze"})
"""The operators that compute which tokens are valid."""
_SHAPE = "shape.heads.joined"


@dataclass(slots=True)
class _Rewrite:
    """Changes of a graph, before any is made.

    Attributes:
        nodes: the nodes that take a node's place, by its id.
        renamed: masked values, and what is masked.
        states: the inputs whose operators are rewritten.
    """

    nodes: dict[int, list[NodeProto]] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)


def states_of(graph: Graph) -> set[str]:
    """The graph's inputs that are states of recurrent layers."""
    return {name for name in graph.inputs if name.startswith(_PAST)}


def rewrite_recurrence(graph: Graph, packs: Callable[[Iterable[NodeProto]], bool]) -> int:
    """Rewrites all recurrent layers in place, or none.

    Args:
        graph: of a causal model.
        packs: whether the nodes of the rewritten graph compute rows without padding.

    Returns:
        The number of operators with a state that the kernels compute now.
    """
    plan = _plan(graph)
    if not plan.states or plan.states != states_of(graph):
        return 0
    nodes, outputs = graph.nodes, list(graph.proto.output)
    kept = [each for each in outputs if not each.name.startswith(_PRESENT)]
    _set(graph, kept, _rewritten(graph, plan))
    if not packs(graph.needed_nodes()):
        _set(graph, outputs, nodes)
        return 0
    joined = helper.make_tensor(_SHAPE, TensorProto.INT64, [3], [0, 0, -1])
    graph.set_nodes(graph.nodes, [joined])
    graph.remove_unused()
    graph.remove_input(LENGTHS)
    return len(plan.states)


def _plan(graph: Graph) -> _Rewrite:
    plan = _Rewrite(renamed=_masked_values(graph))
    for node in graph.nodes:
        found = _convolution(graph, node) or _attention(graph, node, plan.renamed)
        if found is not None:
            last, nodes = found
            plan.nodes[id(last)] = nodes
            plan.states |= states_of(graph).intersection(nodes[-1].input)
    return plan


def _set(graph: Graph, outputs: list[object], nodes: Iterable[NodeProto]) -> None:
    """Replaces a graph's outputs and nodes."""
    del graph.proto.output[:]
    graph.proto.output.extend(outputs)
    graph.set_nodes(nodes)


def _rewritten(graph: Graph, plan: _Rewrite) -> Iterator[NodeProto]:
    """The nodes as planned; the graph's own are not changed."""
    for node in graph.nodes:
        for each in plan.nodes.get(id(node), [node]):
            names = [plan.renamed.get(name, name) for name in each.input]
            if _counts_rows(each):
                names = ["input_ids"]
            if names == list(each.input):
                yield each
                continue
            changed = NodeProto()
            changed.CopyFrom(each)
            changed.input[:] = names
            yield changed


def _counts_rows(node: NodeProto) -> bool:
    """Whether a node takes the number of rows from an input that has as many; ``input_ids``, whose
    tokens they are, is a single row without padding.
    """
    if node.op_type != "Shape" or not (node.input[0] == LENGTHS or node.input[0].startswith(_PAST)):
        return False
    bounds = attributes_of(node)
    return (bounds.get("start", 0), bounds.get("end")) == (0, 1)


def _masked_values(graph: Graph) -> dict[str, str]:
    """The values that are zero beyond the rows' lengths, and what each is within them."""
    valid, masked = {LENGTHS}, {}
    for node in graph.nodes:
        if node.op_type in _MASKING and not valid.isdisjoint(node.input):
            valid.update(node.output)
        elif (
            node.op_type == "Where" and node.input[0] in valid and graph.scalar(node.input[2]) == 0
        ):
            masked[node.output[0]] = node.input[1]
    return masked


_Found = tuple[NodeProto, list[NodeProto]]
"""The node that computes a layer's result, and those that take its place."""


def _convolution(graph: Graph, node: NodeProto) -> _Found | None:
    """The kernels' operator for a convolution, by the node that joins its state and its input."""
    if node.op_type != "Concat" or not node.input[0].startswith(_PAST):
        return None
    state, source = node.input
    slices, tails = _users(graph, node.output[0], "Slice"), _users(graph, node.output[0])
    if [each.op_type for each in tails if each not in slices] != ["GatherElements"]:
        return None
    products: dict[int, NodeProto] = {}
    taps: dict[int, str] = {}
    for each in slices:
        product = graph.only_user(each.output[0])
        if product is None or product.op_type != "Mul" or graph.integers(each.input[3]) != [1]:
            return None
        (place,) = graph.integers(each.input[1])
        products[place] = product
        (taps[place],) = (name for name in product.input if name != each.output[0])
    if sorted(products) != list(range(len(products))):
        return None
    last = products[0]
    for place in range(1, len(products)):
        total = graph.only_user(last.output[0])
        if total is None or total.op_type != "Add":
            return None
        if set(total.input) != {last.output[0], products[place].output[0]}:
            return None
        last = total
    bias = ""
    total = graph.only_user(last.output[0])
    if total is not None and total.op_type == "Add":
        (other,) = (name for name in total.input if name != last.output[0])
        if len(graph.dims(other)) == 1:
            last, bias = total, other
    activated = _silu_of(graph, last.output[0])
    result = activated or last
    joined = f"{result.output[0]}.taps"
    silu = int(activated is not None)
    inputs = [source, state, joined, bias, NEW_TOKENS]
    return result, [
        helper.make_node("Concat", [taps[place] for place in sorted(taps)], [joined], axis=0),
        helper.make_node("CausalConv", inputs, result.output[:1], domain=DOMAIN, silu=silu),
    ]


def _users(graph: Graph, name: str, kind: str | None = None) -> list[NodeProto]:
    return [each for each in graph.users(name) if kind in (None, each.op_type)]


def _silu_of(graph: Graph, name: str) -> NodeProto | None:
    """The node that multiplies a value by its sigmoid, if nothing else uses the value."""
    users = graph.users(name)
    if sorted(each.op_type for each in users) != ["Mul", "Sigmoid"] or graph.num_uses(name) != 2:
        return None
    product, sigmoid = sorted(users, key=lambda each: each.op_type)
    alone = graph.only_user(sigmoid.output[0]) is not None
    return product if alone and sigmoid.output[0] in product.input else None


def _attention(graph: Graph, node: NodeProto, masked: Mapping[str, str]) -> _Found | None:
    """The kernels' operator for ONNX Runtime's linear attention."""
    if node.op_type != "LinearAttention" or node.domain == DOMAIN:
        return None
    attributes = attributes_of(node)
    query, key, value, state, decay, *betas = node.input
    heads = attributes["q_num_heads"], attributes["kv_num_heads"]
    if _RULES.get(attributes["update_rule"]) != len(node.input) or len(set(heads)) > 1:
        return None
    if not attributes.get("scale") or not state.startswith(_PAST):
        return None
    sources = [_Heads.of(graph, name, masked) for name in (query, key)]
    joined: list[NodeProto] = []
    epsilon = 0.0
    if sources[0].epsilon == sources[1].epsilon and sources[0].copies == sources[1].copies:
        epsilon = sources[0].epsilon
        query, key = (f"{node.output[0]}.{part}" for part in ("query", "key"))
        joined = [
            helper.make_node("Reshape", [heads.source, _SHAPE], [name])
            for heads, name in zip(sources, (query, key), strict=True)
        ]
    inputs = [query, key, value, state, decay, *(betas or [""]), NEW_TOKENS]
    return node, [
        *joined,
        helper.make_node(
            "LinearAttention",
            inputs,
            node.output[:1],
            domain=DOMAIN,
            scale=attributes["scale"],
            epsilon=epsilon,
        ),
    ]


@dataclass(frozen=True, slots=True)
class _Heads:
    """Queries or keys before they were normalized and copied.

    Attributes:
        source: (batch, length, ...), the heads' columns last.
        copies: adjacent heads that are the same.
        epsilon: of the normalization; 0 without one.
    """

    source: str
    copies: int
    epsilon: float

    @classmethod
    def of(cls, graph: Graph, name: str, masked: Mapping[str, str]) -> "_Heads":
        """Follows a value back through its masks and reshapes."""
        name = _through(graph, name, masked)
        copies, epsilon = 1, 0.0
        expand = graph.producer(name, "Expand")
        added = graph.producer(expand.input[0], "Unsqueeze") if expand is not None else None
        if expand is not None and added is not None:
            sizes, axes = graph.integers(expand.input[1]), graph.integers(added.input[1])
            repeated = [axis for axis, size in enumerate(sizes) if size != 1]
            if axes == repeated and axes[0] >= 2:
                name, copies = _through(graph, added.input[0], masked), sizes[axes[0]]
        normed = _normalized(graph, name)
        if normed is not None:
            name, epsilon = normed
        return cls(name, copies, epsilon)


def _through(graph: Graph, name: str, masked: Mapping[str, str]) -> str:
    """The value that a value is after masks and reshapes, which keep the order of its elements."""
    while True:
        reshape = graph.producer(name, "Reshape")
        if name in masked:
            name = masked[name]
        elif reshape is not None:
            name = reshape.input[0]
        else:
            return name


def _normalized(graph: Graph, name: str) -> tuple[str, float] | None:
    """What was divided by its length, and the epsilon, if a value is that."""
    product = graph.producer(name, "Mul")
    for value, factor in (product.input, reversed(product.input)) if product is not None else ():
        inverse = graph.producer(factor, "Reciprocal")
        root = graph.producer(inverse.input[0], "Sqrt") if inverse is not None else None
        total = graph.producer(root.input[0], "Add") if root is not None else None
        squares = graph.producer(total.input[0], "ReduceSum") if total is not None else None
        square = graph.producer(squares.input[0], "Mul") if squares is not None else None
        if total is None or squares is None or square is None:
            continue
        epsilon = graph.scalar(total.input[1])
        if list(square.input) == [value, value] and graph.integers(squares.input[1]) == [-1]:
            return (value, epsilon) if epsilon else None
    return None
