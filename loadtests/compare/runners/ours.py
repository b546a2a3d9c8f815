"""Our bundles: made once of each checkpoint, by the exporter as it is now."""

import math
import shutil
from pathlib import Path

from loadtests.checkpoints import causal_checkpoint, masked_checkpoint
from loadtests.compare.setup import MAX_BATCH, Setup

MODEL = "model"


def prepare(setup: Setup) -> None:
    """Builds the checkpoint, and the bundle of it; bundles of other exporters are removed."""
    build = causal_checkpoint if setup.family == "causal" else masked_checkpoint
    build(setup.checkpoint, setup.seed)
    from maskdial_export.export import export
    from maskdial_export.quality import Gate

    # Random weights have no quality to lose, and none is asked of them.
    gate = None if setup.precision == "fp32" else Gate(max_loss=math.inf, keep_worst=0)
    export(str(setup.checkpoint), setup.bundle, precision=setup.precision, gate=gate)
    for bundle in setup.bundle.parent.glob(setup.cached(f"bundle-{setup.precision}-*").name):
        if bundle != setup.bundle:
            shutil.rmtree(bundle)


def settings(setup: Setup) -> dict[str, int]:
    """The server's settings that are not its defaults."""
    return {"threads": setup.threads, "slots": MAX_BATCH}


def models(setup: Setup) -> dict[str, Path]:
    return {MODEL: setup.bundle}
