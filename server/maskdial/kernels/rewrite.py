"""Rewrites a graph for the kernels: quantized products and causal attention become our operators.

The graph on disk has ONNX Runtime's own operators (`maskdial_export.quantize.quantize` writes
them), so that it runs with or without the kernels. ``Linear`` (``src/linear.cpp``) replaces what
quantizes the input, ``MatMulIntegerToFloat``, and what undoes the scale of each row; ``Linear4``
(``src/linear4.cpp``) that of ``MatMulNBits``. Where ``silu(gate) * up`` or ``BiasGelu`` follows,
one operator computes all of it, and so it does with a sum and its RMS norm that come before
(`maskdial.kernels.fuse`). ``CausalAttention`` takes the inputs of ``GroupQueryAttention`` and
writes new keys and values where the past is: the graph has no outputs ``present_*``.
`maskdial.kernels.varlen` rewrites masked models.
Whatever does not look exactly so stays as it is.

If nothing else looks at how a causal graph's tokens are divided into rows, the rewritten graph has
another input, ``new_tokens`` int32 (batch,): it takes the tokens of all rows one after the other,
(1, their sum), so that steps and prompts share a pass without padding.

A causal graph also gets a ``Summary`` of its logits (``src/summary.cpp``).

With a KV cache of integers, ``Int8CausalAttention`` or ``Int16CausalAttention`` takes its place,
and the graph's inputs change their type.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from maskdial.bundle.manifest import CACHE_HEADERS, CacheChoice, CacheInteger
from maskdial.errors import BundleError, ConfigError
from maskdial.kernels.fuse import join_biases, join_products, join_rms_norms
from maskdial.kernels.graph import ATTENTION, ATTENTION_OVER, DOMAIN, QUANTIZED, attributes_of
from maskdial.kernels.prune import narrow_last_layer
from maskdial.kernels.varlen import rewrite_masked_attention

NEW_TOKENS = "new_tokens"
SUMMARY = {
    "best": TensorProto.INT64,
    "peaks": TensorProto.FLOAT,
    "totals": TensorProto.DOUBLE,
}
"""Outputs of ``Summary``; `maskdial.runtime.logits.SummarizedLogits` describes them."""
_VERSION = 1
_ZERO_POINT = 128
_PRODUCT = "MatMulIntegerToFloat"
_PRODUCT4 = "MatMulNBits"
_CHUNK = 32  # inputs; blocks of 4-bit weights are whole chunks; processor.h
# What ``MatMulNBits`` has to say of itself: 4-bit weights, and inputs rounded to int8.
_BITS, _INT8_INPUTS = 4, 4
_LANES = 16  # heads are vectorized over; processor.h
_ROW_INPUTS = ("seqlens_k", "total_sequence_length")
_NUM_ATTENTION_OUTPUTS = 3
_NUM_ATTENTION_INPUTS = 9  # before the new tokens; some may be missing
_ATTENTION_DEFAULTS: dict[str, float] = {
    "rotary_interleaved": 0,
    "local_window_size": -1,
    "softcap": 0.0,
    "smooth_softmax": 0,
}


@dataclass(frozen=True, slots=True)
class _Product:
    """A quantized product, as the graph on disk has it.

    Attributes:
        op_type: of the operator that takes its place.
        source: the float value that is quantized.
        weights: the operator's inputs after the source: weight, scale, bias or an empty name.
        attributes: the operator's, but for ``gelu``.
        output: the result's name.
        last: the node that computes the result.
    """

    op_type: str
    source: str
    weights: tuple[str, str, str]
    attributes: dict[str, float]
    output: str
    last: NodeProto

    def node(self, output: str, *, up: "_Product | None" = None, gelu_bias: str = "") -> NodeProto:
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

    def pairs_with(self, other: "_Product") -> bool:
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
        num_replaced: how many quantized products and attentions the kernels compute.
        num_left: how many products of int8 weights ONNX Runtime computes.
        kv_cache: the integers of its KV cache; None if it has none, or one of floats.
    """

    model: bytes
    num_replaced: int
    num_left: int
    kv_cache: CacheInteger | None


