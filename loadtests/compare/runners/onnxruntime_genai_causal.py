"""onnxruntime-genai: the model that its own builder makes of the checkpoint."""

import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import onnxruntime_genai as genai

from loadtests.checkpoints import causal_ids, new_folder
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work
from loadtests.errors import LoadTestError

_OPTIONS = ("int4_block_size=32", "int4_accuracy_level=4")


def prepare(setup: Setup) -> None:
    """Runs the builder."""
    with new_folder(setup.product) as path:
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        files = ["-i", str(setup.checkpoint), "-o", str(path), "-c", str(path / "cache")]
        kind = ["-p", setup.variant, "-e", "cpu", "--extra_options", *_OPTIONS]
        if subprocess.run([*builder, *files, *kind], check=False).returncode != 0:
            raise LoadTestError("onnxruntime-genai's model builder failed")


def open_runner(setup: Setup) -> Runner:
    """Loads the model."""
    config = genai.Config(str(setup.product))
    threads = f'{{"intra_op_num_threads": {setup.threads}}}'
    config.overlay(f'{{"model": {{"decoder": {{"session_options": {threads}}}}}}}')
    return _Model(genai.Model(config), setup)


class _Model:
    def __init__(self, model: Any, setup: Setup) -> None:
        self._model = model
        self._num_words = setup.model.num_words
        self._rng = random.Random(setup.seed)

    def run(self, work: Work) -> float:
        length = work.length + work.repeats + 2
        params = genai.GeneratorParams(self._model)
        # The end of a text would end its row's work: it is not chosen before the whole length.
        params.set_search_options(
            batch_size=work.batch, min_length=length, max_length=length, do_sample=False
        )
        generator = genai.Generator(self._model, params)
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
        """Holds nothing but memory and waiting threads."""
