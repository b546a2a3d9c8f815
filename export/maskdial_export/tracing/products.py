"""Linear layers for modules that multiply by plain parameters.

The graph names each product by its layer, and its quantized weight by that name, so no two products
may have the same one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def with_products(module: Any, products: nn.Module) -> Iterator[None]:
    """Gives a module the layers ``products`` inside the block."""
    module.products = products
    try:
        yield
    finally:
        del module.products


def linear(weight: Tensor) -> nn.Linear:
    """A layer that multiplies by a weight, (inputs, outputs), of which it makes no copy."""
    layer = nn.Linear(weight.shape[0], weight.shape[1], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.data.T, requires_grad=False)
    return layer
