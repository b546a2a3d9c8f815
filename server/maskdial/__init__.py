"""maskdial: an inference server for masked and causal language models.

`Model` and `AsyncModel` run one in this process, without a server.
"""

import importlib
import os
from typing import Any

__version__ = "0.3.0"

# ONNX Runtime reports its use to its makers by default; what a server does is its operator's
# business. Read when the library is first used, so an operator can still set it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_LAZY = ("AsyncModel", "Model")


def __getattr__(name: str) -> Any:
    """The classes that need ONNX Runtime, which most commands do without."""
    if name in _LAZY:
        return getattr(importlib.import_module("maskdial.local.model"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
