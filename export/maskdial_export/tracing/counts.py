"""The graph that makes queries of a GLiNER2 task's fields, and its comparison with torch."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from maskdial_export.errors import ExportError
from maskdial_export.session import load_session
from maskdial_export.tracing.graph import to_onnx_ir

_SHAPES = ((1, 1), (3, 4), (7, 2))  # fields and occurrences


def trace(model: Any) -> ir.Model:
    """Traces a model's `CountHead`; `maskdial.bundle.bundle` documents inputs and output."""
    head = model.count_head
    inputs = {"fields": torch.zeros(3, head.positions.shape[1]), "steps": torch.arange(2)}
    dynamic = torch.export.Dim.DYNAMIC
    shapes: dict[str, Any] = {"fields": {0: dynamic}, "steps": {0: dynamic}}
    return to_onnx_ir(head, inputs, shapes, list(inputs), ["queries"])


def check(model: Any, graph: Path, tolerance: float) -> None:
    """Compares the graph with torch, as fp32's parity does.

    Raises:
        ExportError: they differ by more than the tolerance.
    """
    session = load_session(graph)
    head = model.count_head.eval()
    generator = torch.Generator().manual_seed(0)
    for num_fields, num_steps in _SHAPES:
        fields = torch.randn(num_fields, head.positions.shape[1], generator=generator)
        steps = torch.arange(num_steps)
        with torch.no_grad():
            expected = head(fields, steps).numpy()
        (found,) = session.run(None, {"fields": fields.numpy(), "steps": steps.numpy()})
        difference = float(np.abs(expected - found).max())
        if not difference <= tolerance * max(1.0, float(np.abs(expected).max()) / 10):
            raise ExportError(
                f"ONNX Runtime and torch disagree on the queries of {num_fields} fields: they "
                f"differ by up to {difference:.2g}"
            )
