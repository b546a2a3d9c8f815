"""ONNX Runtime with the graph that torch exports, and onnxruntime-genai with its own builder's.

onnxruntime-genai and torch are imported where they are used: neither needs the other.
"""

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from loadtests import LoadTestError
from loadtests.checkpoints import causal_ids, masked_ids, new_folder
from loadtests.compare.peers import Runner, mean_seconds
from loadtests.compare.setup import Setup
from loadtests.compare.work import Work

_GRAPH = "model.onnx"
_BUILDER_OPTIONS = ("int4_block_size=32", "int4_accuracy_level=4")


def prepare(setup: Setup) -> None:
    """Runs the model builder for a causal checkpoint; exports and quantizes a masked one."""
    if setup.model.family == "causal":
        _build(setup)
    elif setup.variant == "fp32":
        with new_folder(setup.product) as path:
            _export(setup.checkpoint, path / _GRAPH)
    else:
        _quantize(setup)


def open_runner(setup: Setup) -> Runner:
    """Loads the model."""
    if setup.model.family == "causal":
        return _GenAI(setup)
    return _Graph(setup)


def _build(setup: Setup) -> None:
    with new_folder(setup.product) as path:
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        files = ["-i", str(setup.checkpoint), "-o", str(path), "-c", str(path / "cache")]
        kind = ["-p", setup.variant, "-e", "cpu", "--extra_options", *_BUILDER_OPTIONS]
        if subprocess.run([*builder, *files, *kind], check=False).returncode != 0:
            raise LoadTestError("onnxruntime-genai's model builder failed")


def _quantize(setup: Setup) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder, new_folder(setup.product) as path:
        plain, prepared = Path(folder) / "plain.onnx", Path(folder) / "prepared.onnx"
        _export(setup.checkpoint, plain)
        quant_pre_process(plain, prepared, skip_symbolic_shape=True)
        quantize_dynamic(prepared, path / _GRAPH, weight_type=QuantType.QInt8, per_channel=True)


def _export(checkpoint: Path, path: Path) -> None:
    import torch
    from transformers import BertForMaskedLM

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
    """A session that returns the logits of every token, as the exported model does."""

    def __init__(self, setup: Setup) -> None:
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.intra_op_num_threads = setup.threads
        path = setup.product / _GRAPH
        self._session: Any = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._rng = random.Random(setup.seed)

    def run(self, work: Work) -> float:
        texts = np.array([masked_ids(self._rng, work.length) for _ in range(work.batch)])
        feeds = {"input_ids": texts, "attention_mask": np.ones_like(texts)}
        return mean_seconds(lambda: self._session.run(None, feeds), work.repeats)

    def close(self) -> None:
        pass


class _GenAI:
    """onnxruntime-genai's generator, with one batch of texts of the same length."""

    def __init__(self, setup: Setup) -> None:
        import onnxruntime_genai

        self._genai: Any = onnxruntime_genai
        config = self._genai.Config(str(setup.product))
        threads = f'{{"intra_op_num_threads": {setup.threads}}}'
        config.overlay(f'{{"model": {{"decoder": {{"session_options": {threads}}}}}}}')
        self._model = self._genai.Model(config)
        self._num_words = setup.model.num_words
        self._rng = random.Random(setup.seed)

    def run(self, work: Work) -> float:
        length = work.length + work.repeats + 2
        params = self._genai.GeneratorParams(self._model)
        # A text that ended early would do less work: min_length bars the end before max_length.
        params.set_search_options(
            batch_size=work.batch, min_length=length, max_length=length, do_sample=False
        )
        generator = self._genai.Generator(self._model, params)
        drawn = [causal_ids(self._rng, work.length, self._num_words) for _ in range(work.batch)]
        prompts = np.array(drawn, np.int32)
        started = time.perf_counter()
        generator.append_tokens(prompts)
        generator.generate_next_token()
        if work.kind == "prefill":
            return time.perf_counter() - started
        generator.generate_next_token()
        started = time.perf_counter()
        for _ in range(work.repeats):
            generator.generate_next_token()
        return (time.perf_counter() - started) / work.repeats

    def close(self) -> None:
        pass
