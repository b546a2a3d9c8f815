"""Rewrites a graph for the kernels: quantized products and causal attention become our operators.

The graph on disk has ONNX Runtime's own operators (`maskdial_export.quantize.quantize` writes
them), so that it runs with or without the kernels. ``Linear`` (``src/linear.cpp``) replaces
the quantization of the input, ``MatMulIntegerToFloat``, and the product with each row's scale;
``Linear4`` and ``Linear8`` (``src/linear_blocks.cpp``) replace ``MatMulNBits``. Each fuses
``silu(gate) * up`` or ``BiasGelu`` if they follow, and `maskdial.kernels.fuse` the sum and RMS norm
before it. ``CausalAttention`` takes the inputs of ``GroupQueryAttention`` and writes
new keys and values to the past: the graph has no outputs ``present_*``. `maskdial.kernels.varlen`
rewrites masked models.
Unknown patterns are left unchanged.

If attention and recurrent layers (`maskdial.kernels.recurrent`) alone read how a causal graph's
tokens are divided into rows, the rewritten graph has another input, ``new_tokens`` int32 (batch,):
it takes the tokens of all rows one after the other, (1, their sum), so that steps and prompts share
a pass without padding. With attention it also has ``tokens_ahead`` int32 (tokens,): how many of the
tokens behind it in its row each one sees, 0 under the causal mask.

A causal graph also gets a ``LogitsSummary`` (``src/logits_summary.cpp``). Its products of floats
with one column become sums of ONNX Runtime's.

With a KV cache of integers, ``Int8CausalAttention`` or ``Int16CausalAttention`` takes its place,
and the graph's inputs change their type.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import NodeProto, TensorProto, helper

from maskdial.bundle.adapter import Projection
from maskdial.bundle.manifest import BLOCK_SUMS, CACHE_HEADERS, CacheChoice, CacheInteger
from maskdial.errors import BundleError, ConfigError
from maskdial.kernels.adapt import Adapting
from maskdial.kernels.fuse import fuse_biases, fuse_products, fuse_rms_norms
from maskdial.kernels.graph import (
    AHEAD,
    ATTENTION,
    ATTENTION_OVER,
    DOMAIN,
    LENGTHS,
    NEW_TOKENS,
    NEW_TOKENS_INPUT,
    QUANTIZED,
    RECURRENT,
    Graph,
    attributes_of,
)
from maskdial.kernels.logits import SUMMARY
from maskdial.kernels.positions import attend_by_distance
from maskdial.kernels.prune import prune_last_layer
from maskdial.kernels.recurrent import rewrite_recurrence, states_of
from maskdial.kernels.varlen import pack_texts

_VERSION = 1
_ZERO_POINT = 128
_PRODUCT = "MatMulIntegerToFloat"
_BLOCKS_PRODUCT = "MatMulNBits"
CHUNK = 32
"""Inputs; blocks of 4-bit weights are whole chunks (``src/processor.h``)."""
_HALF_CHUNK = CHUNK // 2
_INT8_INPUTS = 4
"""The accuracy level of ``MatMulNBits`` that rounds inputs to int8."""
LANES = 16
"""Head sizes are multiples of this number (``src/processor.h``)."""
# Of ONNX Runtime, whose kernels for one row and for several may differ in the last bits.
_OTHER_PRODUCTS = frozenset(
    {"Conv", "Einsum", "FusedMatMul", "Gemm", "MatMul", "MoE", "QMoE", _PRODUCT, _BLOCKS_PRODUCT}
)
# Of ONNX Runtime, whose bits depend on the processor: it adds up 8 numbers at a time under AVX2 and
# 16 under AVX-512, or has several kernels.
_OF_PROCESSORS = frozenset(
    {
        "Attention",
        "GroupQueryAttention",
        "LogSoftmax",
        "MoE",
        "MultiHeadAttention",
        "QMoE",
        "Softmax",
        _PRODUCT,
        _BLOCKS_PRODUCT,
    }
)
_ROW_INPUTS = ("seqlens_k", "total_sequence_length")
_PAST_KEY = "past_key."
_NUM_ATTENTION_OUTPUTS = 3
_LAST_AXIS = "axis.last"
_SINKS_INPUT = 9
"""Of ``CausalAttention``, the scores of sinks."""
_ATTENTION_DEFAULTS: dict[str, float] = {
    "rotary_interleaved": 0,
    "local_window_size": -1,
    "softcap": 0.0,
    "smooth_softmax": 0,
}


@dataclass(frozen=True, slots=True)
class Product:
    """A quantized product, as the graph on disk has it.

    Attributes:
        op_type: of the operator that takes its place.
        source: the float value that is quantized.
        weights: the operator's inputs after the source: weight, scale, bias and more; an empty name
            for one that it does not have.
        attributes: the operator's, but for ``gelu``.
        output: the result's name.
        last: the node that computes the result.
    """

    op_type: str
    source: str
    weights: tuple[str, ...]
    attributes: dict[str, float]
    output: str
    last: NodeProto

    def node(self, output: str, *, up: "Product | None" = None, gelu_bias: str = "") -> NodeProto:
        """The operator: one product, ``silu(self) * up``, or ``gelu(self + gelu_bias)``."""
        inputs = [self.source, *self.weights, *(up.weights if up else ())]
        inputs[3] = inputs[3] or gelu_bias
        while not inputs[-1]:
            inputs.pop()
        return helper.make_node(
            self.op_type,
            inputs,
            [output],
            domain=DOMAIN,
            gelu=int(bool(gelu_bias)),
            **self.attributes,
        )

    def pairs_with(self, other: "Product") -> bool:
        """Whether one pass over the quantized source can compute both."""
        return (self.op_type, self.source, self.attributes) == (
            other.op_type,
            other.source,
            other.attributes,
        )


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A graph for the kernels.

    Attributes:
        model: serialized; its external data stays where it is.
        num_replaced: the number of quantized products and attentions that the kernels compute.
        num_left: the number of products of int8 weights that ONNX Runtime computes.
        is_exact: whether the kernels compute all products and all attention of a causal graph, so
            that a text gives the same bits token by token and in pieces of any size.
        is_portable: whether no operator is left whose bits depend on the processor.
        kv_cache: element type of an integer KV cache; None without one.
        windows: by layer, how many tokens one sees, where that is not all.
        projections: the products that adapters may add to, by their layers' names.
        tables: a graph without inputs, serialized, whose outputs are initializers that ``model``
            lacks; empty if it lacks none. `Kernels.prepare` computes them.
    """

    model: bytes
    num_replaced: int
    num_left: int
    is_exact: bool
    is_portable: bool
    kv_cache: CacheInteger | None
    windows: Mapping[int, int]
    projections: Mapping[str, Projection]
    tables: bytes


