"""The golden check: does this machine compute what the exporting one did?

int8 kernels saturate on some CPUs and providers differ; a bundle carries one short input and its
logits, which are compared when the model loads. Where it is int8 it carries a product of the
largest numbers, too: a kernel that saturates may do little to one text and much to another.
"""

import numpy as np
from numpy.typing import NDArray

from maskdial.models.bundle import Bundle, GoldenCheck
from maskdial.runtime.session import Session

_KERNEL_INPUTS = 64


def golden_drift(golden: GoldenCheck, logits: NDArray[np.float32]) -> float:
    """The largest absolute difference between recorded and computed logits.

    ``logits`` is the checked row, float32 (vocab_size or num_labels,).
    """
    computed = logits[list(golden.columns)].astype(np.float64)
    return float(np.abs(computed - np.asarray(golden.logits)).max())


def multiplies_exactly(kernel_check: Session) -> bool:
    """Whether 8-bit products are exact here, for one row and for several, whose kernels differ.

    Where they are not, sums of large products saturate, and answers are others than the export's.
    """
    largest, zero_point = 255, 128
    for num_rows in (1, 16):
        rows = np.full((num_rows, _KERNEL_INPUTS), largest, np.uint8)
        products = kernel_check.run({"rows": rows})
        if not np.all(products == (largest - zero_point) * 127 * _KERNEL_INPUTS):
            return False
    return True


def kernel_message(bundle: Bundle) -> str:
    """What to tell the operator about kernels that are not exact."""
    return (
        f"model {bundle.name!r} is int8, and this processor's 8-bit products saturate (it has no "
        f"VNNI instructions), so its answers are worse here than they were at export; export it "
        f"with --reduce-range, or serve it all the same with --golden-check warn"
    )


def drift_message(bundle: Bundle, drift: float) -> str:
    """What to tell the operator about a drift beyond the tolerance."""
    return (
        f"model {bundle.name!r}: its logits on this machine differ by {drift:.2g} from those of "
        f"the export (tolerance {bundle.manifest.golden.tolerance:.2g}); export it here, or "
        f"serve it all the same with --golden-check warn"
    )
