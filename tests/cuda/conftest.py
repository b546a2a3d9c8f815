"""CUDA on a real GPU; every test here is skipped where there is none."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from maskdial.errors import ConfigError
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.runtime.cuda import check_device
from maskdial.runtime.providers.cuda import PROVIDER
from tests.conftest import MakeOnce

MAX_LENGTH = 512


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    if not PROVIDER.in_build():
        pytest.skip("this ONNX Runtime has no CUDA provider")
    try:
        check_device()
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def checkpoint(torch: ModuleType, made_once: MakeOnce) -> Path:
    """The starter `hybrid` as transformers reads it, in float32."""
    from training import hybrid
    from training.settings import Shape
    from training.shipped import read_tokenizer

    def make(folder: Path) -> None:
        starter = STARTER_FOLDER / "hybrid"
        tokenizer = read_tokenizer(starter, MAX_LENGTH)
        model = hybrid.build_model(tokenizer, Shape(vocabulary=len(tokenizer)))
        hybrid.restore(model, starter)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return made_once("checkpoints/starter", make)


@pytest.fixture(scope="session")
def exported(checkpoint: Path, made_once: MakeOnce) -> Callable[[str], Path]:
    """The bundle of `checkpoint` in a precision, under both masks."""

    def get(precision: str) -> Path:
        from maskdial_export.export import export
        from maskdial_export.quantize.gate import Gate

        def make(folder: Path) -> None:
            # The weights were int8 once; rounded to int4, they lose more than an export allows.
            gate = Gate(max_loss=0.2) if precision == "int4-fp16" else None
            export(str(checkpoint), folder, precision=precision, mask="both", gate=gate)

        return made_once(f"bundles/starter-{precision}", make)

    return get
