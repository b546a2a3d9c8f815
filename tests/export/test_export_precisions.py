"""Lower precisions of many architectures: int8 keeps answers apart to the last bit."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from maskdial.bundle import Manifest
from maskdial_export.export import export
from maskdial_export.quality import Gate

Export = Callable[..., Manifest]
INT8 = (
    "bert",
    "modernbert",
    "albert",
    "distilbert",
    "deberta-v2",
    "gpt2",
    "opt",
    "llama",
    "qwen3",
    "gemma2",
)

# Their output layer has weights of its own
UNTIED = ("qwen3",)


@pytest.fixture
def export_as(checkpoint: Callable[[str], Path], tmp_path: Path) -> Export:
    """Exports a tiny random checkpoint, whatever its quality is."""

    def run(name: str, precision: str, **settings: bool) -> Manifest:
        gate = Gate(max_loss=math.inf, **settings)
        return export(str(checkpoint(name)), tmp_path / precision, precision=precision, gate=gate)

    return run


def tables(bundle: Path) -> list[NDArray[Any]]:
    """What a graph stores of all 101 tokens, scales and biases apart."""
    constants = ir.load(bundle / "model.onnx").graph.initializers.values()
    arrays = [value.const_value.numpy() for value in constants]
    return [
        array for array in arrays if array.ndim == 2 and 101 in array.shape and array.size > 101
    ]


@pytest.mark.parametrize("name", INT8)
def test_int8_rows_ignore_their_company(export_as: Export, name: str, tmp_path: Path) -> None:
    manifest = export_as(name, "int8", calibrate=name in ("bert", "llama"))
    assert manifest.precision == "int8"
    assert manifest.batch_invariant
    num_tables = 2 if name in UNTIED else 1
    assert [array.dtype for array in tables(tmp_path / "int8")] == [np.int8] * num_tables


def test_int4_rows_do_not(export_as: Export) -> None:
    assert not export_as("llama", "int4").batch_invariant


def test_fp16_has_a_cache_of_its_own(export_as: Export) -> None:
    manifest = export_as("llama", "fp16")
    assert manifest.kv is not None
    assert manifest.kv.dtype == "float16"
    assert manifest.quality is not None
    assert abs(manifest.quality.loss) < 1e-3
