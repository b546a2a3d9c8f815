"""Exports Hugging Face checkpoints to maskdial bundles.

Importing ``maskdial`` first turns off ONNX Runtime's telemetry.
"""

import maskdial as maskdial
