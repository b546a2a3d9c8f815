"""ONNX Runtime with the graph that torch exports, and with its own dynamic quantisation."""

import random
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.shape_inference import quant_pre_process
from transformers import BertForMaskedLM

from loadtests.checkpoints import masked_ids, new_folder
from loadtests.compare.runners.passes import mean_seconds
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work

_GRAPH = "model.onnx"


def prepare(setup: Setup) -> None:
    """Exports the checkpoint, and quantises that where it is wanted."""
    if setup.variant == "fp32":
        with new_folder(setup.product) as path:
            _export(setup.checkpoint, path / _GRAPH)
        return
    with tempfile.TemporaryDirectory() as folder, new_folder(setup.product) as path:
        plain, prepared = Path(folder) / "plain.onnx", Path(folder) / "prepared.onnx"
        _export(setup.checkpoint, plain)
        quant_pre_process(plain, prepared, skip_symbolic_shape=True)
        quantize_dynamic(prepared, path / _GRAPH, weight_type=QuantType.QInt8, per_channel=True)


def open_runner(setup: Setup) -> Runner:
    """Loads the graph."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = setup.threads
    path = setup.product / _GRAPH
    return _Graph(
        ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]), setup.seed
    )


def _export(checkpoint: Path, path: Path) -> None:
    model = BertForMaskedLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    texts = torch.ones(2, 16, dtype=torch.int64)
    shape = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    torch.onnx.export(
        model,
        kwargs={"input_ids": texts, "attention_mask": texts},
        f=path,
        dynamo=True,
        external_data=False,
        dynamic_shapes={"input_ids": shape, "attention_mask": shape},
    )


class _Graph:
    """Logits of every token, as the model gives them."""

    def __init__(self, session: ort.InferenceSession, seed: int) -> None:
        self._session = session
        self._rng = random.Random(seed)

    def run(self, work: Work) -> float:
        texts = np.array([masked_ids(self._rng, work.length) for _ in range(work.batch)])
        feeds = {"input_ids": texts, "attention_mask": np.ones_like(texts)}
        return mean_seconds(lambda: self._session.run(None, feeds), work.repeats)

    def close(self) -> None:
        """Holds nothing but memory and waiting threads."""
