"""StoredBlockKernels: quantized tensors of GGUF files, read by the library of kernels."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_POINTER, _SIZE, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32


class StoredBlockKernels:
    """Reads blocks of some types into arrays, in a twentieth of NumPy's time.

    A type is meant by its number in ``ggml.h``. Blocks are uint8 (num_blocks, num_bytes), as the
    file has them. All arrays are contiguous, and other Python threads run meanwhile.
    """

    def __init__(self, library: Path) -> None:
        """``library`` is the file of the kernels."""
        loaded = ctypes.CDLL(str(library))
        find, self._unpack, self._restore = (
            loaded[f"maskdial_{name}"] for name in ("processor", "unpack", "restore")
        )
        find.restype, find.argtypes = _POINTER, ()
        self._processor = find()
        common = _POINTER, _NUMBER, _POINTER, _SIZE
        for function, num_results in ((self._unpack, 3), (self._restore, 1)):
            function.restype = _SIZE
            function.argtypes = (*common, *(_POINTER,) * num_results)

    def unpack(
        self,
        number: int,
        blocks: NDArray[np.uint8],
        values: NDArray[Any],
        scale: Floats,
        minimum: Floats | None,
    ) -> bool:
        """Writes integers, one byte each, their scales, and their minima if the type has them.

        Returns:
            Whether the type is known.
        """
        outputs = values.ctypes.data, scale.ctypes.data
        least = None if minimum is None else minimum.ctypes.data
        return self._all(
            blocks,
            self._unpack(self._processor, number, blocks.ctypes.data, len(blocks), *outputs, least),
        )

    def restore(self, number: int, blocks: NDArray[np.uint8], out: Floats) -> bool:
        """Writes the weights that the integers stand for, ``scale * integer - minimum``.

        Returns:
            Whether the type is known.
        """
        return self._all(
            blocks,
            self._restore(
                self._processor, number, blocks.ctypes.data, len(blocks), out.ctypes.data
            ),
        )

    @staticmethod
    def _all(blocks: NDArray[np.uint8], num_read: int) -> bool:
        assert num_read in (0, blocks.size), "blocks have the size of their type"
        return num_read == blocks.size
