"""The sentiment classifier: the masked model, fine-tuned on rated review sentences.

Labels are few, and books taught the masked model hardly any polarity. So each word's polarity is
written into its embedding before fine-tuning, and the model learns from teachers (see `teachers`)
as well as from labels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedTokenizerFast,
)

from training.pretrain import autocast
from training.shipped import read_weights

LEARNING_RATE = 5e-4
DROPOUT = 0.1
BATCH = 32
MAX_TOKENS = 80
MASKED_TOKENS = 0.2
"""Share of tokens hidden in training, so that the model relies on more than one word."""
LABEL_SHARE = 0.4
"""Weight of a sentence's label in its target; the rest is the teachers' probability."""
LEXICON_GAIN = 0.6
"""Length of a word's polarity mark per unit of log-count ratio, in mean embedding lengths."""
HEAD_GAIN = 0.5
"""Weight of the polarity mark in the new classifier when fine-tuning starts."""
RARE = 3.0
"""Occurrences at which a word's log-count ratio counts for half."""
_CONFIG: dict[str, Any] = {
    "num_labels": 2,
    "id2label": {0: "NEGATIVE", 1: "POSITIVE"},
    "label2id": {"NEGATIVE": 0, "POSITIVE": 1},
    "problem_type": "single_label_classification",
    "embedding_dropout": DROPOUT,
    "mlp_dropout": DROPOUT,
    "attention_dropout": DROPOUT,
    "classifier_dropout": 2 * DROPOUT,
    "attn_implementation": "eager",
}


@dataclass(frozen=True, slots=True)
class Example:
    """A text's token ids with [CLS] and [SEP], and its probability of being positive."""

    tokens: list[int]
    target: float


class SentimentObjective:
    """Binary cross-entropy with soft targets, on random batches of texts of similar length."""

    def __init__(
        self,
        model: ModernBertForSequenceClassification,
        tokenizer: PreTrainedTokenizerFast,
        examples: Sequence[Example],
        seed: int,
    ) -> None:
        self.model = model
        self.pad = int(tokenizer.pad_token_id)
        self.mask = int(tokenizer.mask_token_id)
        self.examples = examples
        self.random = random.Random(seed)
        self.batches: list[list[Example]] = []
        self.device = next(model.parameters()).device

    def batch_loss(self, progress: float) -> tuple[Tensor, int]:
        if not self.batches:
            self.batches = self._shuffled_batches()
        batch = self.batches.pop()
        inputs, attention = pad([example.tokens for example in batch], self.pad)
        dropped = (torch.rand(inputs.shape) < MASKED_TOKENS) & (inputs > self.mask)
        inputs = torch.where(dropped, self.mask, inputs)
        logits = self.model(
            input_ids=inputs.to(self.device), attention_mask=attention.to(self.device)
        ).logits.float()
        targets = torch.tensor([example.target for example in batch], device=self.device)
        odds = logits[:, 1] - logits[:, 0]
        loss = functional.binary_cross_entropy_with_logits(odds, targets)
        return loss, int(attention.sum())

    def _shuffled_batches(self) -> list[list[Example]]:
        examples = list(self.examples)
        self.random.shuffle(examples)
        pool = 16 * BATCH
        batches = []
        for start in range(0, len(examples), pool):
            alike = sorted(examples[start : start + pool], key=lambda example: len(example.tokens))
            batches += [alike[i : i + BATCH] for i in range(0, len(alike), BATCH)]
        self.random.shuffle(batches)
        return batches


def build_model(masked_checkpoint: Path, lexicon: Tensor) -> ModernBertForSequenceClassification:
    """The body of the masked model, its words marked with `lexicon`, with a two-class head.

    The head reads the mean over the tokens.
    """
    model = ModernBertForSequenceClassification.from_pretrained(masked_checkpoint, **_CONFIG)
    assert isinstance(model, ModernBertForSequenceClassification)
    _mark_words(model, lexicon)
    return model


