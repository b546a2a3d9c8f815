"""transformers: the model itself, or its fill-mask pipeline."""

import random
from collections.abc import Callable
from typing import Any

import torch
from transformers import BertForMaskedLM, PreTrainedTokenizerFast, pipeline

from loadtests.checkpoints import MASK, masked_ids, masked_words
from loadtests.compare.runners.passes import mean_seconds
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work

_NUM_SPECIAL = 2


def open_runner(setup: Setup) -> Runner:
    """Loads the checkpoint."""
    torch.set_num_threads(setup.threads)
    model = BertForMaskedLM.from_pretrained(setup.checkpoint, dtype=torch.float32).eval()
    rng = random.Random(setup.seed)
    if setup.variant == "pipeline":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(setup.checkpoint)
        return _Pipeline(pipeline("fill-mask", model=model, tokenizer=tokenizer), rng)
    return _Model(model, rng)


class _Model:
    """Logits of every token, as the model gives them."""

    def __init__(self, model: BertForMaskedLM, rng: random.Random) -> None:
        self._model = model
        self._rng = rng

    @torch.inference_mode()
    def run(self, work: Work) -> float:
        texts = torch.tensor([masked_ids(self._rng, work.length) for _ in range(work.batch)])
        mask = torch.ones_like(texts)
        return mean_seconds(lambda: self._model(input_ids=texts, attention_mask=mask), work.repeats)

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
