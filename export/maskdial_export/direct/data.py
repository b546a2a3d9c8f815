"""A graph's weight file, written tensor by tensor."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import onnx
from numpy.typing import DTypeLike, NDArray

_PAGE, _LINE = 4096, 64
_LARGE = 2**20
_TYPES = {
    np.dtype(np.float32): onnx.TensorProto.FLOAT,
    np.dtype(np.uint8): onnx.TensorProto.UINT8,
    np.dtype(np.int8): onnx.TensorProto.INT8,
}


class DataFile:
    """Writes initializers into a file beside the graph; none of them stays in memory.

    ``show`` is told how many bytes there are after each of them.
    """

    def __init__(self, path: Path, show: Callable[[int], None] = lambda _: None) -> None:
        self._file = path.open("wb")
        self._name = path.name
        self._end = 0
        self._show = show

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, name: str, array: NDArray[Any]) -> onnx.TensorProto:
        """Writes an array; returns its initializer."""
        return self.write_rows(name, array.dtype, array.shape, [array])

    def write_rows(
        self, name: str, dtype: DTypeLike, shape: tuple[int, ...], parts: Iterable[NDArray[Any]]
    ) -> onnx.TensorProto:
        """Writes an array of which the parts are rows one below the other."""
        tensor = self._reserve(name, np.dtype(dtype), shape)
        for part in parts:
            self._file.write(np.ascontiguousarray(part, dtype).data.cast("B"))
        assert self._file.tell() == self._end, f"{name} has other rows than its shape says"
        self._show(self._end)
        return tensor

    def write_columns(
        self, name: str, shape: tuple[int, int], parts: Iterator[NDArray[np.float32]]
    ) -> onnx.TensorProto:
        """Writes a float32 matrix of which the parts are columns one beside the other."""
        tensor = self._reserve(name, np.dtype(np.float32), shape)
        start, first = self._file.tell(), 0
        self._file.truncate(self._end)
        self._file.flush()
        for part in parts:
            rows = np.ascontiguousarray(part)
            for index, row in enumerate(rows):
                place = start + 4 * (index * shape[1] + first)
                os.pwrite(self._file.fileno(), memoryview(row).cast("B"), place)
            first += part.shape[1]
        assert first == shape[1], f"{name} has other columns than its shape says"
        self._file.seek(self._end)
        self._show(self._end)
        return tensor

    def _reserve(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> onnx.TensorProto:
        length = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        step = _PAGE if length >= _LARGE else _LINE
        start = -(-self._end // step) * step
        self._file.write(bytes(start - self._end))
        self._end = start + length
        tensor = onnx.TensorProto(
            name=name, data_type=_TYPES[dtype], dims=shape, data_location=onnx.TensorProto.EXTERNAL
        )
        for key, value in (("location", self._name), ("offset", start), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        return tensor
