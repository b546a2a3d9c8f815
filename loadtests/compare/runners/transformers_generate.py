"""transformers' `generate` with a static cache and compiled decode steps."""

import random

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel, StaticCache

from loadtests.checkpoints import causal_ids
from loadtests.compare.runners.device import Device
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work
from loadtests.errors import LoadTestError

_PAD = 0


def open_runner(setup: Setup) -> Runner:
    """Draws the weights; steps are compiled at the first turn of each work."""
    device = Device(setup)
    device.begin_compiling(setup)
    return _Model(device.model(setup), device, setup)


class _Model:
    """Everything about `generate` that is not its default is to its advantage.

    ``generate`` compiles steps by itself where the cache is static, on CUDA only: on the CPU it has
    to be told. One cache for each work, emptied between turns: a new one would be at another place
    in memory, for which CUDA graphs are recorded again. No size is dynamic.
    """

    def __init__(self, model: PreTrainedModel, device: Device, setup: Setup) -> None:
        self._model = model
        self._device = device
        self._num_words = setup.model.num_words
        self._rng = random.Random(setup.seed)
        self._caches: dict[Work, StaticCache] = {}
        compiling = CompileConfig(mode="reduce-overhead", dynamic=False)
        compiling._compile_all_devices = True
        model.generation_config = GenerationConfig(
            do_sample=False, pad_token_id=_PAD, compile_config=compiling
        )

    def run(self, work: Work) -> float:
        if work.kind == "generate":
            return self._seconds(work, max(new for _, new in work.texts))
        first = self._seconds(work, 1)
        if work.kind == "prefill":
            return first
        return (self._seconds(work, 1 + work.repeats) - first) / work.repeats

    def close(self) -> None:
        """Holds nothing but memory."""

    def _seconds(self, work: Work, num_tokens: int) -> float:
        """Until all texts have so many new tokens."""
        ids, mask = self._prompts(work)
        cache = self._cache(work)
        output = ids

        def generate() -> None:
            nonlocal output
            output = self._model.generate(
                ids, attention_mask=mask, past_key_values=cache, max_new_tokens=num_tokens
            )

        seconds = self._device.seconds(generate)
        if output.shape[1] != ids.shape[1] + num_tokens:
            raise LoadTestError("a text ended early")
        return seconds

    def _prompts(self, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
        """Padded on the left, and where they are not, both (batch, length)."""
        lengths = [length for length, _ in work.texts]
        longest = max(lengths)
        ids = torch.full((work.batch, longest), _PAD)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            ids[row, longest - length :] = torch.tensor(
                causal_ids(self._rng, length, self._num_words)
            )
            mask[row, longest - length :] = 1
        return ids.to(self._device.name), mask.to(self._device.name)

    def _cache(self, work: Work) -> StaticCache:
        if work not in self._caches:
            num_new = max(new for _, new in work.texts) or 1 + work.repeats
            room = max(length for length, _ in work.texts) + num_new
            self._caches[work] = StaticCache(self._model.config, max_cache_len=room)
        cache = self._caches[work]
        cache.reset()
        return cache
