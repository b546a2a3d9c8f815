"""Our bundles: made once of each shape, by the exporter as it is now."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtests.checkpoints import build_checkpoint
from loadtests.compare.setup import HALF, Setup
from loadtests.compare.shapes import TINY

MODEL = "model"


def prepare(setup: Setup) -> None:
    """Builds the checkpoint, and the bundle of it; bundles of other exporters are removed."""
    from maskdial.models.bundle import read_manifests

    if setup.precision in HALF:
        from loadtests.compare.bundles import write_half

        build_checkpoint(
            setup.checkpoint, setup.model.config, setup.seed, weights=setup.provider == "cpu"
        )
        checked = replace(
            setup, shape=TINY[setup.model.family].name, precision="fp32", provider="cpu"
        )
        if not checked.bundle.exists():
            _export(checked)
        (tiny,) = read_manifests(checked.shape, checked.bundle)
        write_half(setup, tiny)
    else:
        _export(setup)
    for bundle in setup.bundles():
        if bundle != setup.bundle:
            shutil.rmtree(bundle)


def _export(setup: Setup) -> None:
    from maskdial_export.export import export
    from maskdial_export.quality import Gate

    build_checkpoint(setup.checkpoint, setup.model.config, setup.seed)
    # Random weights have no quality to lose, and none is asked of them.
    gate = None if setup.precision == "fp32" else Gate(max_loss=math.inf, keep_worst=0)
    export(str(setup.checkpoint), setup.bundle, precision=setup.precision, gate=gate)


def settings(setup: Setup) -> dict[str, Any]:
    """The server's settings that are not its defaults."""
    return {
        "provider": setup.provider,
        "threads": setup.threads,
        "slots": setup.room.batch,
        "max_context": setup.room.context,
    }


def models(setup: Setup) -> dict[str, Path]:
    return {MODEL: setup.bundle}
