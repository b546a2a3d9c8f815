"""What runs in torch: transformers' models, and a buffer that measures the memory bandwidth."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StaticCache,
    pipeline,
)

from loadtests import LoadTestError
from loadtests.checkpoints import MASK, causal_ids, masked_ids, masked_words, random_model
from loadtests.compare.peers import Runner, mean_seconds
from loadtests.compare.setup import Setup
from loadtests.compare.work import Work

_PAD = 0
_NUM_SPECIAL = 2


def open_runner(setup: Setup) -> Runner:
    """Draws the weights; compiled variants compile at the first turn of each work."""
    device = Device(setup)
    if setup.variant == "memory":
        return _Buffer(device)
    if setup.variant in ("generate", "compiled"):
        device.begin_compiling(setup)
    model: Any = device.model(setup)
    if setup.variant == "forward":
        return _Forward(model, setup)
    if setup.variant == "generate":
        return _Generate(model, device, setup)
    if setup.variant == "pipeline":
        return _Pipeline(model, setup)
    if setup.variant == "encoder":
        model = model.base_model
    if setup.variant == "compiled":
        model = torch.compile(model, mode="reduce-overhead", dynamic=False)
    return _Masked(model, device, random.Random(setup.seed))


class Device:
    """The CPU with a setup's threads, or the first CUDA device.

    Attributes:
        name: torch's name of it.
        dtype: of weights and activations.
    """

    def __init__(self, setup: Setup) -> None:
        """Raises LoadTestError if torch lacks the CUDA device that the setup asks for."""
        torch.set_num_threads(setup.threads)
        self.name = setup.provider
        self.dtype = torch.float16 if setup.provider == "cuda" else torch.float32
        if setup.provider == "cuda" and not torch.cuda.is_available():
            raise LoadTestError("this torch has no CUDA device")

    def model(self, setup: Setup) -> PreTrainedModel:
        """The setup's shape with random weights and SDPA."""
        return random_model(setup.model.config, setup.seed, dtype=self.dtype, device=self.name)

    def seconds(self, run: Callable[[], object]) -> float:
        """The time of a call, until the device has finished it."""
        self.wait()
        started = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - started

    def begin_compiling(self, setup: Setup) -> None:
        """Keeps compiled code between runs, and fails where torch would recompile without end.

        Otherwise torch would fall back to eager mode without an error.
        """
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(setup.folder) / "torch-compiled")
        torch._dynamo.config.fail_on_recompile_limit_hit = True

    def wait(self) -> None:
        """Returns when the device has finished what was queued."""
        if self.name == "cuda":
            torch.cuda.synchronize()


class _Buffer:
    """A buffer that fits no cache, summed by all threads or by a GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer = torch.empty(0)

    def run(self, work: Work) -> float:
        num_elements = work.length * 2**20 // self._buffer.element_size()
        if len(self._buffer) != num_elements:
            self._buffer = torch.ones(num_elements, device=self._device.name)
        seconds = mean_seconds(self._buffer.sum, work.repeats, self._device.wait)
        if self._device.name == "cuda":
            seconds = min(seconds, self._half_copy(work))
        return seconds

    def close(self) -> None:
        pass

    def _half_copy(self, work: Work) -> float:
        """Half the time of a copy, which reads as much as it writes."""
        copy = torch.empty_like(self._buffer)
        return mean_seconds(lambda: copy.copy_(self._buffer), work.repeats, self._device.wait) / 2


class _Forward:
    """The forward pass with a growing cache, without what `generate` adds to it."""

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
        pass

    def _step(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The next token of each row, shape (batch, 1)."""
        output = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        chosen: torch.Tensor = output.logits[:, -1:].argmax(-1)
        return chosen


class _Generate:
    """`generate` with a static cache and compiled decode steps.

    Every setting that is not a default is to its advantage. With a static cache `generate` compiles
    its steps by itself on CUDA, and on the CPU when told to. Each work has one cache, reset between
    turns: a new one would have another address, for which CUDA graphs would be recorded again. No
    dimension is dynamic.
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
        pass

    def _seconds(self, work: Work, num_tokens: int) -> float:
        """The time until every text has that many new tokens."""
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
        """Token ids, padded on the left, and the attention mask, both int64 (batch, length)."""
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


class _Masked:
    """The model's output at every token: logits, or hidden states without its head."""

    def __init__(self, model: Any, device: Device, rng: random.Random) -> None:
        self._model = model
        self._device = device
        self._rng = rng

    @torch.inference_mode()
    def run(self, work: Work) -> float:
        lengths = [length for length, _ in work.texts]
        ids = torch.zeros(work.batch, max(lengths), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, length in enumerate(lengths):
            ids[row, :length] = torch.tensor(masked_ids(self._rng, length))
            mask[row, :length] = 1
        ids, mask = ids.to(self._device.name), mask.to(self._device.name)
        return mean_seconds(
            lambda: self._model(input_ids=ids, attention_mask=mask),
            work.repeats,
            self._device.wait,
        )

    def close(self) -> None:
        pass


class _Pipeline:
    """The fill-mask pipeline: texts in, likeliest words out."""

    def __init__(self, model: PreTrainedModel, setup: Setup) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(setup.checkpoint)
        self._fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
        self._words = masked_words()
        self._rng = random.Random(setup.seed)

    def run(self, work: Work) -> float:
        texts = []
        for _ in range(work.batch):
            words = self._rng.choices(self._words, k=work.length - _NUM_SPECIAL)
            words[len(words) // 2] = MASK
            texts.append(" ".join(words))
        return mean_seconds(lambda: self._fill(texts, batch_size=work.batch), work.repeats)

    def close(self) -> None:
        pass
