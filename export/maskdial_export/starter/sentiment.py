"""The sentiment classifier: the masked model fine-tuned on rated review sentences.

Labels are few and noisy, so the model learns from teachers too. Each fold of the sentences is
scored by a bag-of-n-grams model and a fine-tuned copy of the masked model that never saw it; the
shipped model learns those scores beside the labels, and the scores all teachers together give
to spliced sentences (cross-fitted distillation).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import BertForSequenceClassification, PreTrainedTokenizerFast

from maskdial_export.starter.data import RatedSentence
from maskdial_export.starter.naive_bayes import NaiveBayesRegression
from maskdial_export.starter.pretrain import autocast

FOLDS = 5
LEARNING_RATE = 5e-4
DROPOUT = 0.1
LEXICON_GAIN = 0.6
HEAD_GAIN = 1.0
POOLING_GAIN = 3.0
"""How far the mean over the tokens outweighs [CLS] itself when fine-tuning starts."""
BATCH = 32
MAX_TOKENS = 80
MASKED_TOKENS = 0.1
"""Share of the tokens hidden from the model in training, so that it weighs more than one word."""
SPLICED_PER_SENTENCE = 2.0
LABEL_SHARE = 0.4
"""Weight of a sentence's own label in its target; the rest is the teachers' probability."""
TEACHER_SHARES = (0.4, 0.6)
"""Weights of the n-gram model's and the fine-tuned models' log-odds in the teachers' score."""


@dataclass(frozen=True, slots=True)
class Example:
    """A text's token ids, framed by [CLS] and [SEP], and how likely it is positive (0 to 1)."""

    tokens: list[int]
    target: float


@dataclass(frozen=True, slots=True)
class Fold:
    """The rows teachers of this fold learn from, and those they score."""

    train: list[int]
    held_out: list[int]


class SentimentObjective:
    """Binary cross-entropy against soft targets, on random batches of texts of like length."""

    def __init__(
        self,
        model: BertForSequenceClassification,
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


def build_model(masked_checkpoint: str, lexicon: Tensor) -> BertForSequenceClassification:
    """The masked model's body under a new two-class head, its words marked with `lexicon`."""
    model = BertForSequenceClassification.from_pretrained(
        masked_checkpoint,
        num_labels=2,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
        problem_type="single_label_classification",
        hidden_dropout_prob=DROPOUT,
        attention_probs_dropout_prob=DROPOUT,
        classifier_dropout=2 * DROPOUT,
        attn_implementation="eager",
    )
    assert isinstance(model, BertForSequenceClassification)
    _start_pooling(model)
    _mark_words(model, lexicon)
    return model


def polarity_lexicon(rows: Sequence[list[int]], labels: Tensor, vocabulary_size: int) -> Tensor:
    """`[vocabulary_size]` fp32: each token's naive Bayes log-count ratio, positive to negative."""
    counts = torch.ones(2, vocabulary_size)
    for row, label in zip(rows, labels.tolist(), strict=True):
        counts[int(label), list(set(row))] += 1.0
    share = counts / counts.sum(dim=1, keepdim=True)
    return torch.log(share[1]) - torch.log(share[0])


def _mark_words(model: BertForSequenceClassification, lexicon: Tensor) -> None:
    # Books taught the embeddings grammar and topics, hardly any polarity. One direction, spread
    # over all dimensions, gets the words' polarity; mean pooling carries it to [CLS].
    embeddings = model.bert.embeddings.word_embeddings.weight
    width = embeddings.shape[1]
    direction = torch.ones(width)
    direction[1::2] = -1.0
    with torch.no_grad():
        length = embeddings.norm(dim=1).mean() / width**0.5
        embeddings.add_(LEXICON_GAIN * length * lexicon.unsqueeze(1) * direction)
        model.bert.pooler.dense.weight[0] = direction / width**0.5
        model.classifier.weight[:, 0] = torch.tensor([-HEAD_GAIN, HEAD_GAIN])


def _start_pooling(model: BertForSequenceClassification) -> None:
    # The masked model never had a use for [CLS]. The last layer's attention starts again as a
    # mean over all tokens, or the few labels are spent on learning to look at the sentence.
    attention = model.bert.encoder.layer[-1].attention
    width = model.config.hidden_size
    with torch.no_grad():
        attention.self.query.weight.zero_()
        attention.self.query.bias.zero_()
        attention.self.value.weight.copy_(torch.eye(width))
        attention.self.value.bias.zero_()
        attention.output.dense.weight.copy_(POOLING_GAIN * torch.eye(width))
        attention.output.dense.bias.zero_()


def split_folds(num_rows: int, num_folds: int, seed: int) -> list[Fold]:
    """Random folds of equal size, within one row."""
    rows = list(range(num_rows))
    random.Random(seed).shuffle(rows)
    parts = [rows[start::num_folds] for start in range(num_folds)]
    return [
        Fold([row for other in parts if other is not part for row in other], part)
        for part in parts
    ]


def splice(sentences: Sequence[RatedSentence], count: int, seed: int) -> list[str]:
    """`count` new texts, each the start of one sentence and the end of another."""
    chance = random.Random(seed)
    texts = []
    for _ in range(count):
        first = chance.choice(sentences).text.split()
        second = chance.choice(sentences).text.split()
        head = first[: chance.randint(1, max(1, min(len(first), 14)))]
        texts.append(" ".join(head + second[-chance.randint(1, max(1, min(len(second), 14))) :]))
    return texts


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text with [CLS] and [SEP], cut to `MAX_TOKENS`."""
    encoded = tokenizer(list(texts), truncation=True, max_length=MAX_TOKENS)["input_ids"]
    return [list(ids) for ids in encoded]


def pad(rows: Sequence[list[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """`[batch, longest]` int64 ids and attention mask (1 for a token, 0 for padding)."""
    longest = max(len(row) for row in rows)
    inputs = torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])
    attention = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return inputs, attention


@torch.no_grad()
def score(
    model: BertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    rows: Sequence[list[int]],
    bf16: bool,
) -> Tensor:
    """`[len(rows)]` fp32 log-odds of POSITIVE, batched by length."""
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
    """Share of rows whose sign of `odds` agrees with the 0/1 `labels`."""
    return float(((odds > 0).float() == labels).float().mean())


def blend(ngram_odds: Tensor, model_odds: Tensor) -> Tensor:
    """The teachers' common log-odds."""
    return TEACHER_SHARES[0] * ngram_odds + TEACHER_SHARES[1] * model_odds


def average_weights(
    model: BertForSequenceClassification, states: Sequence[dict[str, Tensor]]
) -> None:
    """Load the mean of `states` into `model` ("model soups", Wortsman et al. 2022)."""
    mean = {
        name: torch.stack([state[name].float() for state in states]).mean(0).to(value.dtype)
        for name, value in states[0].items()
    }
    model.load_state_dict(mean)


def distillation_targets(labels: Tensor, teacher_odds: Tensor) -> list[float]:
    """Each labelled row's target: its label and its teachers' probability, mixed."""
    soft = torch.sigmoid(teacher_odds)
    return [float(p) for p in LABEL_SHARE * labels + (1.0 - LABEL_SHARE) * soft]


def teach_ngrams(
    texts: Sequence[str], labels: Tensor, fold: Fold
) -> NaiveBayesRegression:
    """The n-gram teacher of `fold`."""
    return NaiveBayesRegression([texts[row] for row in fold.train], labels[fold.train])