def rewrite(
    path: Path,
    kv_cache: CacheChoice = "float",
    *,
    adapters: bool = False,
    gives_hidden: bool = False,
) -> Rewritten:
    """Reads a graph and rewrites it.

    Args:
        path: the graph.
        kv_cache: element type of the KV cache. ``auto``: int16 if the kernels compute all
            attention, and products are quantized; else float.
        adapters: whether texts may have adapters (`maskdial.kernels.adapt`).
        gives_hidden: whether to leave the output ``hidden``, for which the last layer computes all
            tokens.

    Raises:
        BundleError: it cannot be read, or names the kernels itself, which no exported graph does.
        ConfigError: no kernel computes its attention over a cache of these integers.
    """
    try:
        model = onnx.load(path, load_external_data=False)
    except (DecodeError, OSError) as error:
        raise BundleError(f"{path} cannot be read as an ONNX graph: {error}") from error
    imports = [*model.opset_import, *(each for f in model.functions for each in f.opset_import)]
    if any(each.domain == DOMAIN for each in imports):
        raise BundleError(f"{path} uses operators of the domain {DOMAIN!r}; export the model again")
    graph = Graph(model.graph)
    if not gives_hidden:
        _remove_outputs(graph, {"hidden"})
    num_replaced = _replace_operators(graph)
    if NEW_TOKENS in graph.inputs:
        _sum_single_columns(graph)
    integer: CacheInteger | None = None
    if kv_cache == "auto":
        quantized = _attends(graph) and not QUANTIZED.isdisjoint(graph.kinds)
        integer = "int16" if quantized else None
    elif kv_cache != "float":
        integer = kv_cache
    if integer is not None:
        _quantize_cache(graph, integer)
    fuse_biases(graph)
    # An adapter of queries or keys would also change those of positions, which may share its layer.
    tables = b"" if adapters else attend_by_distance(graph)
    num_replaced += pack_texts(graph)
    rows = prune_last_layer(graph)
    adapting = Adapting(graph, rows) if adapters else None
    fuse_products(graph)
    fuse_rms_norms(graph)
    projections: Mapping[str, Projection] = {}
    if adapting is not None:
        adapting.attach()
        projections = adapting.projections
        num_replaced += len(projections)
    if num_replaced:
        _summarize_logits(graph)
        model.opset_import.append(helper.make_opsetid(DOMAIN, _VERSION))
    num_left = sum(node.op_type == _PRODUCT for node in graph.nodes)
    is_exact = NEW_TOKENS in graph.inputs and _OTHER_PRODUCTS.isdisjoint(graph.kinds)
    return Rewritten(
        model.SerializeToString(),
        num_replaced,
        num_left,
        is_exact,
        _OF_PROCESSORS.isdisjoint(graph.kinds),
        integer,
        dict(_windows(graph)),
        projections,
        tables,
    )


