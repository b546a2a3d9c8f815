"""Exports Hugging Face checkpoints to maskdial bundles.

Importing ``maskdial`` first turns off ONNX Runtime's telemetry.
"""

import os

import maskdial as maskdial

# Read when torch is imported. Otherwise its threads spin for milliseconds at the end of each
# operator, which on a busy machine takes several times as long as the export's own work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
