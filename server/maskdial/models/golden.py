"""The golden check: does this machine compute what the exporting machine computed?

Providers differ, and int8 kernels saturate on some CPUs. So a bundle carries one short input with
its logits, which are compared when the model is loaded. An int8 bundle also carries a product of
the largest numbers: a kernel that saturates may change one text little and another one a lot.
"""

import numpy as np
from numpy.typing import NDArray

from maskdial.models.bundle import Bundle, GoldenCheck
from maskdial.runtime.session import Session

_KERNEL_INPUTS = 64


def golden_drift(golden: GoldenCheck, logits: NDArray[np.float32]) -> float:
    """The largest absolute difference between recorded and computed logits.

    ``logits`` is the checked row, float32 (vocab_size,) or (num_labels,).
    """
    computed = logits[list(golden.columns)].astype(np.float64)
    return float(np.abs(computed - np.asarray(golden.logits)).max())


def multiplies_exactly(kernel_check: Session) -> bool:
    """Whether 8-bit products are exact on this machine, for one row and for several.

    One row and several have different kernels. If a kernel is not exact, sums of large products
    saturate, and answers differ from those at export.
    """
    largest, zero_point = 255, 128
    for num_rows in (1, 16):
        rows = np.full((num_rows, _KERNEL_INPUTS), largest, np.uint8)
        products = kernel_check.run({"rows": rows})
        if not np.all(products == (largest - zero_point) * 127 * _KERNEL_INPUTS):
            return False
    return True


def kernel_message(bundle: Bundle) -> str:
    """The message about kernels that are not exact."""
    return (
        f"model {bundle.name!r} is int8, and 8-bit products saturate on this processor (it has no "
        f"VNNI instructions), so answers are worse than at export; export the model with "
        f"--reduce-range, or serve it anyway with --golden-check warn"
    )


def drift_message(bundle: Bundle, drift: float) -> str:
    """The message about a drift beyond the tolerance."""
    return (
        f"model {bundle.name!r}: logits on this machine differ by {drift:.2g} from those at export "
        f"(tolerance {bundle.manifest.golden.tolerance:.2g}); export the model on this machine, or "
        f"serve it anyway with --golden-check warn"
    )