def _windows(graph: Graph) -> Iterator[tuple[int, int]]:
    """The layers whose attention reads a window only, by their caches, and its size."""
    for node in graph.nodes:
        if node.op_type in {ATTENTION, *ATTENTION_OVER.values()}:
            window = attributes_of(node)["window"]
            if window:
                yield int(node.input[3].removeprefix(_PAST_KEY)), window


def _summarize_logits(graph: Graph) -> None:
    """Adds outputs for greedy decoding and log-probabilities to a causal graph."""
    outputs = {value.name: value.type.tensor_type for value in graph.proto.output}
    logits = outputs.get("logits")
    if not ("past_key.0" in graph.inputs or states_of(graph)) or logits is None:
        return
    if logits.elem_type == TensorProto.FLOAT:
        summary = helper.make_node("LogitsSummary", ["logits"], list(SUMMARY), domain=DOMAIN)
        graph.proto.output.extend(
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), ["num_rows"]
            )
            for name, dtype in SUMMARY.items()
        )
        graph.set_nodes([*graph.nodes, summary])


def _replace_operators(graph: Graph) -> int:
    """Replaces quantized products and causal attention in place; returns their number."""
    products = {
        product.output: product
        for node in graph.nodes
        if (product := int8_product(graph, node) or _blocks_product(graph, node)) is not None
    }
    replacements: dict[int, NodeProto] = {}
    for node in graph.nodes:
        attention = _attention(graph, node)
        if attention is not None:
            replacements[id(node)] = attention
    num_replaced = len(products) + len(replacements)
    if not num_replaced and not states_of(graph):
        return 0
    single = dict(products)
    for node in graph.nodes:
        pair = _gated(graph, node, products)
        if pair is not None:
            gate, up = pair
            replacements[id(node)] = gate.node(node.output[0], up=up)
            del single[gate.output], single[up.output]
        elif _is_gelu(graph, node, products):
            product = single.pop(node.input[0])
            replacements[id(node)] = product.node(node.output[0], gelu_bias=node.input[1])
    for product in single.values():
        replacements[id(product.last)] = product.node(product.output)
    computed = graph.producers.keys()
    graph.replace(replacements)
    _remove_outputs(graph, computed - graph.producers.keys())
    graph.remove_unused()
    return num_replaced + _pack_rows(graph)


def _remove_outputs(graph: Graph, names: Set[str]) -> None:
    """Removes the graph's outputs of some names."""
    kept = [value for value in graph.proto.output if value.name not in names]
    del graph.proto.output[:]
    graph.proto.output.extend(kept)
    graph.set_nodes(graph.nodes)


