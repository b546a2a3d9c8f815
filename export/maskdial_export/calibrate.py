"""Calibration: which projections read rows that one scale fits as well as a scale for each."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.sensitivity import input_major, int8_rows, int8_steps, int8_weight
from maskdial_export.session import Ids

_ROWS = 64  # of each text, evenly spread, to compare errors on
_HEADROOM = 1.1  # texts that were not seen reach further; beyond it, values are cut
# A scale of its own fits each row best. One scale for all may have ten times its error, 10 dB.
# Measured on four trained models (the former starters, all-MiniLM-L6-v2): 25, 31, 25 and 29 inputs
# qualify, at a loss of 0 to 0.5%. At 3 times the error 5, 6, 11 and 1 do, and at 100 times
# all-MiniLM-L6-v2 loses more than 1%.
_MOST_ERROR = 10.0


def calibrate(
    model: PreTrainedModel, names: Sequence[str], texts: Sequence[Ids]
) -> dict[str, float]:
    """The largest magnitude to provide for, of projections whose input may have one scale.

    Two passes of torch over the texts: what the inputs reach, then the error of each projection's
    output with one scale and with a scale for each row. What comes from a norm qualifies, mostly.
    """
    peaks: dict[str, float] = defaultdict(float)

    def measure(name: str, _module: nn.Module, rows: Tensor) -> None:
        peaks[name] = max(peaks[name], float(rows.abs().max()))

    with _watched(model, names, measure):
        _read(model, texts)
    ranges = {name: _HEADROOM * peak for name, peak in peaks.items() if peak > 0}
    fixed: dict[str, float] = defaultdict(float)
    per_row: dict[str, float] = defaultdict(float)

    def compare(name: str, module: nn.Module, rows: Tensor) -> None:
        rows = rows[:: -(-len(rows) // _ROWS)]
        weight = input_major(module)
        exact, rounded = rows @ weight, int8_weight(weight)
        fixed[name] += float((int8_steps(rows, ranges[name]) @ rounded - exact).square().sum())
        per_row[name] += float((int8_rows(rows) @ rounded - exact).square().sum())

    with _watched(model, list(ranges), compare):
        _read(model, texts)
    return {
        name: largest
        for name, largest in ranges.items()
        if fixed[name] <= _MOST_ERROR * per_row[name]
    }


def _read(model: PreTrainedModel, texts: Sequence[Ids]) -> None:
    with torch.no_grad():
        for text in texts:
            model(input_ids=torch.from_numpy(text[None]))


@contextmanager
def _watched(
    model: PreTrainedModel, names: Sequence[str], watch: Callable[[str, nn.Module, Tensor], None]
) -> Iterator[None]:
    """Shows the modules' inputs, (num_rows, inputs), to ``watch``."""
    modules = dict(model.named_modules())

    def hook(name: str) -> Callable[..., None]:
        def show(module: nn.Module, arguments: tuple[Tensor, ...], _output: Tensor) -> None:
            watch(name, module, arguments[0].flatten(0, -2))

        return show

    handles = [modules[name].register_forward_hook(hook(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
