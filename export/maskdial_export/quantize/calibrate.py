"""Calibration: finds projections whose input rows can share one fixed int8 scale."""

from collections.abc import Mapping

from maskdial_export.quantize.sensitivity import HEADROOM, Errors

# A scale per row is the most accurate. A fixed scale may have ten times its squared error (10 dB).
# On four trained models (three small ones, all-MiniLM-L6-v2) 25, 31, 25 and 29 inputs qualify, at a
# loss of 0 to 0.5%. At 3 times the error only 5, 6, 11 and 1 do; at 100 times all-MiniLM-L6-v2
# loses more than 1%.
_MAX_ERROR = 10.0


def calibrate(errors: Mapping[str, Errors]) -> dict[str, float]:
    """The largest input magnitude of each projection whose input can have a fixed scale.

    The error of its output is compared with that of a scale per row. Inputs that come from a norm
    usually qualify.
    """
    return {
        name: HEADROOM * each.peak
        for name, each in errors.items()
        if each.fixed is not None and each.peak > 0 and each.fixed <= _MAX_ERROR * each.rounded
    }
