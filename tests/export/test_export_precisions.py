"""Lower precisions of many architectures: int8 keeps answers apart to the last bit."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

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
    "llama",
    "qwen3",
    "gemma2",
)


@pytest.fixture
def export_as(checkpoint: Callable[[str], Path], tmp_path: Path) -> Export:
    """Exports a tiny random checkpoint, whatever its quality is."""

    def run(name: str, precision: str, **settings: bool) -> Manifest:
        gate = Gate(max_loss=math.inf, **settings)
        return export(str(checkpoint(name)), tmp_path / precision, precision=precision, gate=gate)

    return run


@pytest.mark.parametrize("name", INT8)
def test_int8_rows_ignore_their_company(export_as: Export, name: str) -> None:
    manifest = export_as(name, "int8", calibrate=name in ("bert", "llama"))
    assert manifest.precision == "int8"
    assert manifest.batch_invariant


def test_int4_rows_do_not(export_as: Export) -> None:
    assert not export_as("llama", "int4").batch_invariant


def test_fp16_has_a_cache_of_its_own(export_as: Export) -> None:
    manifest = export_as("llama", "fp16")
    assert manifest.kv is not None
    assert manifest.kv.dtype == "float16"
    assert manifest.quality is not None
    assert abs(manifest.quality.loss) < 1e-3
