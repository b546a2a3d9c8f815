"""The types of GGUF tensors: how many values a block holds, and in how many bytes.

Numbers and sizes are those of ggml (``ggml.h``, ``ggml-common.h``).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """A row consists of blocks of ``block_size`` values in ``num_bytes`` bytes each."""

    number: int
    name: str
    block_size: int
    num_bytes: int


TYPES: Mapping[int, TensorType] = {
    each.number: each
    for each in (
        TensorType(0, "F32", 1, 4),
        TensorType(1, "F16", 1, 2),
        TensorType(2, "Q4_0", 32, 18),
        TensorType(3, "Q4_1", 32, 20),
        TensorType(6, "Q5_0", 32, 22),
        TensorType(7, "Q5_1", 32, 24),
        TensorType(8, "Q8_0", 32, 34),
        TensorType(10, "Q2_K", 256, 84),
        TensorType(11, "Q3_K", 256, 110),
        TensorType(12, "Q4_K", 256, 144),
        TensorType(13, "Q5_K", 256, 176),
        TensorType(14, "Q6_K", 256, 210),
        TensorType(16, "IQ2_XXS", 256, 66),
        TensorType(17, "IQ2_XS", 256, 74),
        TensorType(18, "IQ3_XXS", 256, 98),
        TensorType(19, "IQ1_S", 256, 50),
        TensorType(20, "IQ4_NL", 32, 18),
        TensorType(21, "IQ3_S", 256, 110),
        TensorType(22, "IQ2_S", 256, 82),
        TensorType(23, "IQ4_XS", 256, 136),
        TensorType(29, "IQ1_M", 256, 56),
        TensorType(30, "BF16", 1, 2),
        TensorType(34, "TQ1_0", 256, 54),
        TensorType(35, "TQ2_0", 256, 66),
        TensorType(39, "MXFP4", 32, 17),
    )
}
"""By the number in the file. Types of integers and of activations hold no weights."""

OTHER_TYPES: Mapping[int, str] = {9: "Q8_1", 15: "Q8_K", 28: "F64", 40: "NVFP4", 41: "Q1_0"}
"""Names of types that are not supported; NVFP4 has scales in tensors of their own."""

TYPES_BY_NAME: Mapping[str, TensorType] = {each.name: each for each in TYPES.values()}
