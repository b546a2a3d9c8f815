"""Turns Hugging Face checkpoints into maskdial bundles.

Importing ``maskdial`` first turns ONNX Runtime's telemetry off.
"""

import maskdial as maskdial