def restore_model(bundle: Path, config: ModernBertConfig) -> ModernBertForSequenceClassification:
    """The model of an exported bundle, as far as int8 has kept it.

    `config` is the masked model's.
    """
    config.update(_CONFIG)
    model = ModernBertForSequenceClassification(config)
    model.load_state_dict(read_weights(bundle))
    return model


def polarity_lexicon(rows: Sequence[list[int]], labels: Tensor, vocabulary_size: int) -> Tensor:
    """`[vocabulary_size]` float32: each token's naive Bayes log-count ratio, positive to negative.

    Rare tokens shrink toward zero: n occurrences count for n / (n + `RARE`).
    """
    counts = torch.ones(2, vocabulary_size)
    for row, label in zip(rows, labels.tolist(), strict=True):
        counts[int(label), list(set(row))] += 1.0
    share = counts / counts.sum(dim=1, keepdim=True)
    sightings = counts.sum(dim=0) - 2.0
    ratio = torch.log(share[1]) - torch.log(share[0])
    return ratio * sightings / (sightings + RARE)


def _mark_words(model: ModernBertForSequenceClassification, lexicon: Tensor) -> None:
    # A word's polarity goes along one direction, spread over all dimensions. One unit of the head
    # starts by reading that direction, another by reading the opposite one.
    embeddings = model.model.embeddings.tok_embeddings.weight
    width = embeddings.shape[1]
    direction = torch.ones(width)
    direction[1::2] = -1.0
    with torch.no_grad():
        length = embeddings.norm(dim=1).mean() / width**0.5
        embeddings.add_(LEXICON_GAIN * length * lexicon.unsqueeze(1) * direction)
        model.head.dense.weight[0] = 2.0 * direction / width**0.5
        model.head.dense.weight[1] = -2.0 * direction / width**0.5
        model.classifier.weight.mul_(0.1)
        model.classifier.weight[:, 0] = torch.tensor([-HEAD_GAIN, HEAD_GAIN])
        model.classifier.weight[:, 1] = torch.tensor([HEAD_GAIN, -HEAD_GAIN])


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text with [CLS] and [SEP], truncated to `MAX_TOKENS`."""
    encoded = tokenizer(list(texts), truncation=True, max_length=MAX_TOKENS)["input_ids"]
    return [list(ids) for ids in encoded]


def build_examples(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], targets: Sequence[float]
) -> list[Example]:
    """One example per text and target."""
    rows = encode(tokenizer, texts)
    return [Example(row, target) for row, target in zip(rows, targets, strict=True)]


def pad(rows: Sequence[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """`[batch, longest]` int64 ids and attention mask (1 for a token, 0 for padding)."""
    longest = max(len(row) for row in rows)
    inputs = torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])
    attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return inputs, attention


@torch.no_grad()
def score(
    model: ModernBertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[list[int]],
    bf16: bool,
) -> Tensor:
    """`[len(rows)]` float32 log-odds of POSITIVE, in batches of similar length."""
    model.eval()
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    odds = torch.zeros(len(rows))
    for start in range(0, len(order), 64):
        batch = order[start : start + 64]
        inputs, attention = pad([rows[row] for row in batch], int(tokenizer.pad_token_id))
        with autocast(model.device, bf16):
            logits = model(
                input_ids=inputs.to(model.device), attention_mask=attention.to(model.device)
            ).logits.float()
        odds[batch] = (logits[:, 1] - logits[:, 0]).cpu()
    return odds


def accuracy(odds: Tensor, labels: Tensor) -> float:
    """The share of rows in which the sign of `odds` agrees with the 0/1 `labels`."""
    return float(((odds > 0).float() == labels).float().mean())


def distillation_targets(labels: Tensor, teacher_odds: Tensor) -> list[float]:
    """A mix of each row's label and its teachers' probability."""
    soft = torch.sigmoid(teacher_odds)
    return [float(p) for p in LABEL_SHARE * labels + (1.0 - LABEL_SHARE) * soft]