def _pack_rows(graph: Graph) -> int:
    """Adds the input ``new_tokens``, if attention and recurrent layers alone read how tokens are
    divided into rows; returns the number of the latter's operators that the kernels compute now.
    """
    num_recurrent = rewrite_recurrence(graph, lambda nodes: _packs(graph, nodes))
    if not _packs(graph, graph.nodes):
        return 0
    for node in graph.nodes:
        if node.op_type == ATTENTION:
            missing = NEW_TOKENS_INPUT - len(node.input)
            node.input.extend([*[""] * missing, NEW_TOKENS, AHEAD])
    counts = helper.make_tensor_value_info(NEW_TOKENS, TensorProto.INT32, ["batch"])
    graph.proto.input.append(counts)
    if ATTENTION in graph.kinds:
        ahead = helper.make_tensor_value_info(AHEAD, TensorProto.INT32, ["tokens"])
        graph.proto.input.append(ahead)
    graph.set_nodes(graph.nodes)
    return num_recurrent


def _sum_single_columns(graph: Graph) -> None:
    """Turns products of floats with one column, which gate shared experts, into sums: ONNX Runtime
    adds up each row by itself, so a token gets the same bits alone and beside others.
    """
    nodes: list[NodeProto] = []
    for node in graph.nodes:
        if not _has_single_column(graph, node):
            nodes.append(node)
            continue
        (output,) = node.output
        terms = f"{output}.terms"
        nodes.append(helper.make_node("Mul", list(node.input), [terms]))
        nodes.append(helper.make_node("ReduceSum", [terms, _LAST_AXIS], [output]))
    axis = helper.make_tensor(_LAST_AXIS, TensorProto.INT64, [1], [-1])
    graph.set_nodes(nodes, [axis] * (len(nodes) > len(graph.nodes)))


def _has_single_column(graph: Graph, node: NodeProto) -> bool:
    if node.op_type != "Gemm" or len(node.input) != 2 or graph.dims(node.input[1])[:1] != [1]:
        return False
    settings = {"alpha": 1, "transA": 0, "transB": 0} | attributes_of(node)
    return (settings["alpha"], settings["transA"], settings["transB"]) == (1, 0, 1)


def _packs(graph: Graph, nodes: Iterable[NodeProto]) -> bool:
    """Whether nodes compute rows without padding, given how many tokens each row has."""
    dividing: list[NodeProto] = []
    others: list[NodeProto] = []
    for node in nodes:
        divides = node.domain == DOMAIN and node.op_type in {ATTENTION, *RECURRENT}
        (dividing if divides else others).append(node)
    attentions = [node for node in dividing if node.op_type == ATTENTION]
    caches = {name for node in attentions for name in node.input[3:5]}
    of_attention = {*caches, *_ROW_INPUTS} if attentions else set()
    of_rows = {*of_attention, *states_of(graph), LENGTHS}
    return (
        bool(dividing)
        and of_attention <= graph.inputs
        and not any(node.op_type == "GroupQueryAttention" for node in others)
        and not any(of_rows.intersection(node.input) for node in others)
    )


def _attends(graph: Graph) -> bool:
    """Whether the kernels compute all attention."""
    return ATTENTION in graph.kinds and "GroupQueryAttention" not in graph.kinds


def _quantize_cache(graph: Graph, integer: CacheInteger) -> None:
    """Turns the KV cache of the rewritten graph into one of integers, in place.

    Raises:
        ConfigError: the graph has attention that was not replaced, or none that was.
    """
    if not _attends(graph):
        raise ConfigError(
            "the kernels do not compute this model's attention, so its KV cache cannot be "
            f"{integer}; serve it with --kv-cache-dtype auto"
        )
    elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(integer))
    values = {value.name: value for value in graph.proto.input}
    for node in graph.nodes:
        if node.op_type != ATTENTION:
            continue
        node.op_type = ATTENTION_OVER[integer]
        for name in node.input[3:5]:
            cache = values[name].type.tensor_type
            cache.elem_type = elem_type
            cache.shape.dim[-1].dim_value += CACHE_HEADERS[integer]


