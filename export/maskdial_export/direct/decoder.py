"""What a decoder computes, whatever family it is of: what the graph writer needs to know of it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from maskdial_export.errors import ExportError

Floats = NDArray[np.float32]
Activation = Literal["silu", "gelu_tanh"]
HeadNorms = Literal["head", "transposed", "row"]


class NotDirectError(ExportError):
    """The direct path does not know something that a checkpoint says; the tracer may."""


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Rotary positions: pairs of columns half the rotary dimension apart turn by an angle.

    Attributes:
        frequencies: float32 (rotary_dim / 2,), radians per position.
        scale: what cosines and sines are multiplied by.
        longest: how many tokens turn so; longer texts would turn by other frequencies. None: all.
    """

    frequencies: Floats
    scale: float = 1.0
    longest: int | None = None

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
class Experts:
    """A mixture of experts, each a gated MLP, in place of some layers' MLP.

    Attributes:
        count: how many there are.
        chosen: how many compute a token.
        width: of each.
        layers: whether each layer has them.
        normalizes: whether the weights of those that are chosen add up to 1.
        module: the module in the checkpoint that has them.
        names: an expert's matrices there: gate, up and down.
        shared_width: of an expert that computes every token, beside them; None: there is none.
    """

    count: int
    chosen: int
    width: int
    layers: tuple[bool, ...]
    normalizes: bool
    module: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_width: int | None = None

    def shapes(self, layer: str, hidden: int) -> dict[str, tuple[int, ...]]:
        """The name and the shape of every weight of a layer's experts."""
        module, (gate, up, down) = f"{layer}.{self.module}", self.names
        found: dict[str, tuple[int, ...]] = {f"{module}.gate.weight": (self.count, hidden)}
        for expert in range(self.count):
            for name in (gate, up):
                found[f"{module}.experts.{expert}.{name}.weight"] = (self.width, hidden)
            found[f"{module}.experts.{expert}.{down}.weight"] = (hidden, self.width)
        if self.shared_width is not None:
            for name in (gate, up):
                found[f"{module}.shared_expert.{name}.weight"] = (self.shared_width, hidden)
            found[f"{module}.shared_expert.{down}.weight"] = (hidden, self.shared_width)
            found[f"{module}.shared_expert_gate.weight"] = (1, hidden)
        return found

    def parts(self, layer: str) -> dict[str, tuple[str, ...]]:
        """The weights of the modules that the graph has: gate and up are one product."""
        module, (gate, up, down) = f"{layer}.{self.module}", self.names
        found: dict[str, tuple[str, ...]] = {f"{layer}.mlp.gate": (f"{module}.gate.weight",)}
        for expert in range(self.count):
            one, product = f"{module}.experts.{expert}", f"{layer}.mlp.experts.products.{expert}"
            found[f"{product}.0"] = (f"{one}.{gate}.weight", f"{one}.{up}.weight")
            found[f"{product}.1"] = (f"{one}.{down}.weight",)
        return found


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder with RMS norms, grouped-query attention and a gated MLP.

    Attributes:
        architecture: transformers' class.
        width: of the MLP.
        layers: how each attends.
        max_length: tokens of prompt and reply together.
        norms: where they are.
        head_norms: the norms of queries and keys: of each head (``transposed``: in the order of
            Gemma's code), or of all heads at once.
        shifted: whether norms multiply by their weight plus one.
        packed: whether query, key and value are one matrix of the checkpoint, and gate and up.
        tied: whether the output layer's weight is the embedding table.
        embedding_scale: what rows of the table are multiplied by; also of the others, None: 1.
        attention_scale: what scores are multiplied by.
        residual_scale: what each sublayer adds is multiplied by.
        logits_scale: what logits are multiplied by.
        attention_softcap: the scores' largest magnitude, by a hyperbolic tangent.
        logits_softcap: the logits' likewise.
        experts: those that some layers have in place of the MLP.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    layers: tuple[Attends, ...]
    max_length: int
    activation: Activation
    attention_scale: float
    norms: Norms = Norms()
    head_norms: HeadNorms | None = None
    shifted: bool = False
    biases: Biases = Biases()
    packed: bool = False
    tied: bool = False
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logits_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    experts: Experts | None = None

    @property
    def query_size(self) -> int:
        """Columns of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the keys, and of the values, of all heads."""
        return self.num_kv_heads * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and the shape of every weight in the checkpoint; a tied head has none."""
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, self.hidden_size),
            "model.norm.weight": (self.hidden_size,),
        }
        if not self.tied:
            found["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        for index in range(len(self.layers)):
            layer, mixed = f"model.layers.{index}", self.is_mixed(index)
            for name, shape in self._of_layer(mixed=mixed).items():
                found[f"{layer}.{name}"] = shape
            if self.experts is not None and mixed:
                found |= self.experts.shapes(layer, self.hidden_size)
        return found

    def is_mixed(self, index: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and self.experts.layers[index]

    def parts(self) -> dict[str, tuple[str, ...]]:
        """Modules of the graph whose weights have other names in the checkpoint, and those."""
        found: dict[str, tuple[str, ...]] = {}
        for index in range(len(self.layers)):
            if self.experts is not None and self.is_mixed(index):
                found |= self.experts.parts(f"model.layers.{index}")
        return found

    def _of_layer(self, *, mixed: bool) -> dict[str, tuple[int, ...]]:
        hidden, query, kv = self.hidden_size, self.query_size, self.kv_size
        biases = self.biases
        attention, mlp = biases.query_key_value, biases.mlp
        matrices = {"self_attn.o_proj": (hidden, query, biases.attention_output)}
        if not mixed:
            matrices["mlp.down_proj"] = (hidden, self.width, mlp)
        if self.packed:
            matrices["self_attn.qkv_proj"] = (query + 2 * kv, hidden, attention)
            matrices["mlp.gate_up_proj"] = (2 * self.width, hidden, mlp)
        else:
            matrices["self_attn.q_proj"] = (query, hidden, attention)
            matrices["self_attn.k_proj"] = (kv, hidden, attention)
            matrices["self_attn.v_proj"] = (kv, hidden, attention)
            if not mixed:
                matrices["mlp.gate_proj"] = (self.width, hidden, mlp)
                matrices["mlp.up_proj"] = (self.width, hidden, mlp)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (rows, columns, bias) in matrices.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        norms = self.norms
        for norm in (norms.before_attention, norms.after_attention, norms.before_mlp):
            if norm is not None:
                shapes[f"{norm}.weight"] = (hidden,)
        if norms.after_mlp is not None:
            shapes[f"{norms.after_mlp}.weight"] = (hidden,)
        if self.head_norms is not None:
            whole = self.head_norms == "row"
            shapes["self_attn.q_norm.weight"] = (query if whole else self.head_dim,)
            shapes["self_attn.k_norm.weight"] = (kv if whole else self.head_dim,)
        return shapes
