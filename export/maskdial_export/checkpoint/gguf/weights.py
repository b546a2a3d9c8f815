"""The weights of transformers' model, from the tensors of a GGUF file.

llama.cpp's converter renames them, and changes some: rows of queries and keys are reordered for
interleaved rotation, Gemma's norms are stored plus one, the matrices of all experts are stacked,
query, key and value may be one matrix or three. All but the norms are undone on whole rows, so that
a quantized row stays as it is.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NoReturn

import gguf
import numpy as np
from numpy.typing import NDArray

from maskdial_export.checkpoint.blocks import Floats, StoredBlocks
from maskdial_export.checkpoint.gguf.blocks import BITS, read_blocks
from maskdial_export.checkpoint.gguf.file import GGUFFile, StoredTensor
from maskdial_export.checkpoint.gguf.model import Model
from maskdial_export.checkpoint.gguf.types import TensorType
from maskdial_export.errors import ExportError
from maskdial_export.session import block_kernels

Rows = slice | NDArray[np.int64]

_LAYER = re.compile(r"blk\.(\d{1,6})\.")
_EXPERTS = re.compile(r"_exps$|^altup_(unembd_)?proj$")  # several matrices in one tensor
_QUERY, _KEY, _VALUE = ("blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v")
_GATES = "blk.{}.attn_gate"
_PRODUCT, _KEY_PRODUCT, _VALUE_PRODUCT = (
    f"blk.{{}}.attn_{name}_b" for name in ("kv", "k", "v")
)  # of latent attention
_JOINED, _JOINED_EXPERTS = "blk.{}.attn_qkv", "blk.{}.ffn_gate_up_exps"
_AT_ONCE = 2**17
"""Values that are restored at once: their intermediate results stay in the processor's cache."""
_COMPARED = 2
"""Rows at either end of a part of a matrix that the gguf package reads again: the kernels read a
type for the graph and for the reference alike, so that those would agree on a fault of theirs.
"""
# Tables that the configuration describes
_READ_ELSEWHERE = re.compile(r"(rope_freqs|rope_factors_(long|short)|dense_[23])\.weight$")


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a tensor, of which the last dimension is that of the columns; None is all.

    With ``turned``, these of their columns are the rows.
    """

    tensor: StoredTensor
    rows: Rows | None = None
    turned: slice | None = None

    @property
    def num_rows(self) -> int:
        return self._num_source_rows if self.turned is None else _size(self.turned)

    @property
    def num_columns(self) -> int:
        return self.tensor.shape[-1] if self.turned is None else self._num_source_rows

    @property
    def _num_source_rows(self) -> int:
        if self.rows is None:
            return self.tensor.num_rows
        if isinstance(self.rows, slice):
            return len(range(self.tensor.num_rows)[self.rows])
        return len(self.rows)

    def part(self, start: int, stop: int) -> "Piece":
        """Some of these rows."""
        if self.turned is not None:
            offset = self.turned.start
            return replace(self, turned=slice(offset + start, offset + stop))
        if self.rows is None:
            return replace(self, rows=slice(start, stop))
        if isinstance(self.rows, slice):
            offset = self.rows.start or 0
            return replace(self, rows=slice(offset + start, offset + stop))
        return replace(self, rows=self.rows[start:stop])

    def stored(self) -> StoredTensor:
        """A tensor of these rows alone."""
        if self.turned is not None:
            values = read_values(replace(self, turned=None).stored())[:, self.turned]
            turned = np.ascontiguousarray(values.T)
            return self.tensor.with_rows(turned.view(np.uint8), "F32")
        if self.rows is None:
            return self.tensor
        if self.tensor.is_vector:
            values = read_values(self.tensor)[self.rows]
            return self.tensor.with_rows(values.view(np.uint8).reshape(1, -1), "F32")
        return self.tensor.with_rows(np.ascontiguousarray(self.tensor.rows()[self.rows]))


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight of transformers' model: the rows of its pieces one below the other.

    Attributes:
        name: in transformers.
        pieces: what it consists of.
        is_vector: whether it has one dimension, whose entries are its rows.
        shift: what is added to it.
        transposed: whether rows and columns are exchanged.
        padding: how many rows of zeros come first.
        columns: the order of the columns, if it is another one.
        squeezed: whether the model has a dimension of 1 between rows and columns.
        logarithm: whether it is the logarithm of the negative that is stored.
    """

    name: str
    pieces: tuple[Piece, ...]
    is_vector: bool
    shift: float = 0.0
    transposed: bool = False
    padding: int = 0
    columns: NDArray[np.int64] | None = None
    squeezed: bool = False
    logarithm: bool = False

    @property
    def bits(self) -> int | None:
        """The most that an integer of a piece has; None if a piece has no integers."""
        kinds = {piece.tensor.type.name for piece in self.pieces}
        if not kinds <= BITS.keys() or any(piece.turned for piece in self.pieces):
            return None
        return max(BITS[kind] for kind in kinds)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight in transformers."""
        num_rows = self.padding + sum(piece.num_rows for piece in self.pieces)
        if self.is_vector:
            return (num_rows,)
        columns = self.pieces[0].num_columns
        if self.squeezed:
            return (num_rows, 1, columns)
        return (columns, num_rows) if self.transposed else (num_rows, columns)

    def part(self, start: int, stop: int) -> "Weight":
        """Some of the rows, of a weight whose rows are those of its pieces."""
        changed = self.transposed or self.padding or self.squeezed
        assert not changed, "the rows are others"
        pieces, first = [], 0
        for piece in self.pieces:
            last = first + piece.num_rows
            if start < last and first < stop:
                pieces.append(piece.part(max(start, first) - first, min(stop, last) - first))
            first = last
        return replace(self, pieces=tuple(pieces))

    def values(self) -> Floats:
        """In float32, of the model's shape."""
        parts = [read_values(piece.stored()) for piece in self.pieces]
        values = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if self.shift:
            with np.errstate(invalid="ignore"):
                values = values + np.float32(self.shift)
        if self.padding:
            values = np.concatenate([np.zeros((self.padding, values.shape[1]), np.float32), values])
        if self.transposed:
            values = values.T
        if self.columns is not None:
            values = values[:, self.columns]
        if self.squeezed:
            values = values[:, None]
        if self.logarithm:
            with np.errstate(invalid="ignore", divide="ignore"):
                values = np.log(-values)
        return np.ascontiguousarray(values)

    def equals(self, blocks: StoredBlocks) -> bool:
        """Whether the first and the last rows of these integers are what the gguf package reads."""
        num_rows = len(blocks.values)
        for rows in (slice(_COMPARED), slice(max(num_rows - _COMPARED, 0), num_rows)):
            some = self.part(rows.start or 0, min(rows.stop, num_rows))
            expected = np.concatenate(
                [dequantized(piece.stored().rows(), piece.tensor.type) for piece in some.pieces]
            )
            found = blocks.take(np.arange(num_rows)[rows]).dequantize()
            if not np.array_equal(found, expected, equal_nan=True):
                return False
        return True

    @property
    def has_blocks(self) -> bool:
        """Whether `blocks` returns integers, by the first row of each piece."""
        first = tuple(piece.part(0, 1) for piece in self.pieces)
        return replace(self, pieces=first).blocks() is not None

    def blocks(self) -> StoredBlocks | None:
        """The integers, if its rows are stored as such and alike; otherwise None."""
        changed = self.shift or self.transposed or self.padding or self.columns is not None
        if self.is_vector or changed or self.squeezed:
            return None
        parts = [read_blocks(piece.stored()) for piece in self.pieces]
        found = [part for part in parts if part is not None]
        first = found[0] if found else None
        if first is None or len(found) < len(parts):
            return None
        forms = {(each.bits, each.block_size, each.minimum is None) for each in found}
        if len(forms) > 1:
            return None
        minima = [each.minimum for each in found if each.minimum is not None]
        if len(found) == 1:
            return first
        return replace(
            first,
            values=np.concatenate([each.values for each in found]),
            scale=np.concatenate([each.scale for each in found]),
            minimum=np.concatenate(minima) if minima else None,
        )


