"""The weights of a checkpoint, by transformers' names, a part of a matrix at a time."""

import json
import math
import mmap
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.checkpoint.gguf.weights import Weight
from maskdial_export.direct import fp8
from maskdial_export.direct.decoder import Decoder, Floats, NotDirectError
from maskdial_export.direct.encoder import OnePass
from maskdial_export.direct.views import MXFP4_BYTES, View, unpacked
from maskdial_export.errors import ExportError
from maskdial_export.quantize.blocks import to_bytes
from maskdial_export.session import num_cores

_CHUNK = 2**20
"""Weights of a part of a matrix: 4 MiB in float32, which the allocator and the cache keep."""
_MAX_HEADER = 2**27
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# What is stored in some files and computed by every model
_UNUSED = re.compile(
    r"(^|\.)(position_ids|token_type_ids|rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias)$"
)
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<u2"),
    "BF16": np.dtype("<u2"),
    "U8": np.dtype("u1"),  # of integers in blocks
    fp8.DTYPE: np.dtype("u1"),
}
_MXFP4_BITS = 5

Part = TypeVar("Part")
Result = TypeVar("Result")


class Weights(Protocol):
    """Weights by name; matrices are (outputs, inputs). Only what is asked for is in memory."""

    name: str

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every name, and its shape."""
        ...

    def values(self, name: str, rows: slice | None = None) -> Floats:
        """Rows of a weight in float32; None for all."""
        ...

    def bits(self, name: str) -> int | None:
        """How many bits an integer of a matrix has at most; None if it is not one of integers."""
        ...

    def blocks(self, name: str, rows: slice | None = None) -> StoredBlocks | None:
        """Rows of a matrix of integers; None if it has no single form of them."""
        ...


class GGUFWeights:
    """The weights of a GGUF file, mapped."""

    def __init__(self, name: str, weights: Sequence[Weight]) -> None:
        self.name = name
        self._weights = {each.name: each for each in weights}
        self._shapes = {each.name: each.shape for each in weights}

    def renamed(self, rename: Callable[[str], str | None]) -> "GGUFWeights":
        """These weights by other names, without those for which there is none."""
        names = {key: rename(key) for key in self._weights}
        return GGUFWeights(
            self.name,
            [replace(self._weights[key], name=name) for key, name in names.items() if name],
        )

    def with_views(self, views: Mapping[str, View]) -> "GGUFWeights":
        """These weights, with some rows of matrices in the place of those matrices."""
        sources = {view.name for view in views.values()}
        others = [each for name, each in self._weights.items() if name not in sources]
        parts = []
        for key, each in views.items():
            assert isinstance(each.rows, slice), "rows of a file's matrix lie together"
            parts.append(replace(self._part(each.name, each.rows), name=key))
        return GGUFWeights(self.name, [*others, *parts])

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def values(self, name: str, rows: slice | None = None) -> Floats:
        if rows is not None and self._weights[name].padding:
            return self._weights[name].values()[rows]
        return self._part(name, rows).values()

    def bits(self, name: str) -> int | None:
        return self._weights[name].bits

    def blocks(self, name: str, rows: slice | None = None) -> StoredBlocks | None:
        if not self._weights[name].has_blocks:
            return None
        part = self._part(name, rows)
        found = part.blocks()
        if found is not None and not part.equals(found):
            raise ExportError(
                f"{name} of {self.name} is read as other numbers than the gguf package reads; this "
                "is a fault of the exporter, please report it"
            )
        if found is not None and not np.isfinite(found.scale).all():
            raise ExportError(
                f"{name} of {self.name} is damaged: it has scales that are no numbers"
            )
        return found

    def _part(self, name: str, rows: slice | None) -> Weight:
        weight = self._weights[name]
        return weight if rows is None else weight.part(rows.start, rows.stop)


class JoinedWeights:
    """Weights of several checkpoints, whose names get the prefix that they stand by; of two with
    one name, the later is there."""

    def __init__(self, name: str, parts: Mapping[str, Weights]) -> None:
        self.name = name
        self._places = {
            f"{prefix}{key}": (part, key) for prefix, part in parts.items() for key in part.shapes()
        }

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: part.shapes()[key] for name, (part, key) in self._places.items()}

    def values(self, name: str, rows: slice | None = None) -> Floats:
        part, key = self._places[name]
        return part.values(key, rows)

    def bits(self, name: str) -> int | None:
        part, key = self._places[name]
        return part.bits(key)

    def blocks(self, name: str, rows: slice | None = None) -> StoredBlocks | None:
        part, key = self._places[name]
        return part.blocks(key, rows)


class HeldWeights:
    """Weights that were computed, in memory."""

    def __init__(self, name: str, weights: Mapping[str, Floats]) -> None:
        self.name = name
        self._weights = weights

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: each.shape for name, each in self._weights.items()}

    def values(self, name: str, rows: slice | None = None) -> Floats:
        return self._weights[name] if rows is None else self._weights[name][rows]

    def bits(self, name: str) -> int | None:
        return None

    def blocks(self, name: str, rows: slice | None = None) -> StoredBlocks | None:
        return None


class RoundedWeights:
    """Weights of which some are what the integers stand for that they were rounded to."""

    def __init__(self, weights: Weights, rounded: Set[str], by_row: Set[str]) -> None:
        """``rounded`` have 8 bits in blocks, ``by_row`` 8 bits with a scale for each row."""
        self.name = weights.name
        self._weights = weights
        self._rounded = rounded
        self._by_row = by_row

    @property
    def rounds_products(self) -> bool:
        """Whether matrices of products are among them, and not the embedding table alone."""
        return bool(self._rounded)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._weights.shapes()

    def values(self, name: str, rows: slice | None = None) -> Floats:
        values = self._weights.values(name, rows)
        if name in self._by_row:
            step = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
            step[step == 0] = 1
            restored: Floats = np.rint(values / step) * step
            return restored
        return to_bytes(values.T).weight().T if name in self._rounded else values

    def bits(self, name: str) -> int | None:
        return None

    def blocks(self, name: str, rows: slice | None = None) -> StoredBlocks | None:
        return None


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor of a safetensors file is: its bytes in the mapped file."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def array(self) -> NDArray[Any]:
        """Its bytes as numbers of its shape; BF16 and F16 as integers of 16 bits."""
        flat: NDArray[Any] = np.frombuffer(self.data, _DTYPES[self.dtype])
        return flat.reshape(self.shape)


class SafetensorsWeights:
    """The weights of a checkpoint's safetensors files, mapped, in 32 or 16 bits."""

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        """Reads the files' headers.

        Raises:
            ExportError: a file is damaged.
            NotDirectError: it has tensors of other types.
            OSError: it cannot be read.
        """
        self.name = name
        self._tensors: dict[str, _Stored] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._views: dict[str, View] = {}
        self._fp8: fp8.Fp8 | None = None
        for file in files:
            for key, stored in _read_header(file):
                if key in self._tensors:
                    raise ExportError(f"{file} has {key} again, which another file has")
                self._tensors[key], self._shapes[key] = stored, stored.shape

    def renamed(self, rename: Callable[[str], str | None]) -> "SafetensorsWeights":
        """These weights by other names, without those for which there is none."""
        found = SafetensorsWeights(self.name, [])
        found._fp8 = self._fp8
        for key, stored in self._tensors.items():
            name = rename(key)
            if name is not None:
                found._tensors[name], found._shapes[name] = stored, stored.shape
        return found if self._fp8 is None else found.in_fp8(self._fp8)

    def in_fp8(self, kind: fp8.Fp8) -> "SafetensorsWeights":
        """These weights, of which matrices of float8 have factors beside them."""
        found = SafetensorsWeights(self.name, [])
        found._tensors, found._fp8 = self._tensors, kind
        # Factors of what is no float8 stay, as weights that are not known
        small = {name for name, each in self._tensors.items() if each.dtype == fp8.DTYPE}
        found._shapes = {
            name: shape for name, shape in self._shapes.items() if fp8.weight_of(name) not in small
        }
        return found

    def with_views(self, views: Mapping[str, View]) -> "SafetensorsWeights":
        """These weights, with parts of tensors in the place of those tensors.

        Raises:
            ExportError: a tensor has another shape than its parts say.
        """
        found = SafetensorsWeights(self.name, [])
        found._tensors, found._views, found._fp8 = self._tensors, dict(views), self._fp8
        sources = {source for view in views.values() for source in view.sources}
        found._shapes = {name: shape for name, shape in self._shapes.items() if name not in sources}
        for name, view in views.items():
            found._shapes[name] = self._shape(view)
        return found

    def _shape(self, view: View) -> tuple[int, ...]:
        """Of a part. Raises: ExportError: its tensors are of other shapes than those of parts."""
        shapes = [self._shapes[name] for name in view.sources]
        fits = len(shapes[0]) >= (1 if view.index is None else 2)
        if view.is_packed:
            fits = shapes[0] == (*shapes[1], MXFP4_BYTES) and len(shapes[1]) == 3
        count = shapes[0][0] if view.parts is None else view.parts
        fits = fits and (view.parts is None or shapes[0][0] % view.parts == 0)
        if not fits or (view.index is not None and view.index >= count):
            raise ExportError(
                f"{view.sources[0]} of {self.name} has the shape {shapes[0]}, which does not fit "
                "its configuration"
            )
        part = view.of(self._tensors[view.sources[0]].array()).shape
        return (part[0], 2 * math.prod(part[1:])) if view.is_packed else part

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def values(self, name: str, rows: slice | None = None) -> Floats:
        view = self._views.get(name)
        if view is not None and view.is_packed:
            return self._blocks(view, rows).dequantize()
        stored = self._tensors[name if view is None else view.name]
        if stored.dtype == fp8.DTYPE and view is None and self._fp8 is not None:
            return self._restored(name, stored, rows)
        if stored.dtype in ("U8", fp8.DTYPE):
            raise NotDirectError(
                f"{name} of {self.name} is of the type {stored.dtype}, which is not known"
            )
        part = stored.array() if view is None else view.of(stored.array())
        part = part if rows is None else part[rows]
        if stored.dtype == "BF16":
            widened: Floats = (part.astype(np.uint32) << 16).view(np.float32)
            return widened
        if stored.dtype == "F16":
            return np.ascontiguousarray(part).view(np.float16).astype(np.float32)
        return part.astype(np.float32, copy=False)

    def _restored(self, name: str, stored: "_Stored", rows: slice | None) -> Floats:
        """Rows of a matrix of float8."""
        factors = fp8.factor_of(name)
        if factors not in self._tensors or self._fp8 is None:
            raise ExportError(f"{name} of {self.name} is damaged: it has no {factors}")
        codes = stored.array() if rows is None else stored.array()[rows]
        first = 0 if rows is None else rows.start or 0
        what = f"{name} of {self.name}"
        return self._fp8.restore(what, codes, self.values(factors), first, stored.shape[0])

    def bits(self, name: str) -> int | None:
        view = self._views.get(name)
        return _MXFP4_BITS if view is not None and view.is_packed else None

    def blocks(self, name: str, rows: slice | None = None) -> StoredBlocks | None:
        view = self._views.get(name)
        return self._blocks(view, rows) if view is not None and view.is_packed else None

    def _blocks(self, view: View, rows: slice | None) -> StoredBlocks:
        both = (view.of(self._tensors[name].array()) for name in view.sources)
        packed, scales = (part if rows is None else part[rows] for part in both)
        return unpacked(packed, scales)


