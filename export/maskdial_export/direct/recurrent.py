"""Layers that keep a state of a fixed size, as a configuration describes them.

Each says what its weights are, by their names within a layer, and what state it keeps: the shapes
of `maskdial.bundle.manifest.KVLayout.states`.
"""

from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]
States = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """LFM2's: gates around a convolution of some tokens, each channel by itself.

    Attributes:
        taps: how many tokens it reads.
        has_bias: whether its products and its convolution have one.
    """

    taps: int
    has_bias: bool

    def states(self, hidden: int) -> States:
        return ((self.taps - 1, hidden),)

    def shapes(self, hidden: int) -> Shapes:
        found: Shapes = {
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.conv.weight": (hidden, 1, self.taps),
            "conv.out_proj.weight": (hidden, hidden),
        }
        if self.has_bias:
            biases = {"in_proj": 3 * hidden, "conv": hidden, "out_proj": hidden}
            found |= {f"conv.{name}.bias": (size,) for name, size in biases.items()}
        return found


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A gated delta net (arXiv:2412.06464), of Qwen3-Next and Qwen3.5.

    Attributes:
        key_heads: of queries and keys; each has several of values.
        value_heads: of values.
        key_size: columns of a head of keys.
        value_size: of values.
        taps: tokens that the convolution before it reads.
        is_packed: whether queries, keys, values and gates are one matrix, by heads of keys.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int
    is_packed: bool = False

    @property
    def keys(self) -> int:
        """Columns of all heads' keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Columns of all heads' values."""
        return self.value_heads * self.value_size

    def states(self, _hidden: int) -> States:
        channels = 2 * self.keys + self.values
        return (self.taps - 1, channels), (self.value_heads, self.key_size, self.value_size)

    def shapes(self, hidden: int) -> Shapes:
        channels = 2 * self.keys + self.values
        if self.is_packed:
            products = {
                "in_proj_qkvz": channels + self.values,
                "in_proj_ba": 2 * self.value_heads,
            }
        else:
            products = {
                "in_proj_qkv": channels,
                "in_proj_z": self.values,
                "in_proj_b": self.value_heads,
                "in_proj_a": self.value_heads,
            }
        found: Shapes = {
            f"linear_attn.{name}.weight": (rows, hidden) for name, rows in products.items()
        }
        return found | {
            "linear_attn.conv1d.weight": (channels, 1, self.taps),
            "linear_attn.A_log": (self.value_heads,),
            "linear_attn.dt_bias": (self.value_heads,),
            "linear_attn.norm.weight": (self.value_size,),
            "linear_attn.out_proj.weight": (hidden, self.values),
        }


@dataclass(frozen=True, slots=True)
class Mamba:
    """Mamba 2 (arXiv:2405.21060).

    Attributes:
        module: its name in a layer.
        heads: how many.
        head_size: columns of a head.
        groups: of heads that share keys and queries, which are called B and C.
        state_size: columns of a key.
        taps: tokens that the convolution before it reads.
        has_conv_bias: whether that has a bias.
        has_bias: whether the products have one.
        limits: of the steps in time.
        norm_groups: parts of a row that the norm at the end takes by themselves; None: no norm.
        norm_is_written: whether that norm is written out, and no operator.
        scale_in: what it reads is multiplied by.
        scales: what the first product is multiplied by: its gates, values, keys, queries, steps.
        scale_out: what it gives is multiplied by.
    """

    module: str
    heads: int
    head_size: int
    groups: int
    state_size: int
    taps: int
    has_conv_bias: bool
    has_bias: bool
    limits: tuple[float, float]
    norm_groups: int | None
    norm_is_written: bool = True
    scale_in: float | None = None
    scales: tuple[float, ...] | None = None
    scale_out: float | None = None

    @property
    def width(self) -> int:
        """Columns of all heads."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """Of the convolution: values, keys and queries."""
        return self.width + 2 * self.groups * self.state_size

    def states(self, _hidden: int) -> States:
        return (self.taps - 1, self.channels), (self.heads, self.state_size, self.head_size)

    def shapes(self, hidden: int) -> Shapes:
        rows = self.width + self.channels + self.heads
        found: Shapes = {
            "in_proj.weight": (rows, hidden),
            "conv1d.weight": (self.channels, 1, self.taps),
            "dt_bias": (self.heads,),
            "A_log": (self.heads,),
            "D": (self.heads,),
            "out_proj.weight": (hidden, self.width),
        }
        if self.has_conv_bias:
            found["conv1d.bias"] = (self.channels,)
        if self.has_bias:
            found |= {"in_proj.bias": (rows,), "out_proj.bias": (hidden,)}
        if self.norm_groups is not None:
            found["norm.weight"] = (self.width,)
        return {f"{self.module}.{name}": shape for name, shape in found.items()}


Recurrent = ShortConvolution | DeltaNet | Mamba
