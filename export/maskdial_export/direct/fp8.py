"""Checkpoints in fp8, as DeepSeek 3's: float8 (E4M3) with a factor per block of a matrix, or one.

Weights are what `maskdial_export.checkpoint.dequantize` makes of them: the float times its factor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial_export.direct.config import Config
from maskdial_export.direct.decoder import Floats
from maskdial_export.errors import ExportError

DTYPE = "F8_E4M3"
_FACTOR = "weight_scale_inv"
_OF_INPUTS = ("activation_scale", "input_scale")
"""Factors of what kernels in fp8 round their inputs by; here inputs are floats."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """``block``: rows and columns that have a factor; None: a matrix has one."""

    block: tuple[int, int] | None

    def restore(self, name: str, codes: NDArray[np.uint8], factors: Floats, first: int) -> Floats:
        """Rows of a matrix in float32, from the row ``first`` on.

        Raises:
            ExportError: there are not as many factors as blocks.
        """
        values = _VALUES[codes]
        if factors.size == 1:
            found: Floats = values * factors.reshape(())
            return found
        height, width = self.block or (0, 0)
        rows = (first + np.arange(len(codes))) // height if height else np.zeros(0, np.int64)
        columns = -(-codes.shape[-1] // width) if width else 0
        if codes.ndim != 2 or not len(rows) or factors.shape[1:] != (columns,):
            raise _wrong(name, factors)
        if rows[-1] >= len(factors):
            raise _wrong(name, factors)
        spread = np.repeat(factors[rows], width, axis=1)
        return values * spread[:, : codes.shape[1]]


def read_fp8(config: Mapping[str, Any]) -> Fp8 | None:
    """How the weights of a configuration are stored; None if they are not in fp8.

    Raises:
        NotDirectError: its settings are not known.
    """
    stored = config.get("quantization_config")
    if not isinstance(stored, dict) or stored.get("quant_method") != "fp8":
        return None
    settings = Config(stored, "quantization_config.")
    settings.expect(quant_method="fp8", fmt="e4m3", expert_dtype="fp8", dequantize=False)
    settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    settings.take("modules_to_not_convert")  # the tensors say which they are
    block = settings.take("weight_block_size")
    settings.finish()
    if block is None:
        return Fp8(None)
    if not isinstance(block, list) or len(block) != 2 or min(map(_positive, block)) < 1:
        settings.refuse("weight_block_size")
    return Fp8((block[0], block[1]))


def _positive(size: object) -> int:
    return size if type(size) is int else 0


def factor_of(name: str) -> str:
    """The tensor with the factors of a weight."""
    return f"{name.removesuffix('weight')}{_FACTOR}"


def is_beside(name: str) -> bool:
    """Whether a tensor is none of the model's: it has factors."""
    return name.rpartition(".")[2] in (_FACTOR, *_OF_INPUTS)


def _wrong(name: str, factors: Floats) -> ExportError:
    return ExportError(
        f"{name} is damaged, or its blocks are others than config.json says: it has factors of the "
        f"shape {factors.shape}"
    )


def _table() -> Floats:
    """The floats of all bytes: a sign, 4 bits of exponent, 3 of mantissa (arXiv:2209.05433)."""
    codes = np.arange(256)
    exponents, mantissas = (codes >> 3) & 15, codes & 7
    normal = (8 + mantissas) * np.exp2(exponents - 10.0)
    values = np.where(exponents == 0, mantissas * np.exp2(-9.0), normal)
    values = np.where(codes & 127 == 127, np.nan, values)
    return np.where(codes > 127, -values, values).astype(np.float32)


_VALUES = _table()
