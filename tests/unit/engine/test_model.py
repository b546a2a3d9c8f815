"""What a model says of itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from maskdial.engine.model import Model


def model(kernels: str, quality: Any, *, measured: bool = True, provider: str = "cpu") -> Any:
    bundle: Any = SimpleNamespace(
        manifest=SimpleNamespace(batch_invariant=measured, quality=quality)
    )
    anything: Any = None
    return Model(bundle, anything, anything, provider, kernels=kernels)


IN_BLOCKS = SimpleNamespace(measured_with="kernels", by_row=False)


@pytest.mark.parametrize(
    ("kernels", "quality", "invariant"),
    [
        ("avx2", IN_BLOCKS, True),
        ("", IN_BLOCKS, False),
        ("", SimpleNamespace(measured_with="kernels", by_row=True), True),
        ("", SimpleNamespace(measured_with="onnxruntime", by_row=False), True),
        ("", None, True),
    ],
)
def test_batch_invariance_is_of_the_operators_that_it_was_measured_with(
    kernels: str, quality: Any, invariant: bool
) -> None:
    assert model(kernels, quality).batch_invariant is invariant
    assert not model(kernels, quality, measured=False).batch_invariant
    assert not model(kernels, quality, provider="cuda").batch_invariant
