"""Weights that a checkpoint holds as parts of a tensor: the matrices of all experts in one.

A part has the name that the same matrix has in files where it is a tensor of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.direct.decoder import Decoder
from maskdial_export.direct.experts import Experts

_NIBBLES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_HALF = 128
"""MXFP4: an exponent of two less 127, and one more since the table has twice its values."""
_BLOCK, MXFP4_BYTES = 32, 16
"""Integers with one scale, and the bytes that hold them."""
_PACKED, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True, slots=True)
class View:
    """A part of a tensor, which stands for a weight.

    Attributes:
        name: of the tensor; of one in MXFP4, without the endings of its integers and its scales.
        index: of the entry of its first axis; None if it is the whole tensor.
        parts: into how many entries that axis is split first, one below the other; None: it is as
            it is.
        rows: of that entry, after it is turned; their indices, if they do not lie together.
        is_transposed: whether its dimensions are exchanged.
        is_packed: whether it is in MXFP4.
    """

    name: str
    index: int | None
    rows: slice | NDArray[np.int64]
    is_transposed: bool = False
    is_packed: bool = False
    parts: int | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensors that it reads."""
        if self.is_packed:
            return self.name + _PACKED, self.name + _SCALES
        return (self.name,)

    def of(self, tensor: NDArray[Any]) -> NDArray[Any]:
        """The part of a tensor; nothing is copied, unless rows have indices."""
        if self.parts is not None:
            tensor = tensor.reshape(self.parts, -1, *tensor.shape[1:])
        entry: NDArray[Any] = tensor if self.index is None else tensor[self.index]
        return (entry.T if self.is_transposed else entry)[self.rows]


def unpacked(packed: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> StoredBlocks:
    """Integers of MXFP4, (rows, blocks, 16) of two each, the lower one first, and their scales."""
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    values = _NIBBLES[both.reshape(len(packed), -1)]
    scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - _HALF)
    return StoredBlocks(values, scale.astype(np.float32), None, 5, _BLOCK)


def find_views(decoder: Decoder, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, View]:
    """The weights of a decoder that a checkpoint of these tensors holds as parts of others."""
    found: dict[str, View] = {}
    for index in range(len(decoder.layers)):
        if decoder.experts is not None and decoder.is_mixed(index) and decoder.experts.is_gated:
            name = decoder.experts.within(decoder.layer(index))
            found |= _of_experts(decoder.experts, name, shapes)
        if decoder.inputs_first:
            matrices = (f"{decoder.layer(index)}.{each}.weight" for each in _of_layer(decoder))
            found |= {name: View(name, None, slice(None), is_transposed=True) for name in matrices}
    return found


def _of_layer(decoder: Decoder) -> tuple[str, ...]:
    names = decoder.names
    return names.query_key_value, names.attention_output, names.up, names.down


def _of_experts(
    experts: Experts, module: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, View]:
    fused, width, (gate, up, down) = experts.fused, experts.width, experts.names
    halves = slice(0, width), slice(width, 2 * width)
    if fused.is_interleaved:
        halves = slice(0, 2 * width, 2), slice(1, 2 * width, 2)
    places = (gate, fused.first, halves[0]), (up, fused.first, halves[1])
    found: dict[str, View] = {}
    for name, stored, rows in (*places, (down, fused.second, slice(None))):
        tensor = f"{module}.{stored}"
        packed = tensor + _PACKED in shapes and tensor + _SCALES in shapes
        for expert in range(experts.count):
            one = f"{module}.experts.{expert}.{name}"
            if packed or tensor in shapes:
                turned = fused.is_transposed and not packed
                found[f"{one}.weight"] = View(tensor, expert, rows, turned, packed)
            if experts.has_biases and f"{tensor}_bias" in shapes:
                found[f"{one}.bias"] = View(f"{tensor}_bias", expert, rows)
    return found


def find_stacked(
    experts: Experts, module: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, View]:
    """The matrices of experts that lie one below the other in two tensors, as Nomic's do: the
    second one of each expert is (width, hidden_size), as the first one."""
    found: dict[str, View] = {}
    for name, stored, turned in ((experts.names[1], "w1", False), (experts.names[2], "w2", True)):
        tensor = f"{module}.mlp.{stored}"
        for expert in range(experts.count) if tensor in shapes else ():
            view = View(tensor, expert, slice(None), turned, parts=experts.count)
            found[f"{module}.{expert}.{name}.weight"] = view
    return found


def find_by_heads(
    decoder: Decoder, packed: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, View]:
    """Query, key and value of matrices whose rows are by heads, with all three of a head together.

    In queries and keys neighbors turn together; here rows half a head apart do.
    """
    size = decoder.head_dim
    starts = 3 * size * np.arange(decoder.num_heads)[:, None]
    turned = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
    orders = {"q": turned, "k": size + turned, "v": 2 * size + np.arange(size)}
    found: dict[str, View] = {}
    for index in range(len(decoder.layers)):
        layer = decoder.layer(index)
        name = f"{layer}.{packed}.weight"
        if shapes.get(name, (0,))[0] == 3 * decoder.query_size:
            for part, order in orders.items():
                rows = (starts + order).ravel()
                found[f"{layer}.self_attn.{part}_proj.weight"] = View(name, None, rows)
    return found
