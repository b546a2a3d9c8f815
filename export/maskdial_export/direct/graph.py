"""Writes a decoder as the graph that `maskdial.bundle.bundle` documents.

The operators and their order are those of a traced and optimized graph, so that its logits have the
same bits: a sum before a norm is part of the norm's operator, query, key and value are one product
unless they have norms of their own, and rotation is the attention's.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from maskdial_export.direct.altup_graph import AltUpWriter
from maskdial_export.direct.data import DataFile
from maskdial_export.direct.decoder import (
    Attends,
    Beside,
    Decoder,
    Feeds,
    Floats,
    Rotary,
    SharingAttends,
)
from maskdial_export.direct.latent_graph import LatentWriter
from maskdial_export.direct.mixture import MixtureWriter
from maskdial_export.direct.nodes import IR_VERSION, OPSET, Nodes
from maskdial_export.direct.products import Products
from maskdial_export.direct.recurrent import Recurrent
from maskdial_export.direct.recurrent_graph import RecurrentWriter
from maskdial_export.direct.sharing_graph import SharingWriter
from maskdial_export.direct.streams import LayerInputs
from maskdial_export.direct.weights import Weights

_WHOLE = 2**63 - 1  # as the end of a slice


class GraphWriter:
    """Writes the graph of one decoder."""

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        products: Products,
        nodes: Nodes,
        data: DataFile,
        window: Callable[[int], str] | None = None,
    ) -> None:
        """``window`` gives what hides tokens so far away, of a decoder that reads a text in one
        pass, without a cache; None: there is a cache."""
        self._window = window
        self._decoder = decoder
        self._weights = weights
        self._products = products
        self._nodes = nodes
        self._data = data
        self._tables: dict[int, tuple[str, str]] = {}
        self._stream = ""
        self._branch: str | None = None
        self._bias: str | None = None
        self._mixture = None
        if decoder.experts is not None:
            self._mixture = MixtureWriter(
                decoder.experts, decoder.hidden_size, products, nodes, self._vector
            )
        self._latent = None
        if decoder.latent is not None:
            self._latent = LatentWriter(
                decoder.latent, decoder.num_heads, products, nodes, self._vector
            )
        self._recurrent = RecurrentWriter(decoder, weights, products, nodes, self._keep)
        self._sharing = SharingWriter(decoder, products, nodes, self._vector, self._rotary_tables)
        self._altup = None
        if decoder.altup is not None:
            self._altup = AltUpWriter(
                decoder.altup, decoder.hidden_size, products, nodes, self._vector, self._norm
            )
        self._attending = 0
        self._layer_inputs = ""

    def write(self) -> onnx.ModelProto:
        """The graph, whose initializers are in the weight file."""
        decoder, nodes, hidden = self._decoder, self._nodes, self.hidden()
        flat = nodes.constant("flat", np.array([-1, decoder.hidden_size]))
        minus = nodes.constant("minus_one", np.array([-1]))
        tokens = nodes.add("Reshape", [hidden, flat], allowzero=1)
        rows = nodes.add("Reshape", ["rows", minus], allowzero=0)
        chosen = nodes.add("Gather", [tokens, rows], axis=0, modules="model")
        if decoder.hidden_divisor is not None:
            divisor = nodes.number("hidden.divisor", decoder.hidden_divisor)
            chosen = nodes.add("Div", [chosen, divisor])
        self._write_head(chosen)
        return self._finish()

    def hidden(self) -> str:
        """Writes all but the head: the hidden states of tokens."""
        decoder, nodes = self._decoder, self._nodes
        self._stream = self._products.look_up()
        if decoder.embedding_scale is not None:
            scale = nodes.number("embedding.scale", decoder.embedding_scale)
            self._stream = nodes.add("Mul", [self._stream, scale])
        if decoder.layer_inputs is not None:
            self._layer_inputs = self._sharing.layer_inputs(decoder.layer_inputs, self._stream)
        if decoder.positions is not None:
            module = decoder.positions.module
            inputs = [self._vector(f"{module}.weight"), "position_ids"]
            rows = nodes.add("Gather", inputs, axis=0, modules=module)
            self._stream = nodes.add("Add", [rows, self._stream])
        streams = None if self._altup is None else self._altup.begin(self._stream)
        for index in range(len(decoder.layers)):
            if self._altup is None or streams is None:
                self._write_layer(index)
            else:
                streams = self._write_streams(index, self._altup, streams)
        if self._altup is not None and streams is not None:
            self._stream = self._altup.end(streams)
        return self._normalized(decoder.names.last_norm)

    def _write_layer(self, index: int) -> None:
        decoder, norms = self._decoder, self._decoder.norms
        layer = decoder.layer(index)
        source = self._normalized(_within(layer, norms.before_attention))
        kind = decoder.layers[index]
        if isinstance(kind, Feeds):
            self._feed(index, source)
            return
        self._mix(layer, kind, source)
        self._settle(_within(layer, norms.after_attention))
        if decoder.alternates:
            return
        aside = None
        if decoder.parallel is None:
            source = self._normalized(_within(layer, norms.before_mlp))
        elif decoder.parallel == "in_turn":
            self._normalized(None)
        else:
            aside = self._taken()
        self._feed(index, source)
        if aside is not None:
            self._branch = self._nodes.add("Add", [aside, self._taken()])
        self._settle(_within(layer, norms.after_mlp))
        self._end(layer, index)

    def _mix(self, layer: str, kind: Attends | Recurrent | Beside, source: str) -> None:
        """Begins a sum: what a layer adds of other tokens."""
        if isinstance(kind, Attends):
            self._add_attention(layer, kind, source)
            return
        recurrent = kind.recurrent if isinstance(kind, Beside) else kind
        if isinstance(kind, Beside):
            # ONNX Runtime makes a factor a product's own only of what it knows the shape of
            self._nodes.widths[source] = self._decoder.hidden_size
        self._branch, self._bias = self._recurrent.write(layer, recurrent, source)
        if isinstance(kind, Beside):
            first = self._taken()
            self._add_attention(layer, kind.attends, source)
            self._branch = self._nodes.add("Add", [first, self._taken()])

    def _add_attention(self, layer: str, kind: Attends, source: str) -> None:
        decoder, scales = self._decoder, self._decoder.multipliers
        source = self._nodes.scaled(source, "attention.in", scales.attention_in)
        output = f"{layer}.{decoder.names.attention_output}"
        attended = self._attend(layer, kind, source)
        self._add(attended, output, decoder.biases.attention_output)
        self._scale("attention.out", scales.attention_out)

    def _scale(self, name: str, factor: float | None) -> None:
        """Multiplies what is about to be added."""
        if factor is not None:
            self._branch = self._nodes.scaled(self._taken(), name, factor)

    def _feed(self, index: int, source: str) -> None:
        """Begins a sum: what a layer's MLP and its experts add."""
        decoder, layer, mixed = self._decoder, self._decoder.layer(index), None
        if self._mixture is not None and decoder.is_mixed(index):
            mixed = self._mixed(self._mixture, layer, source)
            self._branch, self._bias = mixed, None
        if decoder.has_mlp(index):
            down = f"{layer}.{decoder.names.down}"
            self._add(self._mlp(layer, source, index), down, decoder.biases.mlp)
            self._scale("mlp.out", decoder.multipliers.mlp_out)
            if mixed is not None:
                assert self._branch is not None, "an MLP was computed"
                assert decoder.experts is not None, "they were mixed"
                if decoder.experts.norms is not None:
                    self._branch = self._norm(
                        self._branch, f"{layer}.{decoder.experts.norms.beside}"
                    )
                self._branch = self._nodes.add("Add", [mixed, self._branch])

    def _write_streams(self, index: int, altup: AltUpWriter, streams: str) -> str:
        """A layer of a decoder with several streams; returns them behind it."""
        decoder, norms = self._decoder, self._decoder.norms
        layer, kind, inputs = decoder.layer(index), decoder.layers[index], decoder.layer_inputs
        assert isinstance(kind, Attends), "no layer is recurrent"
        assert inputs is not None, "all layers have them"
        predictions = altup.predict(layer, streams)
        self._stream = altup.active(predictions)
        source = self._normalized(_within(layer, norms.before_attention))
        beside = altup.beside(layer, source)
        attended = self._attend(layer, kind, source)
        output = f"{layer}.{decoder.names.attention_output}"
        self._add(attended, output, decoder.biases.attention_output)
        self._settle(_within(layer, norms.after_attention))
        self._stream = altup.joined(self._normalized(None), beside)
        source = self._normalized(_within(layer, norms.before_mlp))
        self._add(self._mlp(layer, source, index), f"{layer}.{decoder.names.down}", False)
        self._settle(_within(layer, norms.after_mlp))
        corrected = altup.correct(layer, predictions, self._normalized(None))
        first = altup.scaled(layer, altup.active(corrected))
        own = self._gated_input(layer, index, inputs, first)
        added = self._norm(
            self._products.project(own, [f"{layer}.{inputs.output}"]),
            f"{layer}.{inputs.output_norm}",
        )
        return altup.add_to_others(corrected, added)

    def _gated_input(self, layer: str, index: int, inputs: LayerInputs, source: str) -> str:
        """A layer's own input, gated by the stream."""
        gate = self._activated(self._products.project(source, [f"{layer}.{inputs.gate}"]))
        own = self._sharing.input_of(self._layer_inputs, index)
        return self._nodes.add("Mul", [gate, own])

    def _mixed(self, mixture: MixtureWriter, layer: str, source: str) -> str:
        """What experts give, of what the MLP reads or of what they read beside it."""
        experts, shape = self._decoder.experts, self._full_shape(self._decoder.hidden_size)
        if experts is None or experts.norms is None:
            return mixture.write(layer, source, shape)
        routed = None
        if experts.router.scale is not None:
            routed = self._sharing.routed(layer, self._stream, experts.router.scale)
        read = self._norm(self._stream, f"{layer}.{experts.norms.before}")
        mixed = mixture.write(layer, read, shape, routed)
        return self._norm(mixed, f"{layer}.{experts.norms.after}")

    def _end(self, layer: str, index: int) -> None:
        """What a layer adds of its own input, and the factor of its result."""
        decoder, nodes, inputs = self._decoder, self._nodes, self._decoder.layer_inputs
        if inputs is not None:
            gated = self._gated_input(layer, index, inputs, self._normalized(None))
            self._branch = self._products.project(gated, [f"{layer}.{inputs.output}"])
            self._settle(f"{layer}.{inputs.output_norm}")
        if decoder.layer_scalar is not None:
            factor = self._vector(f"{layer}.{decoder.layer_scalar}")
            self._stream = nodes.add("Mul", [self._normalized(None), factor])

    def _add(self, source: str, module: str, has_bias: bool) -> None:
        """Begins a sum: what a sublayer's last product adds to the stream."""
        if self._decoder.inputs_first:
            self._branch = self._gemm(source, module)
            return
        self._branch = self._products.project(source, [module])
        self._bias = self._vector(f"{module}.bias") if has_bias else None

    def _settle(self, norm: str | None) -> None:
        """Normalizes and scales what is about to be added, with its bias, where a family does."""
        factor = self._decoder.residual_scale
        if norm is None and factor is None:
            return
        self._branch = self._taken()
        if norm is not None:
            self._branch = self._norm(self._branch, norm)
        if factor is not None:
            scale = self._nodes.number("residual.scale", factor)
            self._branch = self._nodes.add("Mul", [self._branch, scale])

    def _taken(self) -> str:
        """What is about to be added, with its bias; the sum is closed."""
        branch, bias = self._branch, self._bias
        assert branch is not None, "a sublayer was computed"
        self._branch = self._bias = None
        return branch if bias is None else self._nodes.add("Add", [branch, bias])

    def _normalized(self, norm: str | None) -> str:
        """Ends a sum if one is open; the stream after a norm, or as it is."""
        if self._branch is None:
            return self._stream if norm is None else self._norm(self._stream, norm)
        if norm is None or self._decoder.norm_kind != "rms":
            self._stream = self._nodes.add("Add", [self._stream, self._taken()])
            return self._stream if norm is None else self._norm(self._stream, norm)
        branch, self._branch = self._branch, None
        bias, self._bias = self._bias, None
        inputs = [branch, self._stream, self._norm_weight(norm)]
        inputs += [] if bias is None else [bias]
        normalized = f"{norm}.output"
        self._stream = f"{norm}.sum"
        self._nodes.add_all(
            "SkipSimplifiedLayerNormalization",
            inputs,
            [normalized, "", "", self._stream],
            epsilon=self._decoder.epsilon,
        )
        return normalized

    def _norm(self, source: str, norm: str) -> str:
        nodes, kind = self._nodes, self._decoder.norm_kind
        inputs, epsilon = [source, self._norm_weight(norm)], self._decoder.epsilon
        if kind == "layer":
            inputs.append(self._vector(f"{norm}.bias"))
            return nodes.add("LayerNormalization", inputs, axis=-1, epsilon=epsilon)
        if kind == "centered":
            axes = nodes.constant("minus_one", np.array([-1]))
            mean = nodes.add("ReduceMean", [source, axes], keepdims=1)
            inputs[0] = nodes.add("Sub", [source, mean])
        return nodes.add(
            "SimplifiedLayerNormalization", inputs, axis=-1, epsilon=epsilon, stash_type=1
        )

    def _norm_weight(self, norm: str) -> str:
        name = f"{norm}.weight"
        if name in self._nodes.initializers:
            return name
        values = self._weights.values(name)
        shifted = values + np.float32(1) if self._decoder.shifted else values
        return self._nodes.keep(self._data.write(name, shifted))

    def _vector(self, *names: str) -> str:
        """Vectors of the checkpoint, one after the other."""
        joined: Floats = np.concatenate([self._weights.values(name) for name in names])
        return self._keep(",".join(names), joined)

    def _keep(self, name: str, values: Floats) -> str:
        """An initializer, written once."""
        if name in self._nodes.initializers:
            return name
        return self._nodes.keep(self._data.write(name, values))

    def _attend(self, layer: str, kind: Attends, source: str) -> str:
        decoder, nodes, index = self._decoder, self._nodes, self._attending
        if decoder.reads_ahead:
            return self._attend_both_ways(layer, kind, source)
        self._attending += 1
        own = kind if isinstance(kind, SharingAttends) else None
        attributes: dict[str, Any] = {
            "num_heads": decoder.num_heads,
            "kv_num_heads": decoder.num_kv_heads if own is None else own.num_kv_heads,
            "scale": decoder.attention_scale,
        }
        if kind.window is not None:
            attributes["local_window_size"] = kind.window
        if decoder.attention_softcap is not None:
            attributes["softcap"] = decoder.attention_softcap
        tables: list[str] = []
        if kind.rotary is not None and self._latent is None and own is None:
            attributes |= {"do_rotary": 1, "rotary_interleaved": int(kind.rotary.interleaved)}
            tables += self._rotary_tables(kind.rotary)
        if decoder.sinks:
            tables += [""] * (4 - len(tables))  # the places of positions and of a bias are empty
            tables.append(self._vector(f"{layer}.self_attn.sinks"))
        past = [f"past_key.{index}", f"past_value.{index}"]
        if self._window is not None:
            past = ["", ""]
        if self._latent is not None:
            assert kind.rotary is not None, "a part of each key turns"
            turns = self._rotary_tables(kind.rotary)
            queries, gate = [*self._latent.parts(f"{layer}.self_attn", source, turns)], ""
        elif own is not None:
            queries, gate = [*self._sharing.queries(layer, own, source)], ""
        else:
            *queries, gate = self._queries(layer, source)
        inputs = [*queries, *past, "seqlens_k", "total_sequence_length", *tables]
        output = f"{layer}.self_attn.output"
        outputs = [output, f"present_key.{index}", f"present_value.{index}"]
        nodes.add_all("GroupQueryAttention", inputs, outputs, **attributes)
        if self._latent is not None:
            return self._latent.narrowed(output)
        if not gate:
            return output
        return nodes.add("Mul", [output, nodes.add("Sigmoid", [gate])])

    def _attend_both_ways(self, layer: str, kind: Attends, source: str) -> str:
        decoder, nodes = self._decoder, self._nodes
        assert self._window is not None, "a cache knows only what was before"
        *parts, _ = self._queries(layer, source)
        groups = decoder.num_heads // decoder.num_kv_heads
        if kind.rotary is not None:
            zero = nodes.constant("axes.0", np.array([0]))
            tables = [zero, *self._rotary_tables(kind.rotary)]
            for place, count in enumerate((decoder.num_heads, decoder.num_kv_heads)):
                inputs = [parts[place], *tables]
                parts[place] = nodes.add("RotaryEmbedding", inputs, num_heads=count)
        for place in (1, 2) if groups > 1 else ():
            heads = nodes.split_heads(parts[place], decoder.head_dim)
            each = nodes.add("Unsqueeze", [heads, nodes.constant("axes.3", np.array([3]))])
            shape = nodes.constant("groups", np.array([1, 1, 1, groups, 1]))
            parts[place] = nodes.join_heads(nodes.add("Expand", [each, shape]))
        inputs = [*parts, "", "lengths"]
        if kind.window is not None:
            inputs.append(self._window(kind.window))
        scale = decoder.attention_scale
        return nodes.add("MultiHeadAttention", inputs, num_heads=decoder.num_heads, scale=scale)

    def _queries(self, layer: str, source: str) -> tuple[str, str, str, str]:
        """Queries, keys, values and gates; without names of keys and values, all are in the first.

        Without a name of gates there are none.
        """
        decoder, nodes = self._decoder, self._nodes
        has_bias = decoder.biases.query_key_value
        attention = f"{layer}.{decoder.names.attention}"
        if decoder.inputs_first:
            packed = self._gemm(source, f"{layer}.{decoder.names.query_key_value}")
            return packed, "", "", ""
        if decoder.packed_attention:
            module = f"{layer}.{decoder.names.query_key_value}"
            packed = self._products.project(source, [module])
            if has_bias:
                packed = nodes.add("Add", [packed, self._vector(f"{module}.bias")])
            return *self._slices(packed), ""
        modules = [f"{attention}.{name}_proj" for name in "qkv"]
        if decoder.head_norms is None and not (decoder.apart or decoder.reads_ahead):
            packed = self._products.project(source, modules)
            if has_bias:
                biases = self._vector(*(f"{module}.bias" for module in modules))
                packed = nodes.add("Add", [packed, biases])
            nodes.widths[packed] = decoder.query_size + 2 * decoder.kv_size
            return packed, "", "", ""
        parts, gate = [], ""
        for module in modules:
            part = self._products.project(source, [module])
            if has_bias:
                part = nodes.add("Add", [part, self._vector(f"{module}.bias")])
            parts.append(part)
        if decoder.gated_attention:
            parts[0], gate = self._split_gates(parts[0])
        names = decoder.names
        if decoder.multipliers.key is not None:  # as heads, or it would become the product's own
            heads = nodes.split_heads(parts[1], decoder.head_dim)
            heads = nodes.scaled(heads, "key.scale", decoder.multipliers.key)
            parts[1] = nodes.join_heads(heads)
        if decoder.head_norms is not None:
            parts[0] = self._head_norm(parts[0], f"{layer}.{names.query_norm}")
            parts[1] = self._head_norm(parts[1], f"{layer}.{names.key_norm}")
        sizes = (decoder.query_size, decoder.kv_size, decoder.kv_size)
        nodes.widths.update(zip(parts, sizes, strict=True))
        return parts[0], parts[1], parts[2], gate

    def _slices(self, packed: str) -> tuple[str, str, str]:
        """Query, key and value of one matrix of the checkpoint."""
        nodes, decoder = self._nodes, self._decoder
        starts = (0, decoder.query_size, decoder.query_size + decoder.kv_size)
        places = [nodes.constant(f"slice.{start}", np.array([start])) for start in starts]
        places.append(nodes.constant("slice.whole", np.array([_WHOLE])))
        axis = nodes.constant("slice.axis", np.array([2]))
        step = nodes.constant("slice.step", np.array([1]))
        parts = [
            nodes.add("Slice", [packed, first, last, axis, step])
            for first, last in itertools.pairwise(places)
        ]
        sizes = (decoder.query_size, decoder.kv_size, decoder.kv_size)
        nodes.widths.update(zip(parts, sizes, strict=True))
        return parts[0], parts[1], parts[2]

    def _split_gates(self, both: str) -> tuple[str, str]:
        """The queries of heads, each of which is followed by its gate; and the gates."""
        nodes, size = self._nodes, 2 * self._decoder.head_dim
        heads = self._nodes.split_heads(both, size)
        query, gate = f"{both}.query", f"{both}.gate"
        nodes.add_all("Split", [heads], [query, gate], axis=3, num_outputs=2)
        return self._nodes.join_heads(query), self._nodes.join_heads(gate)

    def _head_norm(self, source: str, norm: str) -> str:
        nodes, decoder = self._nodes, self._decoder
        if decoder.head_norms == "row":
            return self._norm(source, norm)
        turned = decoder.head_norms == "transposed"
        heads = self._nodes.split_heads(source, decoder.head_dim)
        if turned:
            heads = nodes.add("Transpose", [heads], perm=[0, 2, 1, 3])
        heads = self._norm(heads, norm)
        if turned:
            heads = nodes.add("Transpose", [heads], perm=[0, 2, 1, 3])
        return self._nodes.join_heads(heads)

    def _gemm(self, source: str, module: str) -> str:
        """A product of ``Conv1D`` with its bias, of tokens one below the other."""
        nodes, (rows, columns) = self._nodes, self._weights.shapes()[f"{module}.weight"]
        flat = nodes.constant(f"flat.{columns}", np.array([-1, columns]))
        tokens = nodes.add("Reshape", [source, flat], allowzero=1)
        bias = self._vector(f"{module}.bias")
        product = self._products.project_vectors(tokens, module, bias)
        return nodes.add("Reshape", [product, self._full_shape(rows)], allowzero=1)

    def _full_shape(self, columns: int) -> str:
        """(batch, length, columns)."""
        size = self._nodes.constant(f"columns.{columns}", np.array([columns]))
        dims = [self._nodes.dimension(axis) for axis in (0, 1)]
        return self._nodes.once("Concat", [*dims, size], f"full_shape.{columns}", axis=0)

    def _rotary_tables(self, rotary: Rotary) -> tuple[str, str]:
        """Those of all layers that turn alike."""
        if id(rotary) not in self._tables:
            number = len(self._tables)
            tables = rotary.tables(self._decoder.max_length)
            arrays = [each[:, : rotary.num_turning] for each in tables]
            names = [f"rotary.{number}.{kind}" for kind in ("cos", "sin")]
            cos, sin = (
                self._nodes.keep(self._data.write(name, array))
                for name, array in zip(names, arrays, strict=True)
            )
            self._tables[id(rotary)] = cos, sin
        return self._tables[id(rotary)]

    def _mlp(self, layer: str, source: str, index: int) -> str:
        nodes, decoder = self._nodes, self._decoder

        def project(name: str) -> str:
            module = f"{layer}.{name}"
            if decoder.inputs_first:
                return self._gemm(source, module)
            product = self._products.project(source, [module])
            if decoder.biases.mlp:
                product = nodes.add("Add", [product, self._vector(f"{module}.bias")])
            return product

        names = decoder.names
        if not decoder.gated:
            return self._activated(project(names.up))
        if decoder.packed_mlp:
            both = project(names.gate_and_up)
            gate, up = f"{both}.gate", f"{both}.up"
            nodes.add_all("Split", [both], [gate, up], axis=2, num_outputs=2)
            return nodes.add("Mul", [up, self._activated(gate)])
        gate = nodes.scaled(project(names.gate), "mlp.gate", decoder.multipliers.gate)
        altup = decoder.altup
        most = None if altup is None else altup.cutoffs[index]
        if self._altup is not None and most is not None:
            gate = self._altup.cut_off(gate, most)
        gate = self._activated(gate)
        return nodes.add("Mul", [gate, project(names.up)])

    def _activated(self, source: str) -> str:
        if self._decoder.activation == "gelu_tanh":
            return self._nodes.add("Gelu", [source], approximate="tanh")
        if self._decoder.activation == "gelu_new":
            return self._nodes.gelu_new(source)
        if self._decoder.activation == "relu2":
            return self._nodes.relu2(source)
        return self._nodes.silu(source)

    def _write_head(self, source: str) -> None:
        decoder, nodes, cap = self._decoder, self._nodes, self._decoder.logits_softcap
        if decoder.head_bias:
            logits = self._products.head(source, None, None)
            nodes.add("Add", [logits, self._vector("lm_head.bias")], output="logits")
            return
        if decoder.logits_factor is not None:
            logits = self._products.head(source, None, None)
            factor = nodes.number("logits.factor", decoder.logits_factor)
            nodes.add("Mul", [logits, factor], output="logits")
            return
        if cap is None:
            self._products.head(source, decoder.logits_scale, "logits")
            return
        logits = self._products.head(source, float(np.float32(1 / cap)), None)
        bounded = nodes.add("Tanh", [logits])
        nodes.add("Mul", [bounded, nodes.number("logits.cap", cap)], output="logits")

    def _finish(self) -> onnx.ModelProto:
        decoder, nodes = self._decoder, self._nodes
        info = helper.make_tensor_value_info
        integers, floats = TensorProto.INT64, TensorProto.FLOAT
        inputs = [
            info("input_ids", integers, ["batch", "length"]),
            info("seqlens_k", TensorProto.INT32, ["batch"]),
            info("total_sequence_length", TensorProto.INT32, []),
            info("rows", integers, ["num_rows"]),
        ]
        shares = any(isinstance(each, SharingAttends) for each in decoder.layers)
        takes_positions = decoder.positions is not None or decoder.latent is not None
        if takes_positions or shares:
            inputs.insert(1, info("position_ids", integers, ["batch", "length"]))
        outputs = [info("logits", floats, ["num_rows", decoder.vocab_size])]
        layout = decoder.layout
        if layout.states:
            inputs.append(info("lengths", TensorProto.INT32, ["batch"]))
        for index, heads in enumerate(layout.layers):
            shape = ["batch", heads.num_heads, "room", heads.head_dim]
            for kind in ("key", "value"):
                inputs.append(info(f"past_{kind}.{index}", floats, shape))
                outputs.append(info(f"present_{kind}.{index}", floats, shape))
        for index, state in enumerate(layout.states):
            inputs.append(info(f"past_state.{index}", floats, ["batch", *state]))
            outputs.append(info(f"present_state.{index}", floats, ["batch", *state]))
        described = [
            info(name, floats, ["batch", "length", width]) for name, width in nodes.widths.items()
        ]
        graph = helper.make_graph(
            nodes.nodes,
            "main_graph",
            inputs,
            outputs,
            list(nodes.initializers.values()),
            value_info=described,
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, producer_name="maskdial")
        model.ir_version = IR_VERSION
        return model


def _within(layer: str, name: str | None) -> str | None:
    return None if name is None else f"{layer}.{name}"
