"""The golden check of a manifest: the text, its logits, and how far another machine's may be."""

import itertools
from collections.abc import Sequence

import numpy as np

from maskdial.bundle.manifest import GoldenCheck
from maskdial_export.session import Floats

TEXT = "The door opened, and there stood the owner of the house."
_NUM_BEST, _NUM_SPREAD = 5, 11
# Another CPU rounds differently from the exporting one, so it gets more room than two libraries on
# the same CPU.
SLACK = 10.0
_QUANTIZED_SLACK = 4.0
_HALF_SLACK = 8.0


def golden_check(
    ids: Sequence[int],
    row: int,
    logits: Floats,
    tolerance: float,
    of_kernels: Floats | None = None,
    *,
    centered: bool = False,
) -> GoldenCheck:
    """The check: the largest logits and some spread over the rest.

    Args:
        ids: the tokens of the text.
        row: whose logits they are.
        logits: float32 (columns,).
        tolerance: how far those of another machine may be.
        of_kernels: those that the server's kernels compute, if they compute others.
        centered: whether the tolerance is that of logits less their mean.
    """
    best = np.argsort(-logits)[:_NUM_BEST]
    spread = np.linspace(0, len(logits) - 1, min(_NUM_SPREAD, len(logits)), dtype=np.int64)
    columns = np.union1d(best, spread)
    return GoldenCheck(
        input_ids=tuple(ids),
        row=row,
        columns=tuple(columns.tolist()),
        logits=tuple(logits[columns].tolist()),
        kernel_logits=None if of_kernels is None else tuple(of_kernels[columns].tolist()),
        centered=centered,
        tolerance=tolerance,
    )


def quantized_tolerance(
    before: Floats, computed: Sequence[Floats], fp32: float, *, centered: bool = False
) -> float:
    """How far a quantized graph's logits may drift on another machine; at least ``fp32``.

    ``centered``: less their mean. A shift of all logits is most of what differs in SmolLM2-135M's
    int8, where a tolerance that has room for it is 1.7 instead of 0.6; a missing layer moves
    logits by 3 or more.

    Four times the largest root mean square of the differences between what this machine computes:
    from fp32, and of the kernels from ONNX Runtime's operators. fp32's tolerance would be too
    narrow: where another CPU computes the last bits of a float differently, an activation now and
    then rounds to the other integer, and that tips more of them in later layers. In a deep model
    (seen in BERT-base) two correct machines differ as much as each differs from fp32. Saturating
    kernels can do less harm than that to one text; the kernel check finds them.
    """
    pairs = itertools.combinations([before, *computed], 2)
    measure = _deviation if centered else _root_mean_square
    return max(_QUANTIZED_SLACK * max(measure(a - b) for a, b in pairs), fp32)


def half_tolerance(exact: Floats, halves: Sequence[Floats], fp32: float) -> float:
    """How far a float16 graph's logits may drift on another provider; at least ``fp32``.

    Eight times the root mean square of the change by float16, the largest of ``halves`` (the logits
    of float16 on this machine), and at least two float16 steps at the largest logit. Kernels sum in
    different orders and round at different places: on the CPU, ONNX Runtime computes much in
    float32 and is closer to fp32 than torch is. Measured on 17 models of 0.1M to 135M parameters
    with 24 texts each: torch's float16 differs from ONNX Runtime's by up to 4.4 times the average
    difference of either from fp32.
    """
    change = max(_root_mean_square(half - exact) for half in halves)
    step = np.spacing(np.abs(exact).max().astype(np.float16))
    return max(_HALF_SLACK * change, 2 * float(step), fp32)


def _deviation(values: Floats) -> float:
    return float(np.std(values, dtype=np.float64))


def _root_mean_square(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
