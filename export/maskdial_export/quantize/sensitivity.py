"""Sensitivity: the error that quantizing each layer causes."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from maskdial_export.phase import Progress, silent
from maskdial_export.quantize.blocks import BYTE_BLOCK, to_bytes
from maskdial_export.quantize.int4 import INT4, Int4, to_blocks
from maskdial_export.quantize.observe import Observation, observe_layers
from maskdial_export.quantize.quantize import IntegerPrecision
from maskdial_export.session import Ids

_TINY = 1e-30
_ROWS = 256  # compared at once: an output layer has many columns


def layer_errors(
    model: PreTrainedModel,
    names: Sequence[str],
    texts: Sequence[Ids],
    precision: IntegerPrecision,
    show: Progress = silent,
) -> dict[str, float]:
    """The relative error of each layer that the model calls. Runs torch over the texts once.

    Every layer gets its fp32 input, so errors do not accumulate and each layer is judged by its
    own. It is the mean, over rows, of the squared error of the row's output relative to that
    output: in sums over rows a first token, whose activations may be a thousand times as large as
    those of the others, would count alone.

    Args:
        model: the fp32 model.
        names: projections, and the embedding, whose rows are int8.
        texts: token ids, (length,) each.
        precision: what to quantize to.
        show: shows the progress.
    """
    observed = observe_layers(model, names, texts, show)
    errors: dict[str, float] = {}
    with torch.no_grad():
        for index, name in enumerate(list(observed)):
            show(index, len(errors) + len(observed), "layers")
            errors[name] = _compare(observed.pop(name), precision)
    return errors


def _compare(seen: Observation, precision: IntegerPrecision) -> float:
    read = torch.cat(seen.parts)
    if isinstance(seen.module, nn.Embedding):
        return float(_relative(int8_rows(read), read).mean())
    of_rows, of_weight = ROUNDINGS[precision]
    weight = input_major(seen.module)
    quantized = of_weight(weight)
    parts = read.chunk(-(-len(read) // _ROWS))
    return float(
        torch.cat([_relative(of_rows(rows) @ quantized, rows @ weight) for rows in parts]).mean()
    )


def _relative(rounded: Tensor, exact: Tensor) -> Tensor:
    """The squared error of each row, relative to the row."""
    energy = exact.square().sum(dim=1).clamp_min(_TINY)
    return (rounded - exact).square().sum(dim=1) / energy


def rank(errors: Mapping[str, float]) -> list[str]:
    """The names of layers, worst first."""
    return sorted(errors, key=errors.__getitem__, reverse=True)


def input_major(module: nn.Module) -> Tensor:
    """A projection's weight as (inputs, outputs)."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    return weight if isinstance(module, Conv1D) else weight.T


def int8_rows(rows: Tensor) -> Tensor:
    """Embeddings (num_rows, columns) rounded to int8, one scale per row."""
    return _round(rows, rows.abs().amax(dim=1, keepdim=True) / 127)


def int8_weight(weight: Tensor) -> Tensor:
    """A weight (inputs, outputs) rounded to int8 in blocks, each one to the nearest integer."""
    return torch.from_numpy(to_bytes(weight.numpy()).weight())


def int8_blocks(rows: Tensor) -> Tensor:
    """Activations (num_rows, inputs) rounded to int8, one scale per block of a row."""
    size = BYTE_BLOCK
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


ROUNDINGS: Mapping[
    IntegerPrecision, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
] = {
    "int8": (int8_blocks, int8_weight),
    "int4": (int8_blocks, partial(int4_weight, INT4["int4"])),
    "int4-fp16": (half_rows, partial(int4_weight, INT4["int4-fp16"])),
}