def _read_header(file: Path) -> Iterator[tuple[str, _Stored]]:
    with file.open("rb") as opened:
        start = opened.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise ExportError(
                f"{file} is a pointer of Git LFS, not the weights; run `git lfs pull` there"
            )
        if len(start) < 8:
            raise ExportError(f"{file} is incomplete: it has {len(start)} bytes")
        mapped = memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    size = int.from_bytes(mapped[:8], "little")
    if size > min(_MAX_HEADER, len(mapped) - 8):
        raise ExportError(f"{file} is damaged: its header claims {size:,} bytes")
    try:
        header = json.loads(bytes(mapped[8 : 8 + size]))
        entries = [(key, value) for key, value in header.items() if key != "__metadata__"]
        for key, value in entries:
            if _UNUSED.search(key):
                continue
            shape = tuple(int(each) for each in value["shape"])
            first, last = (int(each) for each in value["data_offsets"])
            dtype = str(value["dtype"])
            if dtype not in _DTYPES:
                raise NotDirectError(
                    f"{key} of {file.name} is of the type {dtype}, which is not known"
                )
            data = mapped[8 + size + first : 8 + size + last]
            if (
                len(data) != math.prod(shape) * _DTYPES[dtype].itemsize
                or first < 0
                or min(shape, default=1) < 1
            ):
                raise ExportError(f"{file} is incomplete or damaged: {key} has {len(data):,} bytes")
            yield _renamed(key), _Stored(dtype, shape, data)
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ExportError(f"{file} is damaged: its header cannot be read ({error!r})") from error


