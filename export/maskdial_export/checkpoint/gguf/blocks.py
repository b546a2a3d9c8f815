"""Quantized GGUF tensors as integers with a scale and a minimum per block.

``scale * values - minimum`` is equal to the last bit, in float32, to what the ``gguf`` package
dequantizes: its arithmetic is the same product and the same sum. The layouts are those of ggml
(``ggml-quants.c``): nibbles of a block hold its first half in their low bits and its second half in
the high ones; ``_K`` types have 256 values in blocks of 16 or 32, whose scales are integers times
one float16.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial_export.checkpoint.blocks import Floats, StoredBlocks
from maskdial_export.checkpoint.gguf.file import StoredTensor
from maskdial_export.session import block_kernels

Bytes = NDArray[np.uint8]

_SUPER = 256  # values in a block of a _K type
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def read_blocks(tensor: StoredTensor) -> StoredBlocks | None:
    """A tensor's integers, with all dimensions but the last as rows; None if it has none.

    Types of less than 4 bits whose codes are points of a lattice (IQ1 to IQ3) or ternary have no
    such form, and neither have floats.
    """
    if tensor.type.name not in _READERS:
        return None
    rows = tensor.rows()
    made = _read(tensor, rows.reshape(-1, tensor.type.num_bytes))
    shape = (len(rows), -1)
    minimum = None if made.minimum is None else made.minimum.reshape(shape)
    return replace(
        made,
        values=made.values.reshape(shape),
        scale=made.scale.reshape(shape),
        minimum=minimum,
    )


def _read(tensor: StoredTensor, blocks: Bytes) -> StoredBlocks:
    """All blocks of a tensor, by the kernels if those are built and know the type."""
    _, read = _READERS[tensor.type.name]
    kernels = block_kernels()
    with np.errstate(invalid="ignore", over="ignore"):
        if kernels is None:
            return read(blocks)
        first = read(blocks[:1])  # the form of all
        values, scale, minimum = (
            None if each is None else np.empty((len(blocks), each.size), each.dtype)
            for each in (first.values, first.scale, first.minimum)
        )
        assert values is not None
        assert scale is not None
        if not kernels.unpack(tensor.type.number, blocks, values, scale, minimum):
            return read(blocks)
    return replace(first, values=values, scale=scale, minimum=minimum)


def _half(blocks: Bytes, place: int) -> Floats:
    """The float16 at a byte of each block: (blocks, 1)."""
    return blocks[:, place : place + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Two values a byte, the low ones first: (blocks, bytes) to (blocks, 2 * bytes)."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fields(packed: Bytes, bits: int, run: int) -> Bytes:
    """Values of some bits: of each run of bytes all lowest ones first, then all next ones."""
    runs = packed.reshape(len(packed), -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    return ((runs >> shifts) & np.uint8(2**bits - 1)).reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Bit i of 4 bytes belongs to value i: (blocks, 32), as 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << np.uint8(4)


def _signed(values: NDArray[Any], zero: int) -> NDArray[np.int8]:
    return values.astype(np.int8) - np.int8(zero)


def _q4_0(blocks: Bytes) -> StoredBlocks:
    return StoredBlocks(_signed(_nibbles(blocks[:, 2:]), 8), _half(blocks, 0), None, 4, 32)


def _q4_1(blocks: Bytes) -> StoredBlocks:
    return StoredBlocks(_nibbles(blocks[:, 4:]), _half(blocks, 0), -_half(blocks, 2), 4, 32)


def _q5_0(blocks: Bytes) -> StoredBlocks:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return StoredBlocks(_signed(values, 16), _half(blocks, 0), None, 5, 32)


def _q5_1(blocks: Bytes) -> StoredBlocks:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return StoredBlocks(values, _half(blocks, 0), -_half(blocks, 2), 5, 32)


def _q8_0(blocks: Bytes) -> StoredBlocks:
    return StoredBlocks(blocks[:, 2:].copy().view(np.int8), _half(blocks, 0), None, 8, 32)


def _q2_k(blocks: Bytes) -> StoredBlocks:
    scales = blocks[:, :16]
    return StoredBlocks(
        _fields(blocks[:, 16:80], 2, run=32),
        _half(blocks, 80) * (scales & 15).astype(np.float32),
        _half(blocks, 82) * (scales >> 4).astype(np.float32),
        2,
        16,
    )


def _q3_k(blocks: Bytes) -> StoredBlocks:
    low = _nibbles(blocks[:, 96:104])
    high = _fields(blocks[:, 104:108], 2, run=4)
    scales = _signed(low | high << 4, 32).astype(np.float32)
    values = _fields(blocks[:, 32:96], 2, run=32) | _fields(blocks[:, :32], 1, run=32) << 2
    return StoredBlocks(_signed(values, 4), _half(blocks, 108) * scales, None, 3, 16)


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Those of Q4_K and Q5_K: 8 of 6 bits each in 12 bytes, times a float16 each."""
    low, middle, both = (blocks[:, place : place + 4] for place in (4, 8, 12))
    scales = np.concatenate([low & 63, both & 15 | low >> 2 & 48], axis=1)
    minima = np.concatenate([middle & 63, both >> 4 | middle >> 2 & 48], axis=1)
    return (
        _half(blocks, 0) * scales.astype(np.float32),
        _half(blocks, 2) * minima.astype(np.float32),
    )


