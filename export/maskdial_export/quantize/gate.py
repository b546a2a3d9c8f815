"""Gate: how much quality a lower precision may lose, and which layers keep the higher one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from maskdial_export.choices import MAX_LOSS, PRECISIONS
from maskdial_export.errors import ExportError

_OF_4_BITS = ("int4", "int4-fp16")
MIN_POSITIONS = 200
"""Decisions: with fewer, a single one that changes is half of the default maximum loss."""
FILE_LOSS = 0.05
"""What a file may lose by default, though nothing is rounded but what its integers multiply.
Trained language models lose a tenth of that."""


@dataclass(frozen=True, slots=True)
class Gate:
    """How much quality a lower precision may lose, and which layers keep the higher one.

    Attributes:
        text: the text file to measure on; None for the built-in sample.
        calibration_text: the text file to calibrate with; None for the built-in one, or ``text``.
        max_loss: 0.01 is one changed decision in a hundred, or a divergence of 0.01 nats from the
            distributions of a language model; infinity accepts any loss. None is 0.01, and 0.05
            for what is lost by rounding what the integers of a file are multiplied by.
        keep: patterns of module names that stay fp32 (int4-fp16: fp16).
        int8: patterns of module names that are int8 with int4.
        keep_worst: how many of the most sensitive layers to keep as well, or with int4 to have as
            int8; None for as few as ``max_loss`` needs.
        calibrate: whether int4 weights are rounded by what their layers read.
        tune: for int4 and int4-fp16, the minutes that scales are tuned for by distillation.
        reduce_range: whether int8 weights with one scale for an output have 7 bits, exact also on
            CPUs without VNNI. An export on such a CPU gives them 7 bits in any case.
    """

    text: Path | None = None
    calibration_text: Path | None = None
    max_loss: float | None = None
    keep: tuple[str, ...] = ()
    int8: tuple[str, ...] = ()
    keep_worst: int | None = None
    calibrate: bool = True
    tune: float | None = None
    reduce_range: bool = False

    @property
    def limit(self) -> float:
        """The loss that is allowed whatever loses it."""
        return MAX_LOSS if self.max_loss is None else self.max_loss

    def kept(self, names: Sequence[str]) -> list[str]:
        """The names that match a pattern of ``keep``.

        Raises:
            ExportError: a pattern matches no name.
        """
        return _matching("--keep", self.keep, names)

    def raised(self, names: Sequence[str]) -> list[str]:
        """The names that match a pattern of ``int8``.

        Raises:
            ExportError: a pattern matches no name.
        """
        return _matching("--int8", self.int8, names)


def check_choice(precision: str, gate: Gate) -> None:
    """Refuses an unknown precision, and options that do not apply to it.

    Raises:
        ExportError: one does not.
    """
    if precision not in PRECISIONS:
        raise ExportError(f"unknown precision {precision!r}; supported: {', '.join(PRECISIONS)}")
    if precision == "fp32" and replace(gate, text=None) != Gate():
        raise ExportError(
            "the quality options (--keep, --max-loss and others) do not apply to fp32; add "
            "--precision int8, int4 or int4-fp16"
        )
    if precision != "int4" and gate.int8:
        raise ExportError("--int8 names layers of a bundle of int4; add --precision int4")
    if precision != "int8" and gate.reduce_range:
        raise ExportError(
            "--reduce-range is for int8, whose weights may have one scale for a row; products in "
            f"blocks and floats do not saturate, so {precision} needs none"
        )
    if precision not in _OF_4_BITS and gate.tune is not None:
        raise ExportError(
            "--tune trains the scales of 4-bit weights; add --precision int4 or int4-fp16"
        )
    if precision == "fp16" and (gate.keep or gate.keep_worst):
        raise ExportError(
            "--keep and --keep-worst apply to int8, int4 and int4-fp16; fp16 converts every layer"
        )


def _matching(option: str, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            some = ", ".join(dict.fromkeys((names[0], names[len(names) // 2], names[-1])))
            raise ExportError(
                f"{option} {pattern} matches none of the {len(names)} layers; their names look "
                f"like {some}"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
