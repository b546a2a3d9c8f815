"""Calibration: finds projections whose input rows can share one fixed int8 scale."""

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.observe import observe_layers, some_rows
from maskdial_export.sensitivity import input_major, int8_rows, int8_steps, int8_weight
from maskdial_export.session import Ids

_HEADROOM = 1.1  # other texts reach further than the sample; larger values are clipped
# A scale per row is the most accurate. A fixed scale may have ten times its squared error (10 dB).
# On four trained models (three small ones, all-MiniLM-L6-v2) 25, 31, 25 and 29 inputs qualify, at a
# loss of 0 to 0.5%. At 3 times the error only 5, 6, 11 and 1 do; at 100 times all-MiniLM-L6-v2
# loses more than 1%.
_MOST_ERROR = 10.0


def calibrate(
    model: PreTrainedModel, names: Sequence[str], texts: Sequence[Ids]
) -> dict[str, float]:
    """The largest input magnitude of each projection whose input can have a fixed scale.

    Runs torch over the texts twice: first to find the range of each input, then to compare the
    error of each projection's output with a fixed scale and with a scale per row. Inputs that come
    from a norm usually qualify.
    """
    peaks: dict[str, float] = defaultdict(float)

    def measure(name: str, _module: nn.Module, source: Tensor, _output: Tensor) -> None:
        peaks[name] = max(peaks[name], float(source.abs().max()))

    observe_layers(model, names, texts, measure)
    ranges = {name: _HEADROOM * peak for name, peak in peaks.items() if peak > 0}
    fixed: dict[str, float] = defaultdict(float)
    per_row: dict[str, float] = defaultdict(float)

    def compare(name: str, module: nn.Module, source: Tensor, _output: Tensor) -> None:
        rows, weight = some_rows(source), input_major(module)
        exact, rounded = rows @ weight, int8_weight(weight)
        fixed[name] += float((int8_steps(rows, ranges[name]) @ rounded - exact).square().sum())
        per_row[name] += float((int8_rows(rows) @ rounded - exact).square().sum())

    observe_layers(model, list(ranges), texts, compare)
    return {
        name: largest
        for name, largest in ranges.items()
        if fixed[name] <= _MOST_ERROR * per_row[name]
    }