def _q4_k(blocks: Bytes) -> StoredBlocks:
    return StoredBlocks(_fields(blocks[:, 16:], 4, run=32), *_scales_and_minima(blocks), 4, 32)


def _q5_k(blocks: Bytes) -> StoredBlocks:
    values = _fields(blocks[:, 48:], 4, run=32) | _fields(blocks[:, 16:48], 1, run=32) << 4
    return StoredBlocks(values, *_scales_and_minima(blocks), 5, 32)


def _q6_k(blocks: Bytes) -> StoredBlocks:
    values = _fields(blocks[:, :128], 4, run=64) | _fields(blocks[:, 128:192], 2, run=32) << 4
    scales = blocks[:, 192:208].copy().view(np.int8).astype(np.float32)
    return StoredBlocks(_signed(values, 32), _half(blocks, 208) * scales, None, 6, 16)


def _iq4_nl(blocks: Bytes) -> StoredBlocks:
    return StoredBlocks(_IQ4[_nibbles(blocks[:, 2:])], _half(blocks, 0), None, 8, 32)


def _iq4_xs(blocks: Bytes) -> StoredBlocks:
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & 15).reshape(-1, 8)
    high = (blocks[:, 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(-1, 8)
    scales = _signed(low | high << 4, 32).astype(np.float32)
    values = _IQ4[_fields(blocks[:, 8:], 4, run=16)]
    return StoredBlocks(values, _half(blocks, 0) * scales, None, 8, 32)


def _mxfp4(blocks: Bytes) -> StoredBlocks:
    # Half of 2 to the power of the byte minus 127: the table of values is doubled
    exponent = blocks[:, :1].astype(np.int32)
    bits = np.where(exponent < 2, 0x00200000 << exponent, (exponent - 1) << 23)
    return StoredBlocks(_MXFP4[_nibbles(blocks[:, 1:])], bits.view(np.float32), None, 5, 32)


_READERS: Mapping[str, tuple[int, Callable[[Bytes], StoredBlocks]]] = {
    "Q4_0": (4, _q4_0),
    "Q4_1": (4, _q4_1),
    "Q5_0": (5, _q5_0),
    "Q5_1": (5, _q5_1),
    "Q8_0": (8, _q8_0),
    "Q2_K": (2, _q2_k),
    "Q3_K": (3, _q3_k),
    "Q4_K": (4, _q4_k),
    "Q5_K": (5, _q5_k),
    "Q6_K": (6, _q6_k),
    "IQ4_NL": (8, _iq4_nl),
    "IQ4_XS": (8, _iq4_xs),
    "MXFP4": (5, _mxfp4),
}

BITS: Mapping[str, int] = {name: bits for name, (bits, _) in _READERS.items()}
"""The types of tensors whose integers `read_blocks` returns, and how many bits hold one."""