def _attention(graph: Graph, node: NodeProto) -> NodeProto | None:
    """The kernels' operator for a ``GroupQueryAttention``; None for a kind that has no kernel."""
    # Cross-attention writes no keys and values.
    if node.op_type != "GroupQueryAttention" or len(node.output) < _NUM_ATTENTION_OUTPUTS:
        return None
    past_key, rotation = node.input[3], [name for name in node.input[7:9] if name]
    positions, bias, sinks = (*node.input[9:12], "", "", "")[:3]
    attributes = {
        name: value
        for name, value in attributes_of(node).items()
        if value != _ATTENTION_DEFAULTS.get(name)
    }
    rotates = attributes.pop("do_rotary", 0)
    plain = attributes.keys() <= {"num_heads", "kv_num_heads", "scale", "local_window_size"}
    if not plain or positions or bias or any(node.input[12:]) or rotates != (len(rotation) == 2):
        return None
    if _head_size(graph, past_key) % LANES:
        return None
    presents = node.output[1:_NUM_ATTENTION_OUTPUTS]
    if any(name not in graph.outputs or graph.users(name) for name in presents):
        return None
    settings = {
        "scale": attributes.pop("scale", 0.0),
        "window": attributes.pop("local_window_size", 0),
    }
    inputs = list(node.input[:9])
    if sinks:
        inputs += [""] * (_SINKS_INPUT - len(inputs)) + [sinks]
    return helper.make_node(
        ATTENTION, inputs, node.output[:1], domain=DOMAIN, **settings, **attributes
    )


def _head_size(graph: Graph, past: str) -> int:
    """The last dimension of a KV cache of float32; 1 for another one, or if it is not known."""
    for value in graph.proto.input:
        cache = value.type.tensor_type
        if value.name == past and cache.elem_type == TensorProto.FLOAT:
            return cache.shape.dim[-1].dim_value or 1
    return 1


def int8_product(graph: Graph, node: NodeProto) -> Product | None:
    """The product that a ``MatMulIntegerToFloat`` is part of; None if it is another kind."""
    if node.op_type != _PRODUCT or len(node.input) < 5:
        return None
    rows, weight, row_step, scale, zero_point, *rest = node.input
    weight_zero_point, bias = (*rest, "", "")[:2]
    quantized = graph.producers.get(rows)
    if quantized is None or quantized.op_type != "QuantizeLinear" or weight_zero_point:
        return None
    value, step = quantized.input[:2]
    if list(quantized.input[1:]) != [row_step, zero_point]:
        return None
    transposed = not graph.is_constant(weight)
    if transposed:
        weight = _transposed(graph, weight)
    step_size, zero = graph.scalar(step), graph.scalar(zero_point)
    constant = bool(weight and scale) and graph.all_constant((weight, scale, bias))
    if step_size is None or zero != _ZERO_POINT or not constant:
        return None
    output, last = node.output[0], node
    source = _divided(graph, value)
    if source is not None:
        peak = graph.producers[value].input[1]
        multiplied = graph.only_user(output)
        if bias or multiplied is None or multiplied.op_type != "Mul":
            return None
        if sorted(multiplied.input) != sorted([output, peak]):
            return None
        output, last = multiplied.output[0], multiplied
    attributes: dict[str, float] = {
        "step": step_size,
        "by_row": int(source is not None),
        "transposed": int(transposed),
    }
    weights = (weight, scale, bias)
    return Product("Linear", source or value, weights, attributes, output, last)


def _blocks_product(graph: Graph, node: NodeProto) -> Product | None:
    """The product that a ``MatMulNBits`` computes; None if it is another kind."""
    if node.op_type != _BLOCKS_PRODUCT:
        return None
    source, weight, scale, *rest = node.input
    zero_points, group_index, bias = (*rest, "", "", "")[:3]
    attributes = attributes_of(node)
    names = ("K", "N", "bits", "block_size", "accuracy_level")
    num_inputs, _, bits, size, accuracy = (attributes.pop(name, 0) for name in names)
    nibbles = bits == 4 and size % CHUNK == 0
    difference = graph.only_user(node.output[0])
    minimum = _minimum(graph, difference, source, node.output[0])
    # Zeros beside minima center the integers for ONNX Runtime, and the minima are less by as much
    may_have_zeros = bits == 4 or bool(minimum)
    has_kernel = nibbles or (bits == 8 and size in (CHUNK, _HALF_CHUNK))
    if attributes or accuracy != _INT8_INPUTS or not has_kernel:
        return None
    if zero_points and not may_have_zeros:
        return None
    constants = [graph.initializer(name) for name in (weight, scale, bias) if name]
    zeros = graph.initializer(zero_points) if zero_points and not minimum else None
    if zero_points and not minimum and (zeros is None or zeros.data_type != TensorProto.UINT8):
        return None
    if group_index or not all(constants):
        return None
    if any(each and each.data_type == TensorProto.FLOAT16 for each in constants):
        return None
    zeros_of_nibbles = ["" if minimum else zero_points] if nibbles else []
    weights = (weight, scale, bias, *zeros_of_nibbles, minimum)
    last = difference if minimum and difference is not None else node
    settings = {"num_inputs": num_inputs}
    op_type = "Linear4" if nibbles else "Linear8"
    return Product(op_type, source, weights, settings, last.output[0], last)


