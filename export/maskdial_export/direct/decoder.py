"""What a decoder computes, whatever family it is of: what the graph writer needs to know of it."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import Heads, KVLayout
from maskdial_export.direct.experts import Experts
from maskdial_export.direct.latent import Latent
from maskdial_export.direct.recurrent import Recurrent
from maskdial_export.direct.streams import AltUp, LayerInputs
from maskdial_export.errors import ExportError

_SMALL = 16_384
"""Layers times their width up to which the tolerance is that of small models; SmolLM2-135M's are
17,280, and its logits are 0.4 of the tolerance apart. Those of a random 8B are as far from theirs.
"""
_MAGNIFYING = 4
"""Layers with several streams within which what is rounded is not magnified."""
Floats = NDArray[np.float32]
Activation = Literal["silu", "gelu_tanh", "gelu_new", "relu2"]
NormKind = Literal["rms", "layer", "centered"]
HeadNorms = Literal["head", "transposed", "row"]


class NotDirectError(ExportError):
    """The direct path does not know something that a checkpoint says; the tracer may."""


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Rotary positions: pairs of columns turn by an angle.

    Attributes:
        frequencies: float32 (rotary_dim / 2,), radians per position.
        scale: what cosines and sines are multiplied by.
        longest: how many tokens turn so; longer texts would turn by other frequencies. None: all.
        interleaved: whether neighbors are pairs; otherwise columns half the rotary dimension apart.
    """

    frequencies: Floats
    scale: float = 1.0
    longest: int | None = None
    interleaved: bool = False

    @property
    def num_turning(self) -> int:
        """How many pairs turn at all; those behind them do not."""
        return len(np.trim_zeros(self.frequencies, "b"))

    def tables(self, length: int) -> tuple[Floats, Floats]:
        """Cosines and sines, (length, rotary_dim / 2): of angles in float32, correctly rounded."""
        angles = np.arange(length, dtype=np.float32)[:, None] * self.frequencies
        factor = np.float32(self.scale)
        exact = angles.astype(np.float64)
        cos, sin = np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32)
        return cos * factor, sin * factor


@dataclass(frozen=True, slots=True)
class Attends:
    """How a layer attends.

    Attributes:
        rotary: how its queries and keys turn; None if it has no positions.
        window: how many tokens one sees, itself included; None for all before it.
    """

    rotary: Rotary | None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Beside:
    """A layer that attends and keeps a state, of the same input: what both give is added."""

    attends: Attends
    recurrent: Recurrent


@dataclass(frozen=True, slots=True)
class Feeds:
    """A layer that has an MLP, or experts, and nothing before them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingAttends(Attends):
    """Gemma 4's attention: values are normalized, too, and layers may have keys in common.

    Attributes:
        num_kv_heads: of keys and values.
        head_dim: of all heads.
        source: the layer whose keys and values these are; None: its own.
        has_values: whether values have a product of their own; otherwise they are those of keys.
    """

    num_kv_heads: int
    head_dim: int
    source: int | None = None
    has_values: bool = True

    def shapes(self, hidden: int, num_heads: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
        """Its weights, by their names in the layer."""
        query, kv = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        own = {"q_proj": query}
        if self.source is None:
            own |= {"k_proj": kv} | ({"v_proj": kv} if self.has_values else {})
        found: dict[str, tuple[int, ...]] = {}
        for name, rows in own.items():
            found |= _linear(f"self_attn.{name}", rows, hidden, has_bias)
        found |= _linear("self_attn.o_proj", hidden, query, has_bias)
        for name in ("q_norm",) if self.source is not None else ("q_norm", "k_norm"):
            found[f"self_attn.{name}.weight"] = (self.head_dim,)
        return found


Layer = Attends | Recurrent | Beside | Feeds


@dataclass(frozen=True, slots=True)
class Norms:
    """The names of a layer's norms: before and after attention, before and after the MLP."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True)
