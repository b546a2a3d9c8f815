"""Programs that torch's exporter need not trace a second time, and those that it has to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter import _fx_passes

from maskdial_export.tracing.graph import save, to_onnx_ir


class Computes(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


def cast(x: Tensor, y: Tensor) -> Tensor:
    return (x.to(torch.int64) & y.to(torch.int64)).to(x.device).float()


def cast_to_itself(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).float()


def reshape(x: Tensor, y: Tensor) -> Tensor:
    turned = (x + y).transpose(1, 2)
    joined = turned.contiguous().view(x.shape[0], -1)
    return joined + turned.reshape(x.shape[0], -1)


def divide(x: Tensor, y: Tensor) -> Tensor:
    first, second, third = x.chunk(3, dim=-1)
    return first * second.detach() + torch.min(third, y[..., :2]) + torch.max(first, third)


def add_in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x * 2
    z += y
    return z


def flatten_both(x: Tensor, y: Tensor) -> Tensor:
    return (x + y).flatten(0, 1)[: x.shape[0]]


def flatten_the_rest(x: Tensor, y: Tensor) -> Tensor:
    """Its sizes are two symbols."""
    return (x + y).flatten(1)


@pytest.mark.parametrize(
    ("function", "again"),
    [
        (cast, False),
        (cast_to_itself, False),
        (reshape, False),
        (divide, False),
        (flatten_both, False),
        (flatten_the_rest, True),
        (add_in_place, True),
    ],
)
def test_a_graph_computes_what_torch_does(
    function: Callable[[Tensor, Tensor], Tensor],
    again: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traced = []

    def decompose(*arguments: Any) -> Any:
        traced.append(arguments)
        return original(*arguments)

    original = _fx_passes.decompose_with_registry
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", decompose)
    module = Computes(function)
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length")
    sizes = {0: batch, 1: length}
    inputs = {"x": torch.ones(2, 3, 6), "y": torch.ones(2, 3, 6)}
    graph = to_onnx_ir(module, inputs, {"x": sizes, "y": sizes}, ["x", "y"], ["z"])
    assert bool(traced) == again
    save(graph, tmp_path / "model.onnx")
    session = ort.InferenceSession(tmp_path / "model.onnx")
    for shape in ((2, 3, 6), (1, 5, 6), (4, 1, 6)):
        given = {name: 9 * torch.randn(shape) for name in ("x", "y")}
        (found,) = session.run(None, {name: each.numpy() for name, each in given.items()})
        np.testing.assert_array_equal(found, module(**given).numpy())
