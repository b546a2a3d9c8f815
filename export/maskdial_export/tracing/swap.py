"""Swaps a model's attention and experts while it is surveyed or traced.

transformers models look up their attention function by name (``AttentionInterface``), so the
model's own code runs around ours. No mask function goes with it, so models build no mask tensors:
the operators mask by the lengths.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from maskdial_export.tracing import experts, handwritten
from maskdial_export.tracing.llama4 import expert_by_expert
from maskdial_export.tracing.sparsity import quantiles_computed

_NAME = "maskdial"


@contextmanager
def swapped(
    model: PreTrainedModel, attention: Callable[..., tuple[Tensor, None]]
) -> Iterator[None]:
    """Lets the model attend through ``attention``, and compute the chosen experts, in the block."""
    AttentionInterface.register(_NAME, attention)
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = _NAME
    try:
        with (
            handwritten.interfaced(model, attention),
            experts.chosen_computed(model),
            expert_by_expert(model),
            quantiles_computed(model),
        ):
            yield
    finally:
        config._attn_implementation = before
