"""What ships, as a start for more training: weights and tokenizer of an exported bundle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from training.vocabulary import as_causal

_QUANTIZED, _SCALE = ".int8", ".scale"


def read_weights(bundle: Path) -> dict[str, Tensor]:
    """The weights of an int8 bundle by their names in the checkpoint, all in float32.

    A matrix is within half a step of its scale of what was exported. Names are the export's: a
    module's for a quantized matrix (`[inputs, outputs]` with a scale for each output, or a table
    with one for each row), and the parameter's after the name of the traced model for the rest.
    """
    graph = onnx.load(str(bundle / "model.onnx")).graph
    values = {value.name: numpy_helper.to_array(value) for value in graph.initializer}
    weights = {}
    for name, value in values.items():
        if name.endswith(_QUANTIZED):
            module = name.removesuffix(_QUANTIZED)
            scale = values[module + _SCALE]
            matrix = value.astype(np.float32) * scale
            weights[f"{module}.weight"] = matrix if scale.ndim == 2 else matrix.T
        elif name.endswith((".weight", ".bias")):
            weights[name.removeprefix("model.")] = value
    return {name: torch.from_numpy(value.copy()) for name, value in weights.items()}


def read_tokenizer(bundle: Path, max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer of a decoder's bundle."""
    return as_causal(Tokenizer.from_file(str(bundle / "tokenizer.json")), max_length)
