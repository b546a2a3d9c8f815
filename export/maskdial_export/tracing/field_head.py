"""The second graph of a GLiNER2 model, which reads a schema's fields, and its check with torch."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from maskdial_export.errors import ExportError
from maskdial_export.session import load_session
from maskdial_export.tracing.graph import to_onnx_ir

_SIZES = ((1, 1), (3, 4), (7, 2), (2, 70))  # fields, and occurrences or words


def trace(head: Any) -> ir.Model:
    """Traces a `CountHead` or `BoundaryHead`; `maskdial.bundle.bundle` documents their inputs and
    outputs.
    """
    inputs = head.example(_SIZES[1], torch.Generator().manual_seed(0))
    shapes: dict[str, Any] = {name: {0: torch.export.Dim.DYNAMIC} for name in inputs}
    return to_onnx_ir(head, inputs, shapes, list(inputs), [head.output])


def check(head: Any, graph: Path, tolerance: float) -> None:
    """Compares the graph with torch, as fp32's parity does.

    Raises:
        ExportError: they differ by more than the tolerance.
    """
    session = load_session(graph)
    generator = torch.Generator().manual_seed(0)
    for size in _SIZES:
        inputs = head.eval().example(size, generator)
        with torch.no_grad():
            expected = head(**inputs).numpy()
        (found,) = session.run(None, {name: each.numpy() for name, each in inputs.items()})
        difference = float(np.abs(expected - found).max())
        if not difference <= tolerance * max(1.0, float(np.abs(expected).max()) / 10):
            raise ExportError(
                f"ONNX Runtime and torch disagree on the {head.output} of {size[0]} fields: they "
                f"differ by up to {difference:.2g}"
            )
