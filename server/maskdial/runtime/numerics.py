"""The numerics version: two servers with the same one answer with the same bits."""

import onnxruntime as ort

NUMERICS = 1
"""Goes up whenever bits of answers change, by our kernels, by tasks, or by samplers."""

_FUSED = frozenset({"avx2", "avxvnni", "avx512vnni", "amx"})
"""Instruction sets of processors that multiply and add in one rounding, as ONNX Runtime's and
NumPy's functions then do alike."""


def numerics_version(kernels: str) -> str:
    """That of a model on a CPU, whose bits then depend on nothing else of the processor.

    Our kernels have the same bits on all instruction sets. What ONNX Runtime and NumPy add to them
    was found to be equal on x86-64 with AVX2 or AVX-512, and other without (docs/kernels.md).

    Args:
        kernels: the instruction set of our kernels; empty if the model does not use them.

    Returns:
        The version; empty where equal bits are not promised: on GPUs, on Arm, without AVX2, and
        without the kernels.
    """
    return f"{NUMERICS}-onnxruntime-{ort.__version__}" if kernels in _FUSED else ""