def _renamed(key: str) -> str:
    """A weight's name today; the first norms of BERT had others, which transformers renames."""
    for old, new in _OLD_NAMES.items():
        if key.endswith(f"LayerNorm.{old}"):
            return key.removesuffix(old) + new
    return key


def check_weights(decoder: Decoder, weights: Weights, *, complete: bool) -> bool:
    """Compares the weights that there are with those that the configuration describes.

    Args:
        decoder: the description.
        weights: the checkpoint's.
        complete: whether layers that predict further tokens must not be left out.

    Returns:
        Whether such layers are left out.

    Raises:
        ExportError: some are missing, or have another shape.
        NotDirectError: there are others beside them.
    """
    found = _others(decoder.shapes(), weights)
    found = [name for name in found if not name.startswith(decoder.unused)]
    others = [name for name in found if not name.startswith(decoder.further)]
    if complete and len(others) < len(found):
        raise NotDirectError(
            f"the direct path leaves out the layers of {weights.name} that predict further tokens"
        )
    tied = (f"{decoder.names.table}.weight", "lm_head.weight")
    if not (decoder.tied and others == ["lm_head.weight"] and _are_equal(weights, *tied)):
        _refuse(weights, others)
    return len(others) < len(found)


def check_one_pass_weights(model: OnePass, weights: Weights) -> None:
    """As `check_weights`; weights of other heads may be there, as in checkpoints of pretraining.

    An output layer over the vocabulary that is stored beside the table has to be equal to it.
    """
    described = model.shapes()
    paths = [name.split(".") for name in described]
    modules = {".".join(path[:depth]) for path in paths for depth in range(1, len(path))}
    others, twins, head = [], {}, model.vocabulary
    if head is not None:
        twins = {} if head.num_inputs else {f"{head.module}.weight": f"{model.words}.weight"}
        twins |= {} if head.bias is None else {f"{head.module}.bias": head.bias}
    for name in _others(described, weights):
        if name in twins:
            known = _are_equal(weights, twins[name], name)
        else:
            known = name in model.optional or _is_another_head(name, model.base, modules)
        if not known:
            others.append(name)
    _refuse(weights, others)


