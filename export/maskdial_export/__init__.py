"""Exports Hugging Face checkpoints to maskdial bundles, and trains the starter models.

Importing ``maskdial`` first turns off ONNX Runtime's telemetry.
"""

import maskdial as maskdial
