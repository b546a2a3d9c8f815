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

    def restore(
        self, name: str, codes: NDArray[np.uint8], factors: Floats, first: int, num_rows: int
    ) -> Floats:
        """Rows of a matrix of ``num_rows`` in float32, from the row ``first`` on.

        Raises:
            ExportError: there are not as many factors as blocks.
        """
        values = _VALUES[codes]
        if factors.size == 1:
            found: Floats = values * factors.reshape(())
            return found
        if self.block is None or codes.ndim != 2:
            raise _wrong(name, factors)
        height, width = self.block
        if factors.shape != (-(-num_rows // height), -(-codes.shape[1] // width)):
            raise _wrong(name, factors)
        rows = (first + np.arange(len(codes))) // height
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


def weight_of(name: str) -> str | None:
    """The weight that a tensor has factors of; None if it has none."""
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if last in (_FACTOR, *_OF_INPUTS) else None


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
