"""Writes layers that keep a state of a fixed size.

The operators are those of `maskdial_export.tracing.recurrence` and of transformers' layers around
them. A row's tokens beyond its length, and rows without tokens, leave their states as they are.
"""

from collections.abc import Callable, Sequence

import numpy as np

from maskdial_export.direct.decoder import Decoder, Floats
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.products import Products
from maskdial_export.direct.recurrent import DeltaNet, Mamba, Recurrent, ShortConvolution
from maskdial_export.direct.weights import Weights

_EPSILON = 1e-6  # of the normalization of a delta net's queries and keys
_LINEAR_FROM = 20.0  # where torch's softplus is its argument


class RecurrentWriter:
    """Writes the recurrent layers of one graph, in their order."""

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        products: Products,
        nodes: Nodes,
        keep: Callable[[str, Floats], str],
    ) -> None:
        """``keep`` writes an array into the weight file; it returns its name."""
        self._decoder = decoder
        self._weights = weights
        self._products = products
        self._nodes = nodes
        self._keep = keep
        self._states = 0

    def write(self, layer: str, kind: Recurrent, source: str) -> tuple[str, str | None]:
        """What a layer adds to the stream, and the bias that is still to be added."""
        if isinstance(kind, ShortConvolution):
            return self._short_convolution(layer, kind, source)
        if isinstance(kind, DeltaNet):
            return self._delta_net(layer, kind, source), None
        return self._mamba(layer, kind, source)

    def _short_convolution(
        self, layer: str, kind: ShortConvolution, source: str
    ) -> tuple[str, str | None]:
        nodes, module = self._nodes, f"{layer}.conv"
        product = self._product(source, f"{module}.in_proj", has_bias=kind.has_bias)
        parts = [f"{module}.{name}" for name in ("before", "after", "values")]
        nodes.add_all("Split", [product], parts, axis=2, num_outputs=3)
        before, after, values = parts
        gated = nodes.add("Mul", [before, values])
        bias = f"{module}.conv.bias" if kind.has_bias else None
        mixed = self._convolve(gated, f"{module}.conv", self._decoder.hidden_size, kind.taps, bias)
        gated = nodes.add("Mul", [after, mixed])
        return self._last(gated, f"{module}.out_proj", has_bias=kind.has_bias)

    def _delta_net(self, layer: str, kind: DeltaNet, source: str) -> str:
        nodes, module, heads = self._nodes, f"{layer}.linear_attn", kind.value_heads
        if kind.is_packed:
            joined, gate, beta, steps = self._unpacked(module, kind, source)
        else:
            joined, gate, beta, steps = (
                self._products.project(source, [f"{module}.in_proj_{name}"])
                for name in ("qkv", "z", "b", "a")
            )
        channels = 2 * kind.keys + kind.values
        mixed = self._nodes.silu(
            self._convolve(joined, f"{module}.conv1d", channels, kind.taps, None)
        )
        query, key, values = self._split(mixed, [kind.keys, kind.keys, kind.values], 2)
        copies = heads // kind.key_heads
        query, key = (
            self._nodes.join_heads(
                self._copied(
                    self._unit(self._nodes.split_heads(each, kind.key_size)), kind.key_size, copies
                )
            )
            for each in (query, key)
        )
        decay = nodes.add("Mul", [self._decay(module), self._softplus(steps, module)])
        state = self._state()
        output = f"{module}.output"
        inputs = [query, key, values, state[0], self._masked(decay, 3)]
        inputs.append(self._masked(nodes.add("Sigmoid", [beta]), 3))
        self._attend(inputs, [output, state[1]], "gated_delta", heads, kind.key_size**-0.5)
        columns = nodes.constant(f"columns.{kind.value_size}", np.array([-1, kind.value_size]))
        rows, gates = (nodes.add("Reshape", [each, columns]) for each in (output, gate))
        weight = self._vector(f"{module}.norm.weight")
        normed = nodes.add(
            "SimplifiedLayerNormalization",
            [rows, weight],
            axis=-1,
            epsilon=self._decoder.epsilon,
            stash_type=1,
        )
        gated = self._nodes.join_heads(nodes.add("Mul", [normed, self._nodes.silu(gates)]))
        return self._products.project(gated, [f"{module}.out_proj"])

    def _unpacked(self, module: str, kind: DeltaNet, source: str) -> tuple[str, str, str, str]:
        """Queries, keys and values in one; gates; beta; steps: of products by heads of keys."""
        nodes, copies = self._nodes, kind.value_heads // kind.key_heads
        both = self._products.project(source, [f"{module}.in_proj_qkvz"])
        size = copies * kind.value_size
        sizes = [kind.key_size, kind.key_size, size, size]
        *parts, gate = (
            self._nodes.join_heads(part)
            for part in self._split(self._nodes.split_heads(both, sum(sizes)), sizes, 3)
        )
        product = self._products.project(source, [f"{module}.in_proj_ba"])
        beta, steps = (
            self._nodes.join_heads(part)
            for part in self._split(
                self._nodes.split_heads(product, 2 * copies), [copies, copies], 3
            )
        )
        return nodes.add("Concat", parts, axis=-1), gate, beta, steps

    def _mamba(self, layer: str, kind: Mamba, source: str) -> tuple[str, str | None]:
        nodes, module = self._nodes, f"{layer}.{kind.module}"
        source = nodes.scaled(source, "mamba.in", kind.scale_in)
        product = self._product(source, f"{module}.in_proj", has_bias=kind.has_bias)
        if kind.scales is not None:
            shared = kind.groups * kind.state_size
            sizes = [kind.width, kind.width, shared, shared, kind.heads]
            columns = np.repeat(np.array(kind.scales, np.float32), sizes)
            product = nodes.add("Mul", [product, self._keep("mamba.scales", columns)])
        gate, joined, steps = self._split(product, [kind.width, kind.channels, kind.heads], 2)
        bias = f"{module}.conv1d.bias" if kind.has_conv_bias else None
        mixed = self._nodes.silu(
            self._convolve(joined, f"{module}.conv1d", kind.channels, kind.taps, bias)
        )
        shared = kind.groups * kind.state_size
        values, key, query = self._split(mixed, [kind.width, shared, shared], 2)
        values = self._nodes.split_heads(values, kind.head_size)
        copies = kind.heads // kind.groups
        key, query = (
            self._copied(self._nodes.split_heads(each, kind.state_size), kind.state_size, copies)
            for each in (key, query)
        )
        bounds = [nodes.number(f"steps.{value}", value) for value in kind.limits]
        steps = nodes.add("Clip", [self._softplus(steps, module), *bounds])
        decay = nodes.add("Mul", [self._decay(module), steps])
        last = nodes.constant("axis.3", np.array([3]))
        weighed = nodes.add("Mul", [values, nodes.add("Unsqueeze", [steps, last])])
        state = self._state()
        output = f"{module}.output"
        inputs = [*map(nodes.join_heads, (query, self._masked(key, 4), weighed)), state[0]]
        inputs.append(self._masked(decay, 3))
        self._attend(inputs, [output, state[1]], "gated", kind.heads, 1.0)
        skip = self._keep(f"{module}.D", self._weights.values(f"{module}.D")[:, None])
        kept = nodes.add("Mul", [skip, values])
        total = nodes.add("Add", [self._nodes.split_heads(output, kind.head_size), kept])
        gated = nodes.add("Mul", [self._nodes.join_heads(total), self._nodes.silu(gate)])
        if kind.norm_groups is not None:
            gated = self._group_norm(gated, module, kind, kind.norm_groups)
        if kind.scale_out is None:
            return self._last(gated, f"{module}.out_proj", has_bias=kind.has_bias)
        product = self._product(gated, f"{module}.out_proj", has_bias=kind.has_bias)
        return nodes.scaled(product, "mamba.out", kind.scale_out), None

    def _group_norm(self, source: str, module: str, kind: Mamba, groups: int) -> str:
        """An RMS norm of parts of a row."""
        size = kind.width // groups
        nodes = self._nodes
        parts = self._nodes.split_heads(source, size)
        if not kind.norm_is_written:
            weight = self._weights.values(f"{module}.norm.weight").reshape(-1, size)
            inputs = [parts, self._keep(f"{module}.norm.weight", weight)]
            normed = nodes.add(
                "SimplifiedLayerNormalization",
                inputs,
                axis=-1,
                epsilon=self._decoder.epsilon,
                stash_type=1,
            )
            return nodes.join_heads(normed)
        axis = nodes.constant("minus_one", np.array([-1]))
        squares = nodes.add("Pow", [parts, nodes.number("two", 2.0)])
        mean = nodes.add("ReduceMean", [squares, axis], keepdims=1)
        epsilon = nodes.number("norm.epsilon", self._decoder.epsilon)
        normed = nodes.add("Mul", [parts, self._inverse_root(mean, epsilon)])
        return nodes.add(
            "Mul", [self._vector(f"{module}.norm.weight"), self._nodes.join_heads(normed)]
        )

    def _convolve(
        self, source: str, module: str, channels: int, taps: int, bias: str | None
    ) -> str:
        """A convolution of each channel by itself: a sum of shifted products."""
        nodes = self._nodes
        past, present = self._state()
        joined = nodes.add("Concat", [past, source], axis=1)
        places = nodes.constant(f"tail.{taps}", np.arange(taps - 1))
        tail = nodes.once("Add", [self._lengths(), places], f"tail.{taps}.rows")
        last = nodes.constant("axis.2", np.array([2]))
        tail = nodes.once("Unsqueeze", [tail, last], f"tail.{taps}.columns")
        shape = nodes.constant(f"tail.{channels}", np.array([1, 1, channels]))
        tail = nodes.once("Expand", [tail, shape], f"tail.{taps}.{channels}")
        nodes.add("GatherElements", [joined, tail], output=present, axis=1)
        weight = self._weights.values(f"{module}.weight")[:, 0]
        axis = nodes.constant("slice.axis.1", np.array([1]))
        step = nodes.constant("slice.step", np.array([1]))
        total = ""
        for tap in range(taps):
            first = nodes.constant(f"tap.{tap}", np.array([tap]))
            end = nodes.once("Add", [first, nodes.dimension(1)], f"tap.{tap}.end")
            part = nodes.add("Slice", [joined, first, end, axis, step])
            name = self._keep(f"{module}.tap.{tap}", np.ascontiguousarray(weight[:, tap]))
            product = nodes.add("Mul", [part, name])
            total = product if tap == 0 else nodes.add("Add", [total, product])
        return total if bias is None else nodes.add("Add", [total, self._vector(bias)])

    def _state(self) -> tuple[str, str]:
        """The next state, and what becomes of it."""
        index = self._states
        self._states += 1
        return f"past_state.{index}", f"present_state.{index}"

    def _attend(
        self, inputs: Sequence[str], outputs: Sequence[str], rule: str, heads: int, scale: float
    ) -> None:
        self._nodes.add_all(
            "LinearAttention",
            inputs,
            outputs,
            update_rule=rule,
            q_num_heads=heads,
            kv_num_heads=heads,
            scale=scale,
        )

    def _decay(self, module: str) -> str:
        """What steps are multiplied by: the logarithm of the decay in one of them."""
        return self._keep(f"{module}.decay", -np.exp(self._weights.values(f"{module}.A_log")))

    def _softplus(self, steps: str, module: str) -> str:
        nodes = self._nodes
        steps = nodes.add("Add", [steps, self._vector(f"{module}.dt_bias")])
        soft = nodes.add("Softplus", [steps])
        large = nodes.add("Greater", [steps, nodes.number("softplus.linear", _LINEAR_FROM)])
        return nodes.add("Where", [large, steps, soft])

    def _unit(self, heads: str) -> str:
        """Heads of length 1."""
        nodes = self._nodes
        axis = nodes.constant("minus_one", np.array([-1]))
        squares = nodes.add("ReduceSum", [nodes.add("Mul", [heads, heads]), axis], keepdims=1)
        epsilon = nodes.number("unit.epsilon", _EPSILON)
        return nodes.add("Mul", [heads, self._inverse_root(squares, epsilon)])

    def _inverse_root(self, squares: str, epsilon: str) -> str:
        root = self._nodes.add("Sqrt", [self._nodes.add("Add", [squares, epsilon])])
        return self._nodes.add("Reciprocal", [root])

    def _copied(self, heads: str, size: int, copies: int) -> str:
        """Each head several times, one beside the other."""
        if copies == 1:
            return heads
        nodes = self._nodes
        axis = nodes.constant("axis.3", np.array([3]))
        sizes = nodes.constant(f"copies.{copies}", np.array([1, 1, 1, copies, 1]))
        spread = nodes.add("Expand", [nodes.add("Unsqueeze", [heads, axis]), sizes])
        return self._nodes.split_heads(spread, size)

    def _masked(self, values: str, rank: int) -> str:
        """Zeros beyond the rows' lengths: there a state neither decays nor takes anything in."""
        nodes = self._nodes
        one = nodes.constant("axis.1", np.array([1]))
        dims = [nodes.dimension(0), nodes.dimension(1), *[one] * (rank - 2)]
        shape = nodes.once("Concat", dims, f"valid.{rank}.shape", axis=0)
        valid = nodes.once("Reshape", [self._valid(), shape], f"valid.{rank}", allowzero=1)
        return nodes.add("Where", [valid, values, nodes.number("zero", 0.0)])

    def _valid(self) -> str:
        """Which tokens are not beyond their row's length, (batch, length)."""
        nodes = self._nodes
        length = nodes.once("Squeeze", [nodes.dimension(1)], "length")
        zero, one = (nodes.constant(f"place.{each}", np.array(each)) for each in (0, 1))
        places = nodes.once("Range", [zero, length, one], "places")
        first = nodes.constant("axis.0", np.array([0]))
        row = nodes.once("Unsqueeze", [places, first], "places.row")
        return nodes.once("Less", [row, self._lengths()], "valid")

    def _lengths(self) -> str:
        """(batch, 1)."""
        nodes = self._nodes
        axis = nodes.constant("axis.1", np.array([1]))
        column = nodes.once("Unsqueeze", ["lengths", axis], "lengths.column")
        return nodes.once("Cast", [column], "lengths.int64", to=7)

    def _split(self, source: str, sizes: Sequence[int], axis: int) -> list[str]:
        nodes = self._nodes
        parts = [f"{source}.part.{index}" for index in range(len(sizes))]
        name = "split." + ".".join(map(str, sizes))
        nodes.add_all("Split", [source, nodes.constant(name, np.array(sizes))], parts, axis=axis)
        return parts

    def _product(self, source: str, module: str, *, has_bias: bool) -> str:
        product, bias = self._last(source, module, has_bias=has_bias)
        return product if bias is None else self._nodes.add("Add", [product, bias])

    def _last(self, source: str, module: str, *, has_bias: bool) -> tuple[str, str | None]:
        bias = self._vector(f"{module}.bias") if has_bias else None
        return self._products.project(source, [module]), bias

    def _vector(self, name: str) -> str:
        return self._keep(name, self._weights.values(name))
