"""The golden check: does this machine compute what the exporting machine computed?

Providers differ, and int8 kernels saturate on some CPUs. So a bundle carries one short input with
its logits, which are compared when the model is loaded. An int8 bundle also carries a product of
the largest numbers: a kernel that saturates may change one text little and another one a lot.
"""

import logging
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from maskdial.errors import BundleError
from maskdial.models.bundle import KERNEL_CHECK, Bundle, GoldenCheck
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

_log = logging.getLogger("maskdial.models")

_KERNEL_INPUTS = 64

Policy = Literal["error", "warn"]
"""What to do with a model that fails a check: refuse it, or log a warning."""


def check_kernels(bundle: Bundle, options: SessionOptions, policy: Policy) -> None:
    """Runs the kernel check, which int8 bundles have, with the provider's kernels.

    Raises:
        BundleError: products saturate, and the policy is to refuse such a model.
    """
    if KERNEL_CHECK not in bundle.manifest.files:
        return
    if not multiplies_exactly(Session(bundle.path / KERNEL_CHECK, options)):
        _complain(
            policy,
            f"model {bundle.name!r} is int8, and 8-bit products saturate on this processor (it has "
            "no VNNI instructions), so answers are worse than at export; export the model with "
            "--reduce-range, or serve it anyway with --golden-check warn",
        )


def check_golden(
    bundle: Bundle, run: Callable[[GoldenCheck], NDArray[np.float32]], policy: Policy
) -> None:
    """Computes the golden logits again and compares them with those of the export.

    Args:
        bundle: the model.
        run: computes the checked row, float32 (vocab_size,) or (num_labels,).
        policy: for logits that differ by more than the tolerance.

    Raises:
        BundleError: the model cannot run, or its logits differ and the policy is to refuse it.
    """
    golden = bundle.manifest.golden
    try:
        computed = run(golden)[list(golden.columns)].astype(np.float64)
        drift = float(np.abs(computed - np.asarray(golden.logits)).max())
    except Exception as error:  # whatever ONNX Runtime raises
        raise BundleError(f"model {bundle.name!r}: the golden check failed: {error}") from error
    if not drift <= golden.tolerance:  # also if it is NaN
        _complain(
            policy,
            f"model {bundle.name!r}: logits on this machine differ by {drift:.2g} from those at "
            f"export (tolerance {golden.tolerance:.2g}); export the model on this machine, or "
            "serve it anyway with --golden-check warn",
        )


def masked_logits(session: Session, golden: GoldenCheck) -> NDArray[np.float32]:
    """The checked row of a masked model."""
    length = len(golden.input_ids)
    feeds: dict[str, NDArray[Any]] = {
        "input_ids": np.array([golden.input_ids], np.int64),
        "lengths": np.array([length], np.int32),
        "token_type_ids": np.zeros((1, length), np.int64),
        "rows": np.array([golden.row], np.int64),
    }
    (logits,) = session.run(feeds)
    return np.asarray(logits)


def causal_logits(runner: Runner, golden: GoldenCheck) -> NDArray[np.float32]:
    """The checked row of a causal model, whose slot 0 is not in use."""
    logits = np.asarray(runner.prefill(0, np.array(golden.input_ids, np.int64), 0), np.float32)
    return logits.reshape(-1)


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


def _complain(policy: Policy, message: str) -> None:
    if policy == "error":
        raise BundleError(message)
    _log.warning("%s", message)