def rewrite(path: Path, kv_cache: CacheChoice = "float") -> Rewritten:
    """Reads a graph and rewrites it.

    Args:
        path: the graph.
        kv_cache: what its KV cache is to consist of. ``auto``: of int16 if all of its attention is
            ours, and its products are quantized; else of floats.

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
    rewriter = _Rewriter(model)
    num_replaced = rewriter.run()
    integer: CacheInteger | None = None
    if kv_cache == "auto":
        integer = "int16" if rewriter.computes_in_integers() else None
    elif kv_cache != "float":
        integer = kv_cache
    if integer is not None:
        rewriter.quantize_cache(integer)
    join_biases(model.graph)
    num_replaced += rewrite_masked_attention(model.graph)
    narrow_last_layer(model.graph)
    join_products(model.graph)
    join_rms_norms(model.graph)
    if num_replaced:
        summarize_logits(model.graph)
        model.opset_import.append(helper.make_opsetid(DOMAIN, _VERSION))
    num_left = sum(node.op_type == _PRODUCT for node in model.graph.node)
    return Rewritten(model.SerializeToString(), num_replaced, num_left, integer)


def summarize_logits(graph: GraphProto) -> None:
    """Lets a causal graph tell what greedy decoding and log-probabilities need of its logits."""
    outputs = {value.name: value.type.tensor_type for value in graph.output}
    logits = outputs.get("logits")
    if "past_key.0" not in {value.name for value in graph.input} or logits is None:
        return
    if logits.elem_type == TensorProto.FLOAT:
        graph.node.append(helper.make_node("Summary", ["logits"], list(SUMMARY), domain=DOMAIN))
        graph.output.extend(
            helper.make_tensor_value_info(name, kind, ["num_rows"])
            for name, kind in SUMMARY.items()
        )


class _Rewriter:
    def __init__(self, model: ModelProto) -> None:
        self._graph: GraphProto = model.graph
        self._initializers = {each.name: each for each in self._graph.initializer}
        self._producers = {name: node for node in self._graph.node for name in node.output if name}
        self._uses = Counter(name for node in self._graph.node for name in node.input)
        self._uses.update(value.name for value in self._graph.output)
        self._ranks = {
            value.name: len(value.type.tensor_type.shape.dim) for value in self._graph.value_info
        }
        self._consumers: dict[str, list[NodeProto]] = {}
        for node in self._graph.node:
            for name in node.input:
                self._consumers.setdefault(name, []).append(node)

    def run(self) -> int:
        """Rewrites the graph in place; returns how many products and attentions it replaced."""
        products = {
            product.output: product
            for node in self._graph.node
            if (product := self._product(node) or self._product4(node)) is not None
        }
        replacements: dict[int, NodeProto] = {}
        for node in self._graph.node:
            attention = self._attention(node)
            if attention is not None:
                replacements[id(node)] = attention
        num_replaced = len(products) + len(replacements)
        if not num_replaced:
            return 0
        single = dict(products)
        for node in self._graph.node:
            pair = self._gated(node, products)
            if pair is not None:
                gate, up = pair
                replacements[id(node)] = gate.node(node.output[0], up=up)
                del single[gate.output], single[up.output]
            elif self._is_gelu(node, products):
                product = single.pop(node.input[0])
                replacements[id(node)] = product.node(node.output[0], gelu_bias=node.input[1])
        for product in single.values():
            replacements[id(product.last)] = product.node(product.output)
        nodes = [replacements.get(id(node), node) for node in self._graph.node]
        self._leave_out_presents(nodes)
        nodes = _needed(nodes, {value.name for value in self._graph.output})
        del self._graph.node[:]
        self._graph.node.extend(nodes)
        used = {name for node in nodes for name in node.input}
        initializers = [each for each in self._graph.initializer if each.name in used]
        del self._graph.initializer[:]
        self._graph.initializer.extend(initializers)
        self._pack()
        return num_replaced

    def _leave_out_presents(self, nodes: list[NodeProto]) -> None:
        """Removes the graph's outputs that no operator computes any more."""
        left_out = self._producers.keys() - {name for node in nodes for name in node.output}
        kept = [value for value in self._graph.output if value.name not in left_out]
        del self._graph.output[:]
        self._graph.output.extend(kept)

    def _pack(self) -> None:
        """Lets attention take packed rows, if only attention knows of rows."""
        attentions = [node for node in self._graph.node if node.op_type == ATTENTION]
        caches = {name for node in attentions for name in node.input[3:5]}
        of_rows = {*caches, *_ROW_INPUTS}
        inputs = {value.name for value in self._graph.input}
        others = [node for node in self._graph.node if node.op_type != ATTENTION]
        if (
            not attentions
            or not of_rows <= inputs
            or any(node.op_type == "GroupQueryAttention" for node in others)
            or any(of_rows.intersection(node.input) for node in others)
        ):
            return
        for node in attentions:
            missing = _NUM_ATTENTION_INPUTS - len(node.input)
            node.input.extend([*[""] * missing, NEW_TOKENS])
        counts = helper.make_tensor_value_info(NEW_TOKENS, TensorProto.INT32, ["batch"])
        self._graph.input.append(counts)

    def computes_in_integers(self) -> bool:
        """Whether the rewritten graph's attention is all ours, and its products are quantized."""
        return self._attends() and not QUANTIZED.isdisjoint(self._kinds())

    def _attends(self) -> bool:
        kinds = self._kinds()
        return ATTENTION in kinds and "GroupQueryAttention" not in kinds

    def _kinds(self) -> set[str]:
        return {node.op_type for node in self._graph.node}

    def quantize_cache(self, integer: CacheInteger) -> None:
        """Turns the KV cache of the rewritten graph into one of integers, in place.

        Raises:
            ConfigError: the graph has attention that was not replaced, or none that was.
        """
        if not self._attends():
            raise ConfigError(
                "the kernels do not compute this model's attention, so its KV cache cannot be "
                f"{integer}; serve it with --kv-cache-dtype auto"
            )
        elem_type = helper.np_dtype_to_tensor_dtype(np.dtype(integer))
        values = {value.name: value for value in self._graph.input}
        for node in self._graph.node:
            if node.op_type != ATTENTION:
                continue
            node.op_type = ATTENTION_OVER[integer]
            for name in node.input[3:5]:
                cache = values[name].type.tensor_type
                cache.elem_type = elem_type
                cache.shape.dim[-1].dim_value += CACHE_HEADERS[integer]

    def _attention(self, node: NodeProto) -> NodeProto | None:
        """What takes the place of a ``GroupQueryAttention``; None for a kind that has no kernel."""
        # Cross-attention writes no keys and values.
        if node.op_type != "GroupQueryAttention" or len(node.output) < _NUM_ATTENTION_OUTPUTS:
            return None
        past_key, rotation = node.input[3], node.input[7:]
        attributes = {
            name: value
            for name, value in attributes_of(node).items()
            if value != _ATTENTION_DEFAULTS.get(name)
        }
        rotates = attributes.pop("do_rotary", 0)
        plain = attributes.keys() <= {"num_heads", "kv_num_heads", "scale"}
        if not plain or len(rotation) > 2 or rotates != (len(rotation) == 2):
            return None
        if self._head_size(past_key) % _LANES:
            return None
        presents = node.output[1:_NUM_ATTENTION_OUTPUTS]
        if any(self._uses[name] != 1 or name in self._consumers for name in presents):
            return None
        scale = attributes.pop("scale", 0.0)
        return helper.make_node(
            ATTENTION, node.input, node.output[:1], domain=DOMAIN, scale=scale, **attributes
        )

    def _head_size(self, past: str) -> int:
        """The last dimension of a KV cache of float32; 1 for another one, or if it is not known."""
        for value in self._graph.input:
            cache = value.type.tensor_type
            if value.name == past and cache.elem_type == TensorProto.FLOAT:
                return cache.shape.dim[-1].dim_value or 1
        return 1

    def _product(self, node: NodeProto) -> _Product | None:
        """The product that a ``MatMulIntegerToFloat`` is part of; None if it is another kind."""
        if node.op_type != _PRODUCT or len(node.input) < 5:
            return None
        rows, weight, row_step, scale, zero_point, *rest = node.input
        weight_zero_point, bias = (*rest, "", "")[:2]
        quantized = self._producers.get(rows)
        if quantized is None or quantized.op_type != "QuantizeLinear" or weight_zero_point:
            return None
        value, step = quantized.input[:2]
        if list(quantized.input[1:]) != [row_step, zero_point]:
            return None
        transposed = weight not in self._initializers
        if transposed:
            weight = self._transposed(weight)
        step_size, zero = self._scalar(step), self._scalar(zero_point)
        constant = all(n in self._initializers for n in (weight, scale, bias) if n)
        if step_size is None or zero != _ZERO_POINT or not constant:
            return None
        output, last = node.output[0], node
        source = self._divided(value)
        if source is not None:
            peak = self._producers[value].input[1]
            multiplied = self._only_consumer(output)
            if bias or multiplied is None or sorted(multiplied.input) != sorted([output, peak]):
                return None
            output, last = multiplied.output[0], multiplied
        attributes: dict[str, float] = {
            "step": step_size,
            "by_row": int(source is not None),
            "transposed": int(transposed),
        }
        weights = (weight, scale, bias)
        return _Product("Linear", source or value, weights, attributes, output, last)

    def _product4(self, node: NodeProto) -> _Product | None:
        """The product that a ``MatMulNBits`` computes; None if it is another kind."""
        if node.op_type != _PRODUCT4:
            return None
        source, weight, scale, *rest = node.input
        zero_points, group_index, bias = (*rest, "", "", "")[:3]
        attributes = attributes_of(node)
        num_inputs, _, block_size = (attributes.pop(name, 0) for name in ("K", "N", "block_size"))
        if attributes != {"bits": _BITS, "accuracy_level": _INT8_INPUTS} or block_size % _CHUNK:
            return None
        constants = [self._initializers.get(name) for name in (weight, scale, bias) if name]
        if zero_points or group_index or not all(constants):
            return None
        if any(each and each.data_type == TensorProto.FLOAT16 for each in constants):
            return None
        weights = (weight, scale, bias)
        return _Product(
            "Linear4", source, weights, {"num_inputs": num_inputs}, node.output[0], node
        )

    def _transposed(self, name: str) -> str:
        """The initializer that a value is the transpose of, or an empty name."""
        node = self._producers.get(name)
        if node is None or node.op_type != "Transpose" or node.input[0] not in self._initializers:
            return ""
        permutation = helper.get_attribute_value(node.attribute[0]) if node.attribute else [1, 0]
        return str(node.input[0]) if list(permutation) == [1, 0] else ""

    def _divided(self, name: str) -> str | None:
        """The value that was divided by the largest magnitude of each row, or None."""
        division = self._producers.get(name)
        if division is None or division.op_type != "Div":
            return None
        source, peak = division.input
        largest = self._producers.get(peak)
        if largest is None or largest.op_type != "ReduceMax":
            return None
        axis = self._scalar(largest.input[1]) if len(largest.input) > 1 else None
        last_axis = self._ranks.get(largest.input[0], 0) - 1  # -1 if its rank is not known
        magnitude = self._producers.get(largest.input[0])
        if axis not in (-1, last_axis) or magnitude is None or magnitude.op_type != "Abs":
            return None
        return str(source) if magnitude.input[0] == source else None

    def _gated(
        self, node: NodeProto, products: dict[str, _Product]
    ) -> tuple[_Product, _Product] | None:
        """Gate and up if a node computes ``silu(gate) * up`` and nothing else needs either."""
        if node.op_type != "Mul":
            return None
        for silu, up_name in (node.input, reversed(node.input)):
            gate_name = self._silu(silu)
            if gate_name is None or self._uses[gate_name] != 2 or self._uses[up_name] != 1:
                continue
            gate, up = products.get(gate_name), products.get(up_name)
            if gate is not None and up is not None and gate.pairs_with(up):
                return gate, up
        return None

    def _is_gelu(self, node: NodeProto, products: dict[str, _Product]) -> bool:
        """Whether a node adds a bias to a product, which nothing else needs, and takes its GELU."""
        if node.op_type != "BiasGelu" or self._uses[node.input[0]] != 1:
            return False
        product = products.get(node.input[0])
        return (
            product is not None and not product.weights[2] and node.input[1] in self._initializers
        )

    def _silu(self, name: str) -> str | None:
        """What a value is the SiLU of, if it has one use."""
        node = self._producers.get(name)
        if node is None or node.op_type != "Mul" or self._uses[name] != 1:
            return None
        for value, sigmoid in (node.input, reversed(node.input)):
            producer = self._producers.get(sigmoid)
            if producer is None or producer.op_type != "Sigmoid" or self._uses[sigmoid] != 1:
                continue
            if producer.input[0] == value:
                return str(value)
        return None

    def _only_consumer(self, name: str) -> NodeProto | None:
        """The ``Mul`` that is the only use of a value."""
        consumers = self._consumers.get(name, [])
        if len(consumers) != 1 or self._uses[name] != 1 or consumers[0].op_type != "Mul":
            return None
        return consumers[0]

    def _scalar(self, name: str) -> float | None:
        """The value of an initializer of one element that is stored in the graph."""
        tensor = self._initializers.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        array = numpy_helper.to_array(tensor)
        return float(array.reshape(-1)[0]) if array.size == 1 else None


def _needed(nodes: list[NodeProto], outputs: set[str]) -> list[NodeProto]:
    """The nodes whose results are used, in their order."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if any(name in wanted for name in node.output):
            wanted.update(node.input)
            kept.append(node)
    return kept[::-1]
