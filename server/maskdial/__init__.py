"""maskdial: an inference server for masked and causal language models."""

import os

__version__ = "0.2.0"

# ONNX Runtime reports its use to its makers by default; what a server does is its operator's
# business. Read when the library is first used, so an operator can still set it to 0.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