def _minimum(graph: Graph, node: NodeProto | None, source: str, product: str) -> str:
    """The minima that a node subtracts from a product, times sums of blocks; or an empty name."""
    if node is None or node.op_type != "Sub" or node.input[0] != product:
        return ""
    least = graph.producer(node.input[1], "MatMul")
    sums = None if least is None else graph.producer(least.input[0], "MatMul")
    if least is None or sums is None or graph.num_uses(least.output[0]) != 1:
        return ""
    if sums.input[0] != source or not sums.input[1].startswith(BLOCK_SUMS):
        return ""
    centered = graph.producer(least.input[1], "Sub")  # less the zeros' share
    minimum = least.input[1] if centered is None else centered.input[0]
    return str(minimum) if graph.is_constant(minimum) else ""


def _transposed(graph: Graph, name: str) -> str:
    """The initializer that a value is the transpose of, or an empty name."""
    node = graph.producers.get(name)
    if node is None or node.op_type != "Transpose" or not graph.is_constant(node.input[0]):
        return ""
    permutation = helper.get_attribute_value(node.attribute[0]) if node.attribute else [1, 0]
    return str(node.input[0]) if list(permutation) == [1, 0] else ""


def _divided(graph: Graph, name: str) -> str | None:
    """The value that was divided by the largest magnitude of each row, or None."""
    division = graph.producers.get(name)
    if division is None or division.op_type != "Div":
        return None
    source, peak = division.input
    largest = graph.producers.get(peak)
    if largest is None or largest.op_type != "ReduceMax":
        return None
    axis = graph.scalar(largest.input[1]) if len(largest.input) > 1 else None
    last_axis = graph.rank(largest.input[0]) - 1  # -1 if its rank is not known
    magnitude = graph.producers.get(largest.input[0])
    if axis not in (-1, last_axis) or magnitude is None or magnitude.op_type != "Abs":
        return None
    return str(source) if magnitude.input[0] == source else None


def _gated(
    graph: Graph, node: NodeProto, products: dict[str, Product]
) -> tuple[Product, Product] | None:
    """Gate and up if a node computes ``silu(gate) * up`` and nothing else needs either."""
    if node.op_type != "Mul":
        return None
    for silu, up_name in (node.input, reversed(node.input)):
        gate_name = _silu(graph, silu)
        if gate_name is None or graph.num_uses(gate_name) != 2 or graph.num_uses(up_name) != 1:
            continue
        gate, up = products.get(gate_name), products.get(up_name)
        if gate is None or up is None or not gate.pairs_with(up):
            continue
        # In blocks of one size, whose rows are rounded once
        if graph.dims(gate.weights[0]) == graph.dims(up.weights[0]):
            return gate, up
    return None


def _is_gelu(graph: Graph, node: NodeProto, products: dict[str, Product]) -> bool:
    """Whether a node adds a bias to a product, which nothing else needs, and takes its GELU."""
    if node.op_type != "BiasGelu" or graph.num_uses(node.input[0]) != 1:
        return False
    product = products.get(node.input[0])
    return product is not None and not product.weights[2] and graph.is_constant(node.input[1])


def _silu(graph: Graph, name: str) -> str | None:
    """The argument of a SiLU, if a value is one and has one use."""
    node = graph.producers.get(name)
    if node is None or node.op_type != "Mul" or graph.num_uses(name) != 1:
        return None
    for value, sigmoid in (node.input, reversed(node.input)):
        producer = graph.producers.get(sigmoid)
        if producer is None or producer.op_type != "Sigmoid" or graph.num_uses(sigmoid) != 1:
            continue
        if producer.input[0] == value:
            return str(value)
    return None
