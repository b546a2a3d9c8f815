"""OpenVINO: int8 weights with what the CPU plugin makes of them, or NNCF's static W8A8."""

import random
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino as ov
import torch
from transformers import BertForMaskedLM

from loadtests.checkpoints import masked_ids, new_folder
from loadtests.compare.runners.passes import mean_seconds
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work

_INPUTS = ("input_ids", "attention_mask")
_NUM_CALIBRATION_TEXTS = 64


def prepare(setup: Setup) -> None:
    """Converts the checkpoint, and quantises that."""
    with new_folder(setup.product) as path:
        model = _convert(setup.checkpoint)
        if setup.variant == "w8":
            model = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        else:
            rng = random.Random(setup.seed)
            texts = [_feeds(rng, 1, rng.randint(8, 128)) for _ in range(_NUM_CALIBRATION_TEXTS)]
            model = nncf.quantize(
                model,
                nncf.Dataset(texts),
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(texts),
            )
        ov.save_model(model, path / "model.xml")


def open_runner(setup: Setup) -> Runner:
    """Compiles the model for the CPU."""
    settings = {"INFERENCE_NUM_THREADS": setup.threads, "PERFORMANCE_HINT": "LATENCY"}
    model = ov.Core().compile_model(setup.product / "model.xml", "CPU", settings)
    return _Compiled(model.create_infer_request(), setup.seed)


def _convert(checkpoint: Path) -> Any:
    model = BertForMaskedLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    texts = torch.ones(2, 16, dtype=torch.int64)
    with torch.no_grad():
        converted = ov.convert_model(
            _Logits(model), example_input={"input_ids": texts, "attention_mask": texts}
        )
    for given, name in zip(converted.inputs, _INPUTS, strict=True):
        given.get_tensor().set_names({name})
        given.get_node().set_partial_shape(ov.PartialShape([-1, -1]))
    converted.validate_nodes_and_infer_types()
    return converted


def _feeds(rng: random.Random, batch: int, length: int) -> dict[str, Any]:
    texts = np.array([masked_ids(rng, length) for _ in range(batch)])
    return {"input_ids": texts, "attention_mask": np.ones_like(texts)}


class _Logits(torch.nn.Module):
    def __init__(self, model: BertForMaskedLM) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(
            input_ids=input_ids, attention_mask=attention_mask
        ).logits
        return logits


class _Compiled:
    """Logits of every token, as the model gives them."""

    def __init__(self, request: Any, seed: int) -> None:
        self._request = request
        self._rng = random.Random(seed)

    def run(self, work: Work) -> float:
        feeds = _feeds(self._rng, work.batch, work.length)
        return mean_seconds(lambda: self._request.infer(feeds), work.repeats)

    def close(self) -> None:
        """Holds nothing but memory and waiting threads."""
