"""llama.cpp, through the C interface of llama-cpp-python: its own class runs one text at a time."""

import ctypes
import random
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from loadtests.checkpoints import causal_ids, new_folder
from loadtests.compare.runners.gguf_file import write_gguf
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work
from loadtests.errors import LoadTestError

_FILE = "model.gguf"

Tokens = Sequence[tuple[int, int, int, bool]]
"""Id, position, sequence, and whether its logits are wanted."""


def prepare(setup: Setup) -> None:
    """Writes the checkpoint as GGUF."""
    with new_folder(setup.product) as path:
        write_gguf(setup.checkpoint, path / _FILE, setup.variant)


def open_runner(setup: Setup) -> Runner:
    """Loads the file; what is not set here is as llama.cpp has it."""
    llama_cpp.llama_backend_init()
    path = setup.product / _FILE
    model = llama_cpp.llama_model_load_from_file(
        str(path).encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = setup.room.batch * setup.room.context
    params.n_seq_max = setup.room.batch
    params.n_batch = setup.room.context
    params.n_threads = params.n_threads_batch = setup.threads
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise LoadTestError("llama.cpp made no context")
    return _Model(model, context, setup)


class _Model:
    def __init__(self, model: Any, context: Any, setup: Setup) -> None:
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        vocab = llama_cpp.llama_model_get_vocab(model)
        self._num_words = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(setup.room.context, 0, 1)
        self._rng = random.Random(setup.seed)

    def run(self, work: Work) -> float:
        llama_cpp.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        chosen = [self._read(work.length, sequence) for sequence in range(work.batch)]
        if work.kind == "prefill":
            return time.perf_counter() - started
        chosen = self._step(chosen, work.length)
        started = time.perf_counter()
        for position in range(work.length + 1, work.length + 1 + work.repeats):
            chosen = self._step(chosen, position)
        return (time.perf_counter() - started) / work.repeats

    def close(self) -> None:
        """Holds nothing but memory and waiting threads."""

    def _read(self, length: int, sequence: int) -> int:
        prompt = causal_ids(self._rng, length, self._num_words)
        last = length - 1
        self._decode([(token, i, sequence, i == last) for i, token in enumerate(prompt)])
        return int(self._logits(last).argmax())

    def _step(self, tokens: list[int], position: int) -> list[int]:
        self._decode([(token, position, i, True) for i, token in enumerate(tokens)])
        return [int(self._logits(i).argmax()) for i in range(len(tokens))]

    def _decode(self, tokens: Tokens) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise LoadTestError(f"llama_decode returned {status}")

    def _logits(self, index: int) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        row = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float * self._num_words)).contents
        return np.frombuffer(row, np.float32)
