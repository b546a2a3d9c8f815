"""Gemma 3n's sparse activations: only the largest share of a token's values passes, by a cutoff.

The cutoff is a quantile of the normal distribution, which ONNX has no operator for. It depends on a
setting alone, so it is computed before the trace.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

_METHOD = "_gaussian_topk"


@contextmanager
def quantiles_computed(model: PreTrainedModel) -> Iterator[None]:
    """Lets the model use cutoffs that are computed already inside the block."""
    with ExitStack() as patches:
        for module in model.modules():
            if hasattr(module, _METHOD) and module.activation_sparsity:
                patches.enter_context(mock.patch.object(module, _METHOD, _cut(module)))
        yield


def _cut(module: Any) -> Callable[[Tensor], Tensor]:
    share = torch.tensor(module.activation_sparsity, dtype=torch.float32)
    normal: Any = torch.distributions.Normal(0, 1)
    deviations = float(normal.icdf(share))

    def cut(inputs: Tensor) -> Tensor:
        mean = inputs.mean(-1, keepdim=True)
        spread = inputs.std(-1, keepdim=True, unbiased=False)
        return nn.functional.relu(inputs - (mean + spread * deviations))

    return cut
