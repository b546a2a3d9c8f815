"""Constants of the C++ code that Python repeats."""

import ctypes

from maskdial.bundle.manifest import CACHE_HEADERS
from maskdial.kernels.fuse import MAX_PRODUCTS
from maskdial.kernels.installed import Kernels
from maskdial.kernels.rewrite import CHUNK, LANES


def test_python_repeats_the_constants_of_the_library(kernels: Kernels) -> None:
    repeated = [CHUNK, LANES, MAX_PRODUCTS, CACHE_HEADERS["int8"], CACHE_HEADERS["int16"]]
    constants = (ctypes.c_size_t * len(repeated))()
    ctypes.CDLL(str(kernels.path)).maskdial_constants(constants)
    assert list(constants) == repeated