def read_values(tensor: StoredTensor) -> Floats:
    """A tensor in float32: a vector, or a matrix of all its rows.

    Raises:
        ExportError: the reference does not know the type.
    """
    rows, kernels = tensor.rows(), block_kernels()
    values = np.empty((len(rows), tensor.shape[-1]), np.float32)
    step = max(1, _AT_ONCE // tensor.shape[-1])

    def read(start: int) -> None:
        part, out = rows[start : start + step], values[start : start + step]
        blocks = part.reshape(-1, tensor.type.num_bytes)
        if kernels is None or not kernels.restore(tensor.type.number, blocks, out):
            out[:] = dequantized(part, tensor.type)

    if len(rows) <= step:
        read(0)
    else:
        with ThreadPoolExecutor(_threads()) as pool:
            for _ in pool.map(read, range(0, len(rows), step)):
                pass
    return values[0] if tensor.is_vector else values


def dequantized(rows: NDArray[np.uint8], of: TensorType) -> Floats:
    """Rows of bytes in float32, by the package that the kernels are compared with."""
    kind = gguf.GGMLQuantizationType(of.number)
    with np.errstate(invalid="ignore", over="ignore"):  # damaged scales; found later
        # As one long row, or the package would take 16 at a time
        found: Floats = gguf.quants.dequantize(rows.reshape(1, -1), kind)
    return found.reshape(len(rows), -1)


def _size(part: slice) -> int:
    return int(part.stop) - int(part.start)


def _threads() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def match_weights(file: GGUFFile, model: Model) -> list[Weight]:
    """What each of a file's tensors is in transformers.

    Raises:
        ExportError: the model has no place for a tensor, or a tensor has another shape.
    """
    return list(_Matching(file, model).run())


class _Matching:
    def __init__(self, file: GGUFFile, model: Model) -> None:
        self._file = file
        self._model = model
        self._architecture = file.metadata.get("general.architecture")
        config = model.config
        self._heads = int(config.get("num_attention_heads") or config["n_head"])
        self._kv_heads = int(config.get("num_key_value_heads", self._heads))

    def run(self) -> Iterator[Weight]:
        names = self._model.names
        for name, tensor in self._file.tensors.items():
            if _READ_ELSEWHERE.match(name) or self._is_further(name):
                continue
            if (parameter := self._parameter(name, tensor)) is not None:
                yield parameter
                continue
            base, _, suffix = name.rpartition(".")
            layer = _LAYER.match(base)
            key = base if layer is None else "blk.{}." + base[layer.end() :]
            index = "" if layer is None else layer[1]
            if suffix not in ("weight", "bias"):
                self._refuse(name)
            if key == "output" and names.get(key) == "lm_head" and self._model.pooling:
                continue
            if key in names and _EXPERTS.search(key):
                yield from self._experts(names[key], index, suffix, tensor)
            elif self._model.packed_heads is not None and key == _JOINED:
                yield self._pack(index, tensor)
            elif self._model.packed_heads is not None and key == _GATES:
                continue  # of the matrix above
            elif key in (_KEY_PRODUCT, _VALUE_PRODUCT) and _PRODUCT in names:
                if key == _KEY_PRODUCT:
                    yield self._of_heads(index, tensor)
            elif key in self._model.joined:
                yield self._join(index, suffix, key, *self._model.joined[key])
            elif any(key in others for others in self._model.joined.values()):
                continue
            elif key in names:
                yield self._single(key, index, suffix, tensor)
            elif key == _JOINED and _QUERY in names:
                yield from self._split(index, suffix, tensor)
            elif key == _JOINED_EXPERTS and "blk.{}.ffn_up_exps" in names:
                yield from self._split_experts(index, tensor)
            elif key == _QUERY and _JOINED in names:
                yield self._join(index, suffix, _QUERY, _KEY, _VALUE, whole=_JOINED)
            elif not (key in (_KEY, _VALUE) and _JOINED in names):
                self._refuse(name)

    def _is_further(self, name: str) -> bool:
        """Whether a tensor is of a layer that predicts further tokens, beside the model's own."""
        layer = _LAYER.match(name)
        num_layers = self._model.config.get("num_hidden_layers")
        further = self._file.metadata.get(f"{self._architecture}.nextn_predict_layers", 0)
        return bool(further) and layer is not None and int(layer[1]) >= int(num_layers or 0)

    def _parameter(self, name: str, tensor: StoredTensor) -> Weight | None:
        """A weight that is no module's, with its whole name."""
        layer = _LAYER.match(name)
        if layer is None:
            return None
        found = self._model.parameters.get("blk.{}." + name[layer.end() :])
        if found is None:
            return None
        rows = None if self._model.value_heads is None else self._value_order(tensor, 1)
        # llama.cpp's converter gives vectors of Mamba 2 a second dimension
        vector = replace(tensor, shape=(math.prod(tensor.shape),))
        return Weight(
            self._model.prefix + found.format(layer[1]),
            (Piece(vector, rows),),
            is_vector=True,
            logarithm=found.endswith("A_log"),
        )

    def _value_order(self, tensor: StoredTensor, size: int, offset: int = 0) -> NDArray[np.int64]:
        """The rows of values by head of keys; the ones before stay."""
        heads = self._model.value_heads
        num_values = 0 if heads is None else heads.num_keys * heads.per_key * size
        if heads is None or tensor.num_rows != offset + num_values:
            self._wrong_shape(tensor)
        order = np.arange(num_values).reshape(heads.per_key, heads.num_keys, size)
        return np.concatenate([np.arange(offset), offset + order.swapaxes(0, 1).reshape(-1)])

    def _refuse(self, name: str) -> NoReturn:
        raise ExportError(
            f"{self._file.path} has the tensor {name!r}, for which {self._model.architecture} has "
            "no place"
        )

    def _name(self, key: str, layer: str, suffix: str, expert: int = 0) -> str:
        name = self._model.names[key].format(layer).replace("*", str(expert))
        return f"{'' if key == 'output' else self._model.prefix}{name}.{suffix}"

    def _single(self, key: str, layer: str, suffix: str, tensor: StoredTensor) -> Weight:
        model = self._model
        rows = None
        if model.permuted and key in (_QUERY, _KEY):
            rows = self._order(tensor, self._heads if key == _QUERY else self._kv_heads)
        heads = self._model.value_heads
        columns = None
        if heads is not None and suffix == "weight":
            if key in ("blk.{}.ssm_alpha", "blk.{}.ssm_beta"):
                rows = self._value_order(tensor, 1)
            elif key == "blk.{}.attn_gate":
                rows = self._value_order(tensor, heads.size)
            elif key in ("blk.{}.attn_qkv", "blk.{}.ssm_conv1d"):
                rows = self._value_order(tensor, heads.size, heads.offset)
            elif key == "blk.{}.ssm_out":
                flipped = replace(tensor, shape=tensor.shape[::-1])
                columns = self._value_order(flipped, heads.size)
        is_norm = key.endswith("norm") and suffix == "weight" and key != "blk.{}.ssm_norm"
        is_matrix = not tensor.is_vector
        weight = Weight(
            self._name(key, layer, suffix),
            (Piece(tensor, rows),),
            is_vector=tensor.is_vector,
            shift=-1.0 if model.shifted and is_norm else 0.0,
            transposed=is_matrix and key.rpartition(".")[2] in model.transposed,
            padding=model.padding if key == "position_embd" else 0,
            columns=columns,
            squeezed=is_matrix and key in model.squeezed,
        )
        if key == "blk.{}.ffn_gate_inp_shexp" and tensor.is_vector:  # one row in transformers
            matrix = replace(tensor, shape=(1, *tensor.shape))
            return replace(weight, pieces=(Piece(matrix),), is_vector=False)
        return weight

    def _order(self, tensor: StoredTensor, heads: int) -> NDArray[np.int64]:
        """The rows of each head's first halves of pairs, then of their second halves."""
        num_rows = tensor.num_rows
        if heads == 0 or num_rows % (2 * heads):
            raise ExportError(
                f"{tensor.name} of {self._file.path} has {num_rows:,} rows, which {heads:,} heads "
                "cannot have"
            )
        order = np.arange(num_rows).reshape(heads, -1, 2)
        return order.swapaxes(1, 2).reshape(-1)

    def _experts(
        self, template: str, layer: str, suffix: str, tensor: StoredTensor
    ) -> Iterator[Weight]:
        is_bias = suffix == "bias"
        if len(tensor.shape) != (2 if is_bias else 3):
            self._wrong_shape(tensor)
        num_experts, num_rows = tensor.shape[:2]
        source = replace(tensor, shape=(num_experts * num_rows,)) if is_bias else tensor
        for expert in range(num_experts):
            rows = slice(expert * num_rows, (expert + 1) * num_rows)
            name = template.format(layer).replace("*", str(expert))
            yield Weight(
                f"{self._model.prefix}{name}.{suffix}", (Piece(source, rows),), is_vector=is_bias
            )

    def _split_experts(self, layer: str, tensor: StoredTensor) -> Iterator[Weight]:
        if len(tensor.shape) != 3 or tensor.shape[1] % 2:
            self._wrong_shape(tensor)
        num_experts, num_rows, _ = tensor.shape
        for expert in range(num_experts):
            start = expert * num_rows
            half = start + num_rows // 2
            for key, rows in (
                ("blk.{}.ffn_gate_exps", slice(start, half)),
                ("blk.{}.ffn_up_exps", slice(half, start + num_rows)),
            ):
                name = self._name(key, layer, "weight", expert)
                yield Weight(name, (Piece(tensor, rows),), is_vector=False)

    def _split(self, layer: str, suffix: str, tensor: StoredTensor) -> Iterator[Weight]:
        """Query, key and value of a matrix that has all three."""
        per_head, rest = divmod(tensor.num_rows, self._heads + 2 * self._kv_heads)
        if rest or (self._model.permuted and per_head % 2):
            self._wrong_shape(tensor)
        start = 0
        for key, heads in ((_QUERY, self._heads), (_KEY, self._kv_heads), (_VALUE, self._kv_heads)):
            order = np.arange(heads * per_head)
            if self._model.permuted and key != _VALUE:
                order = order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
            yield Weight(
                self._name(key, layer, suffix),
                (Piece(tensor, start + order),),
                is_vector=tensor.is_vector,
            )
            start += heads * per_head

    def _pack(self, layer: str, tensor: StoredTensor) -> Weight:
        """Rows of queries, keys, values and gates, of each head of keys by itself."""
        heads = self._model.packed_heads
        gates = self._file.tensors.get(f"{_GATES.format(layer)}.weight")
        assert heads is not None, "the model has them"
        keys = heads.num_keys * heads.key_size
        values = heads.num_keys * heads.value_size
        if gates is None or gates.num_rows != values or tensor.num_rows != 2 * keys + values:
            self._wrong_shape(tensor)
        pieces = []
        for head in range(heads.num_keys):
            key, value = head * heads.key_size, head * heads.value_size
            for source, start, size in (
                (tensor, key, heads.key_size),
                (tensor, keys + key, heads.key_size),
                (tensor, 2 * keys + value, heads.value_size),
                (gates, value, heads.value_size),
            ):
                pieces.append(Piece(source, slice(start, start + size)))
        return Weight(self._name(_JOINED, layer, "weight"), tuple(pieces), is_vector=False)

    def _of_heads(self, layer: str, keys: StoredTensor) -> Weight:
        """Rows of keys and of values of one head after the other; those of keys are turned."""
        values = self._file.tensors.get(f"{_VALUE_PRODUCT.format(layer)}.weight")
        if len(keys.shape) != 3 or keys.shape[0] != self._heads:
            self._wrong_shape(keys)
        if values is None or (values.shape[0], values.shape[-1]) != keys.shape[:2]:
            raise ExportError(
                f"{keys.name} of {self._file.path} needs a matrix of values of its width beside it"
            )
        rank, size = keys.shape[1:]
        value_size, pieces = values.num_rows // self._heads, []
        for head in range(self._heads):
            turned, rows = slice(head * rank, (head + 1) * rank), slice(0, size)
            pieces.append(Piece(keys, turned, rows))
            pieces.append(Piece(values, slice(head * value_size, (head + 1) * value_size)))
        return Weight(self._name(_PRODUCT, layer, "weight"), tuple(pieces), is_vector=False)

    def _join(self, layer: str, suffix: str, *keys: str, whole: str | None = None) -> Weight:
        """Tensors one below the other, by the name of ``whole``, or of the first one."""
        names = [f"{key.format(layer)}.{suffix}" for key in keys]
        tensors = [self._file.tensors.get(name) for name in names]
        found = [tensor for tensor in tensors if tensor is not None]
        if len(found) < len(tensors) or len({tensor.shape[-1] for tensor in found}) > 1:
            raise ExportError(
                f"{', '.join(names)} of {self._file.path} must be {len(names)} of the same width"
            )
        return Weight(
            self._name(whole or keys[0], layer, suffix),
            tuple(Piece(tensor) for tensor in found),
            is_vector=found[0].is_vector,
            transposed=not found[0].is_vector and "attn_qkv" in self._model.transposed,
        )

    def _wrong_shape(self, tensor: StoredTensor) -> NoReturn:
        raise ExportError(
            f"{tensor.name} of {self._file.path} has the shape {tensor.shape}, which does not fit "
            f"{self._model.architecture}"
        )


def count_kinds(weights: list[Weight]) -> Mapping[str, int]:
    """How many values are stored in each type."""
    counts: dict[str, int] = {}
    tensors = {piece.tensor.name: piece.tensor for each in weights for piece in each.pieces}
    for tensor in tensors.values():
        number = int(np.prod(tensor.shape))
        counts[tensor.type.name] = counts.get(tensor.type.name, 0) + number
    return dict(sorted(counts.items(), key=lambda each: -each[1]))
