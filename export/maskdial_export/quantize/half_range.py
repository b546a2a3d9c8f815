"""Whether a model's activations fit into float16."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.phase import Progress, silent
from maskdial_export.quantize.observe import read_text
from maskdial_export.session import Ids

LARGEST = 65_504.0
"""The largest number of float16."""


def peak(
    model: PreTrainedModel, texts: Sequence[Ids], show: Progress = silent
) -> tuple[str, float]:
    """The largest number that a module returns, or reads to multiply it; and the module's name.

    ONNX Runtime's CPU provider computes most of a float16 graph in float32, and may keep what lies
    between two operators so. On a GPU, all of it is rounded.

    Args:
        model: the fp32 model.
        texts: token ids, (length,) each.
        show: shows the progress.
    """
    largest = ("", 0.0)

    def watch(name: str, module: nn.Module) -> Any:
        def note(_module: nn.Module, read: tuple[Any, ...], output: Any) -> None:
            nonlocal largest
            values = output if isinstance(output, tuple) else (output,)
            if isinstance(getattr(module, "weight", None), Tensor):  # others may read masks
                values += read
            for value in values:
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                    found = float(value.abs().amax())
                    if found > largest[1]:
                        largest = name, found

        return module.register_forward_hook(note)

    handles = [watch(name, module) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            for index, text in enumerate(texts):
                show(index, len(texts), "texts")
                read_text(model, text)
    finally:
        for handle in handles:
            handle.remove()
    return largest