class Biases:
    """Which projections add one."""

    query_key_value: bool = False
    attention_output: bool = False
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """What modules are called: the first ones by their full names, the others within a layer."""

    table: str = "model.embed_tokens"
    layers: str = "model.layers"
    last_norm: str = "model.norm"
    attention: str = "self_attn"
    query_key_value: str = "self_attn.qkv_proj"
    attention_output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate_and_up: str = "mlp.gate_up_proj"


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What parts of a layer are multiplied by (arXiv:2203.03466); None: 1.

    Attributes:
        attention_in: what the attention reads.
        key: its keys.
        attention_out: what it gives.
        gate: the gate of the MLP, before its activation.
        mlp_out: what the MLP gives.
    """

    attention_in: float | None = None
    key: float | None = None
    attention_out: float | None = None
    gate: float | None = None
    mlp_out: float | None = None


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A module whose rows are added to those of the tokens, by their places."""

    module: str
    rows: int


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder: norms, MLPs, and grouped-query attention or a recurrent layer.

    Attributes:
        architecture: transformers' class.
        width: of the MLP.
        layers: how each attends, or what it does instead.
        max_length: tokens of prompt and reply together.
        norms: where they are.
        norm_kind: what they are: RMS norms; layer norms with a bias; those without one, which are
            RMS norms of values less their mean.
        names: what the other modules are called.
        head_norms: the norms of queries and keys: of each head (``transposed``: in the order of
            Gemma's code), or of all heads at once.
        shifted: whether norms multiply by their weight plus one.
        packed_attention: whether query, key and value are one matrix of the checkpoint.
        packed_mlp: whether gate and up are.
        alternates: whether a layer mixes tokens or has an MLP, and not both.
        stored_base: how files name what is ``model`` here; None: as here.
        multipliers: of parts of layers.
        apart: whether query, key and value are products of their own in any case.
        reads_ahead: whether a token sees those behind it: such a decoder reads a text in one pass.
        gated_attention: whether each head's query is followed by a gate, whose sigmoid its result
            is multiplied by.
        sinks: whether each head has the score of one more key, without a value.
        parallel: whether the MLP reads what the attention does, and how the stream gets both:
            one after the other, or their sum.
        gated: whether the MLP has a gate.
        positions: those that are learned.
        inputs_first: whether linear layers are ``Conv1D``: their matrices are (inputs, outputs) in
            safetensors, and a product and its bias are one operation.
        tied: whether the output layer's weight is the embedding table.
        embedding_scale: what rows of the table are multiplied by; also of the others, None: 1.
        attention_scale: what scores are multiplied by.
        residual_scale: what each sublayer adds is multiplied by.
        logits_scale: what logits are multiplied by, within their product.
        logits_factor: what they are multiplied by after it.
        head_bias: whether the output layer has a bias.
        attention_softcap: the scores' largest magnitude, by a hyperbolic tangent.
        logits_softcap: the logits' likewise.
        hidden_divisor: what hidden states are divided by before the output layer.
        latent: how keys and values are one short row, if they are.
        experts: those that some layers have in place of the MLP.
        further: how the names of weights begin that predict further tokens; they are left out.
        widths: of each layer's MLP, where they differ.
        layer_inputs: what layers get beside the stream.
        altup: its streams; None: there is one.
        layer_scalar: the number in each layer that its result is multiplied by; None: none.
        unused: how the names of weights begin that files may have, and nothing reads.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    layers: tuple[Layer, ...]
    max_length: int
    activation: Activation
    attention_scale: float
    norms: Norms = Norms()
    norm_kind: NormKind = "rms"
    names: Names = Names()
    head_norms: HeadNorms | None = None
    shifted: bool = False
    biases: Biases = Biases()
    packed_attention: bool = False
    packed_mlp: bool = False
    alternates: bool = False
    stored_base: str | None = None
    multipliers: Multipliers = Multipliers()
    apart: bool = False
    reads_ahead: bool = False
    gated_attention: bool = False
    sinks: bool = False
    parallel: Literal["in_turn", "together"] | None = None
    gated: bool = True
    positions: PositionTable | None = None
    inputs_first: bool = False
    tied: bool = False
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logits_scale: float | None = None
    logits_factor: float | None = None
    head_bias: bool = False
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    hidden_divisor: float | None = None
    latent: Latent | None = None
    experts: Experts | None = None
    further: tuple[str, ...] = ()
    widths: tuple[int, ...] | None = None
    layer_inputs: LayerInputs | None = None
    altup: AltUp | None = None
    layer_scalar: str | None = None
    unused: tuple[str, ...] = ()

    @property
    def rounding(self) -> float:
        """How much further two computations in float32 may be apart than those of a small model:
        independent errors grow with the root of how many are added up.

        Streams that correct each other magnify them from layer to layer: torch's float32 and
        float64 are up to 1e-3 apart where 25 layers of Gemma 3n have random weights.
        """
        magnified = 1.0 if self.altup is None else max(1.0, len(self.layers) / _MAGNIFYING)
        return magnified * max(1.0, math.sqrt(len(self.layers) * self.hidden_size / _SMALL))

    @property
    def query_size(self) -> int:
        """Columns of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the keys, and of the values, of all heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def layout(self) -> KVLayout:
        """What a sequence keeps between passes."""
        attending = [each for each in self.layers if isinstance(each, Attends | Beside)]
        kinds = (each.recurrent if isinstance(each, Beside) else each for each in self.layers)
        states = [
            state
            for each in kinds
            if not isinstance(each, Attends | Feeds)
            for state in each.states(self.hidden_size)
        ]
        heads = tuple(
            Heads(each.num_kv_heads, each.head_dim)
            if isinstance(each, SharingAttends)
            else Heads(self.num_kv_heads, self.head_dim)
            for each in attending
        )
        return KVLayout(layers=heads, states=tuple(states))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and the shape of every weight in the checkpoint; a tied head has none."""
        found: dict[str, tuple[int, ...]] = {
            f"{self.names.table}.weight": (self.vocab_size, self.hidden_size),
            **self._norm_shape(self.names.last_norm),
        }
        if self.positions is not None:
            shape = self.positions.rows, self.hidden_size
            found[f"{self.positions.module}.weight"] = shape
        if self.head_bias:
            found["lm_head.bias"] = (self.vocab_size,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        for index, layer in enumerate(self.layers):
            parts = self._norm_shapes()
            recurrent = layer.recurrent if isinstance(layer, Beside) else layer
            if isinstance(layer, SharingAttends):
                bias = self.biases.query_key_value
                parts |= layer.shapes(self.hidden_size, self.num_heads, bias)
            elif isinstance(layer, Attends | Beside):
                parts |= self._attention_shapes()
            if not isinstance(recurrent, Attends | Feeds):
                parts |= recurrent.shapes(self.hidden_size)
            if self.has_mlp(index):
                parts |= self._mlp_shapes(self.widths[index] if self.widths else self.width)
            if self.layer_scalar is not None:
                parts[self.layer_scalar] = (1,)
            name = self.layer(index)
            found |= {f"{name}.{part}": shape for part, shape in parts.items()}
            if self.experts is not None and self.is_mixed(index):
                found |= self.experts.shapes(name, self.hidden_size)
        names = [self.layer(index) for index in range(len(self.layers))]
        for part in (self.layer_inputs, self.altup):
            found |= {} if part is None else part.shapes(self.hidden_size, names)
        return found

    @property
    def num_parameters(self) -> int:
        """Of all weights that are trained: without routers' corrections and layers' factors."""
        router = None if self.experts is None else self.experts.router
        others = None if router is None else router.correction, self.layer_scalar
        ends = tuple(f".{each}" for each in others if each is not None)
        return sum(
            math.prod(shape) for name, shape in self.shapes().items() if not name.endswith(ends)
        )

    def layer(self, index: int) -> str:
        """The module of a layer."""
        return f"{self.names.layers}.{index}"

    def is_mixed(self, index: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and self.experts.layers[index]

    def has_mlp(self, index: int) -> bool:
        """Whether a layer has an MLP that computes every token."""
        if self.alternates and not isinstance(self.layers[index], Feeds):
            return False
        return not self.is_mixed(index) or (self.experts is not None and self.experts.beside)

    def parts(self) -> dict[str, tuple[str, ...]]:
        """Modules of the graph whose weights have other names in the checkpoint, and those."""
        found: dict[str, tuple[str, ...]] = {}
        for index in range(len(self.layers)):
            if self.experts is not None and self.is_mixed(index):
                found |= self.experts.parts(self.layer(index))
        return found

    def _norm_shapes(self) -> dict[str, tuple[int, ...]]:
        norms = self.norms
        places = norms.before_attention, norms.after_attention, norms.before_mlp, norms.after_mlp
        found: dict[str, tuple[int, ...]] = {}
        for norm in places:
            found |= {} if norm is None else self._norm_shape(norm)
        return found

    def _norm_shape(self, norm: str) -> dict[str, tuple[int, ...]]:
        names = ("weight", "bias") if self.norm_kind == "layer" else ("weight",)
        return {f"{norm}.{name}": (self.hidden_size,) for name in names}

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        if self.latent is not None:
            return self.latent.shapes(self.hidden_size, self.num_heads)
        query, kv, biases = self.query_size, self.kv_size, self.biases
        names, place = self.names, self.names.attention
        inner = {f"{place}.k_proj": kv, f"{place}.v_proj": kv}
        if self.packed_attention:
            inner = {names.query_key_value: query + 2 * kv}
        else:
            inner[f"{place}.q_proj"] = 2 * query if self.gated_attention else query
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rows in inner.items():
            shapes |= _linear(name, rows, self.hidden_size, biases.query_key_value)
        shapes |= _linear(names.attention_output, self.hidden_size, query, biases.attention_output)
        if self.head_norms is not None:
            whole = self.head_norms == "row"
            shapes[f"{names.query_norm}.weight"] = (query if whole else self.head_dim,)
            shapes[f"{names.key_norm}.weight"] = (kv if whole else self.head_dim,)
        if self.sinks:
            shapes["self_attn.sinks"] = (self.num_heads,)
        return shapes

    def _mlp_shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        names, hidden, bias = self.names, self.hidden_size, self.biases.mlp
        inner = {names.gate: width, names.up: width}
        if not self.gated:
            inner = {names.up: width}
        if self.packed_mlp:
            inner = {names.gate_and_up: 2 * width}
        shapes = _linear(names.down, hidden, width, bias)
        for name, rows in inner.items():
            shapes |= _linear(name, rows, hidden, bias)
        return shapes


def _linear(name: str, rows: int, columns: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    if has_bias:
        shapes[f"{name}.bias"] = (rows,)
    return shapes
