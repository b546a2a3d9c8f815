"""transformers: the model itself, or its fill-mask pipeline."""

import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, pipeline

from loadtests.checkpoints import MASK, masked_ids, masked_words
from loadtests.compare.runners.device import Device
from loadtests.compare.runners.passes import mean_seconds
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work

_NUM_SPECIAL = 2


def open_runner(setup: Setup) -> Runner:
    """Draws the weights."""
    device = Device(setup)
    model: Any = device.model(setup)
    if setup.variant == "pipeline":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(setup.checkpoint)
        fill = pipeline("fill-mask", model=model, tokenizer=tokenizer)
        return _Pipeline(fill, random.Random(setup.seed))
    if setup.variant == "encoder":
        model = model.base_model
    if setup.variant == "compiled":
        device.begin_compiling(setup)
        model = torch.compile(model, mode="reduce-overhead", dynamic=False)
    return _Model(model, device, random.Random(setup.seed))


class _Model:
    """What the model gives for every token: logits, or without its head hidden states."""

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
        """Holds nothing but memory."""


class _Pipeline:
    """Texts in, likeliest words out."""

    def __init__(self, fill: Callable[..., Any], rng: random.Random) -> None:
        self._fill = fill
        self._words = masked_words()
        self._rng = rng

    def run(self, work: Work) -> float:
        texts = []
        for _ in range(work.batch):
            words = self._rng.choices(self._words, k=work.length - _NUM_SPECIAL)
            words[len(words) // 2] = MASK
            texts.append(" ".join(words))
        return mean_seconds(lambda: self._fill(texts, batch_size=work.batch), work.repeats)

    def close(self) -> None:
        """Holds nothing but memory."""
