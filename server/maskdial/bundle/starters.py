"""The starter models: small bundles that come with the installation."""

from pathlib import Path

import maskdial
from maskdial.bundle.manifest import MANIFEST

STARTER_FOLDER = Path(maskdial.__file__).parent / "starter"


def starters() -> dict[str, Path]:
    """Those that are installed, by name."""
    paths = sorted(STARTER_FOLDER.glob(f"*/{MANIFEST}"))
    return {path.parent.name: path.parent for path in paths}
