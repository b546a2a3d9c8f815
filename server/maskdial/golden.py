"""The golden check: does this machine compute what the exporting one did?

int8 kernels saturate on some CPUs and providers differ; a bundle carries one short input and its
logits, which are compared when the model loads.
"""

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle import Bundle, GoldenCheck


def golden_drift(golden: GoldenCheck, logits: NDArray[np.float32]) -> float:
    """The largest absolute difference between recorded and computed logits.

    ``logits`` is the checked row, float32 (vocab_size or num_labels,).
    """
    computed = logits[list(golden.columns)].astype(np.float64)
    return float(np.abs(computed - np.asarray(golden.logits)).max())


def drift_message(bundle: Bundle, drift: float) -> str:
    """What to tell the operator about a drift beyond the tolerance."""
    return (
        f"model {bundle.name!r}: its logits on this machine differ by {drift:.2g} from those of "
        f"the export (tolerance {bundle.manifest.golden.tolerance:.2g}); export it here, or "
        f"serve it all the same with --golden-check warn"
    )