def _is_another_head(name: str, base: str, modules: Set[str]) -> bool:
    """Whether a weight that is left over belongs to a module that the model does not have."""
    if base and name.startswith(base):
        return False
    path = name.split(".")[:-1]
    for depth in range(1, len(path) + 1):
        if ".".join(path[:depth]) not in modules:
            return bool(base) or depth == 1
    return False  # a parameter more in a module of the model


def _others(described: Mapping[str, tuple[int, ...]], weights: Weights) -> list[str]:
    """The weights that a configuration does not describe.

    Raises:
        ExportError: some are missing, or have another shape.
    """
    found = dict(weights.shapes())
    missing = [name for name in described if name not in found]
    if missing:
        raise ExportError(
            f"{weights.name} lacks {len(missing)} of the {len(described)} weights that its "
            f"configuration describes, such as {missing[0]}"
        )
    for name, shape in described.items():
        if found[name] != shape:
            raise ExportError(
                f"{name} of {weights.name} has the shape {found[name]}, and its configuration "
                f"describes a model where it has {shape}"
            )
    return [name for name in found if name not in described]


def _refuse(weights: Weights, others: Sequence[str]) -> None:
    if others:
        raise NotDirectError(
            f"{weights.name} has {len(others)} weights that are not known to the direct path, "
            f"such as {others[0]}"
        )


def _are_equal(weights: Weights, left: str, right: str) -> bool:
    """Whether a tied weight that is stored all the same is the one that it is tied to."""
    shape = weights.shapes()[left]
    if weights.shapes()[right] != shape:
        return False
    return all(
        np.array_equal(weights.values(left, rows), weights.values(right, rows))
        for rows in row_chunks(shape[0], math.prod(shape[1:]))
    )


def row_chunks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """The rows of a matrix in parts of a bounded size."""
    size = max(1, _CHUNK // num_columns)
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def in_turn(work: Callable[[Part], Result], parts: Iterable[Part]) -> Iterator[Result]:
    """What ``work`` makes of each part, in their order.

    The next parts are worked on meanwhile, on all cores; no more of them are in memory.
    """
    num_threads = num_cores()
    started: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for part in parts:
            started.append(pool.submit(work, part))
            if len(started) > num_threads:
                yield started.popleft().result()
        while started:
            yield started.popleft().result()
