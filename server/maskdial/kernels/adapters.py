"""PackedAdapter: a low-rank adapter in the memory of the kernels."""

import ctypes
import weakref
from pathlib import Path

import numpy as np

from maskdial.bundle.adapter import LowRank, Projection

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class PackedAdapter:
    """What the kernels add to the products of texts that have this adapter.

    The memory lives as long as the object, so whatever is in a pass holds the object.

    Args:
        library: the file of the kernels.

    Attributes:
        address: what the graph's input ``adapters`` has for a text with this adapter.
        num_bytes: the size of the matrices, filled up to whole vectors.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        new, release = loaded.maskdial_new_adapter, loaded.maskdial_release_adapter
        new.restype, new.argtypes = _POINTER, ()
        release.restype, release.argtypes = None, (_POINTER,)
        self._adapt = loaded.maskdial_adapt
        self._adapt.restype = _SIZE
        sizes = (_SIZE,) * 4
        self._adapt.argtypes = (_POINTER, ctypes.c_char_p, _POINTER, _POINTER, *sizes, ctypes.c_int)
        self.address = int(new())
        self.num_bytes = 0
        weakref.finalize(self, release, self.address)

    def add(self, matrices: LowRank, place: Projection) -> None:
        """Adds a layer, before any pass uses the adapter; the matrices are copied."""
        a, b = np.ascontiguousarray(matrices.a), np.ascontiguousarray(matrices.b)
        self.num_bytes += self._adapt(
            self.address,
            place.product.encode(),
            a.ctypes.data,
            b.ctypes.data,
            *a.shape,
            b.shape[1],
            place.first,
            a.dtype == np.float16,
        )
