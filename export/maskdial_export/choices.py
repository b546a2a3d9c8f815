"""What an export can be asked for, and the defaults; torch is not needed to say so in the help."""

from typing import Literal, get_args

from maskdial.bundle.manifest import TaskName

TASKS = ("auto", *get_args(TaskName))
DIRECT_TASKS: tuple[TaskName, ...] = (
    *("generate", "embed", "fill-mask", "classify", "token-classify", "question-answering"),
    "rerank",
)
"""Those of the direct path, each of a class that says so."""
Precision = Literal["fp32", "fp16", "int8", "int4", "int4-fp16"]
PRECISIONS = get_args(Precision)
MaskChoice = Literal["full", "causal", "both"]
MASKS = get_args(MaskChoice)
TOLERANCE = 1e-4
"""How far the logits of ONNX Runtime may be from torch's, where they are at most 10."""
MAX_LOSS = 0.01
"""The quality that a lower precision may lose; see `maskdial_export.quantize.gate.Gate`."""
LONGEST = 131_072
"""Tokens of models with rotary positions, unless --max-length says otherwise. With heads of 128 the
tables take 64 MiB then; a million positions would take half a gigabyte."""
