"""Turns Hugging Face checkpoints into maskdial bundles, and trains the starter models.

Importing ``maskdial`` first turns ONNX Runtime's telemetry off.
"""

import maskdial as maskdial
