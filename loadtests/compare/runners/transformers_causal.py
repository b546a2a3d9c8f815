"""transformers: its forward pass with a cache, without what `generate` adds to it."""

import random
import time

import torch
from transformers import DynamicCache, PreTrainedModel

from loadtests.checkpoints import causal_ids
from loadtests.compare.runners.device import Device
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work


def open_runner(setup: Setup) -> Runner:
    """Draws the weights."""
    return _Model(Device(setup).model(setup), setup)


class _Model:
    def __init__(self, model: PreTrainedModel, setup: Setup) -> None:
        self._model = model
        self._num_words = setup.model.num_words
        self._rng = random.Random(setup.seed)

    @torch.inference_mode()
    def run(self, work: Work) -> float:
        cache = DynamicCache(config=self._model.config)
        prompts = [causal_ids(self._rng, work.length, self._num_words) for _ in range(work.batch)]
        started = time.perf_counter()
        tokens = self._step(torch.tensor(prompts), cache)
        if work.kind == "prefill":
            return time.perf_counter() - started
        tokens = self._step(tokens, cache)
        started = time.perf_counter()
        for _ in range(work.repeats):
            tokens = self._step(tokens, cache)
        return (time.perf_counter() - started) / work.repeats

    def close(self) -> None:
        """Holds nothing but memory."""

    def _step(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The next token of each row, shape (batch, 1)."""
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        chosen: torch.Tensor = output.logits[:, -1:].argmax(-1)
        return chosen
