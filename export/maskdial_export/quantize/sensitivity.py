"""Sensitivity: the error that quantizing each layer causes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from maskdial_export.phase import Progress, silent
from maskdial_export.quantize.int4 import INT4, Int4, to_blocks
from maskdial_export.quantize.observe import Observation, observe_layers
from maskdial_export.quantize.quantize import Precision
from maskdial_export.session import Ids

HEADROOM = 1.1  # other texts reach further than the sample; larger values are clipped
_TINY = 1e-30
_ROWS = 256  # compared at once: an output layer has many columns


@dataclass(frozen=True, slots=True)
class Errors:
    """What quantizing a layer does to its output on some rows, as sums of squares.

    Attributes:
        peak: the largest magnitude that it reads.
        energy: of the output.
        rounded: the error with scales as the precision has them: int8 has one for each row.
        fixed: int8: the error with one scale for all rows, up to ``HEADROOM`` times the peak. None
            of an embedding, and of other precisions.
    """

    peak: float
    energy: float
    rounded: float
    fixed: float | None


def layer_errors(
    model: PreTrainedModel,
    names: Sequence[str],
    texts: Sequence[Ids],
    precision: Precision,
    show: Progress = silent,
) -> dict[str, Errors]:
    """The errors of each layer that the model calls. Runs torch over the texts once.

    Every layer gets its fp32 input, so errors do not accumulate and each layer is judged by its
    own.

    Args:
        model: the fp32 model.
        names: projections, and the embedding, whose rows are int8.
        texts: token ids, (length,) each.
        precision: what to quantize to.
        show: shows the progress.
    """
    observed = observe_layers(model, names, texts, show)
    errors: dict[str, Errors] = {}
    with torch.no_grad():
        for index, name in enumerate(list(observed)):
            show(index, len(errors) + len(observed), "layers")
            errors[name] = _compare(observed.pop(name), precision)
    return errors


def _compare(seen: Observation, precision: Precision) -> Errors:
    if isinstance(seen.module, nn.Embedding):
        energy = sum(_energy(rows) for rows in seen.parts)
        return Errors(
            seen.peak, energy, sum(_energy(int8_rows(rows) - rows) for rows in seen.parts), None
        )
    of_rows, of_weight = ROUNDINGS[precision]
    weight = input_major(seen.module)
    quantized = of_weight(weight)
    energy = rounded = fixed = 0.0
    read = torch.cat(seen.parts)
    for rows in read.chunk(-(-len(read) // _ROWS)):
        exact = rows @ weight
        energy += _energy(exact)
        rounded += _energy(of_rows(rows) @ quantized - exact)
        if precision == "int8" and seen.peak > 0:
            fixed += _energy(int8_steps(rows, HEADROOM * seen.peak) @ quantized - exact)
    return Errors(seen.peak, energy, rounded, fixed if precision == "int8" else None)


def _energy(values: Tensor) -> float:
    return float(values.square().sum())


def rank(errors: Mapping[str, Errors]) -> list[str]:
    """The names of layers, worst first, by the relative squared error of their output."""

    def relative(name: str) -> float:
        return errors[name].rounded / max(errors[name].energy, _TINY)

    return sorted(errors, key=relative, reverse=True)


def input_major(module: nn.Module) -> Tensor:
    """A projection's weight as (inputs, outputs)."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight if isinstance(module, Conv1D) else weight.T


def int8_rows(rows: Tensor) -> Tensor:
    """Activations or embeddings (num_rows, inputs) rounded to int8, one scale per row."""
    return _round(rows, rows.abs().amax(dim=1, keepdim=True) / 127)


def int8_steps(rows: Tensor, largest: float) -> Tensor:
    """Activations rounded to int8 with a fixed scale; larger values are clipped."""
    step = largest / 127
    return (rows / step).round().clamp(-128, 127) * step


def int8_weight(weight: Tensor) -> Tensor:
    """A weight (inputs, outputs) rounded to int8, one scale per output."""
    return _round(weight, weight.abs().amax(dim=0, keepdim=True) / 127)


def int8_blocks(rows: Tensor) -> Tensor:
    """Activations (num_rows, inputs) rounded to int8, one scale per block of a row."""
    size = INT4["int4"].block_size
    padded = nn.functional.pad(rows, (0, -rows.shape[1] % size))
    blocks = padded.reshape(len(rows), -1, size)
    rounded = _round(blocks, blocks.abs().amax(dim=2, keepdim=True) / 127)
    return rounded.flatten(1)[:, : rows.shape[1]]


def half_rows(rows: Tensor) -> Tensor:
    """Activations rounded to float16."""
    return rows.half().float()


def int4_weight(kind: Int4, weight: Tensor) -> Tensor:
    """A weight (inputs, outputs) rounded to int4, each one to the nearest integer."""
    return torch.from_numpy(to_blocks(weight.numpy(), kind).weight())


def _round(values: Tensor, step: Tensor) -> Tensor:
    step = step.clamp_min(_TINY)
    return (values / step).round() * step


ROUNDINGS: Mapping[Precision, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "int8": (int8_rows, int8_weight),
    "int4": (int8_blocks, partial(int4_weight, INT4["int4"])),
    "int4-fp16": (half_rows, partial(int4_weight, INT4["int4-fp16"])),
}
