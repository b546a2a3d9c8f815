"""Whether this machine's int8 kernels multiply exactly; asked at export and at load."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

NUM_INPUTS = 64
ZERO_POINT = 128
LARGEST_WEIGHT = 127


def multiplies_exactly(run: Callable[[NDArray[np.uint8]], NDArray[np.float32]]) -> bool:
    """Whether the kernel check's products are exact, for one row and for several.

    One row and several have different kernels. If a kernel is not exact, sums of large products
    saturate, and answers differ from those of exact kernels.

    Args:
        run: runs the kernel check: rows uint8 (num_rows, NUM_INPUTS), minus ZERO_POINT, times
            weights that are all LARGEST_WEIGHT.
    """
    largest = 255
    for num_rows in (1, 16):
        products = run(np.full((num_rows, NUM_INPUTS), largest, np.uint8))
        if not np.all(products == (largest - ZERO_POINT) * LARGEST_WEIGHT * NUM_INPUTS):
            return False
    return True
