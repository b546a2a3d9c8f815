"""The masked language model: a small BERT that learns to restore whole hidden words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from maskdial_export.starter.data import (
    POLARITY_FILE,
    Books,
    read_books,
    read_definitions,
    read_rated_sentences,
)
from maskdial_export.starter.pretrain import cross_entropy
from maskdial_export.starter.vocabulary import train_wordpiece

VOCABULARY_SIZE = 8000
MAX_LENGTH = 256
DEFINITIONS_SHARE = 0.25
POLARITY_REPEATS = 3
MASKED_SHARE = 0.2
LEARNING_RATE = 2e-3
INITIAL_STD = 0.06
HEAD_OFFSETS = (-1, 1, -2, 2)
"""The neighbour, in tokens, that each head of the first layers looks at before training."""
LOCAL_GAIN = 1.6
TOKENS_PER_BATCH = 2048
EVALUATION_BATCHES = 100
LONG_FROM = 0.9
"""Progress from which on sequences fill the context; before, they fill half of it."""


class MaskedObjective:
    """Whole-word masking over random windows of one long token stream."""

    def __init__(
        self, model: BertForMaskedLM, tokenizer: PreTrainedTokenizerFast, stream: Tensor
    ) -> None:
        self.model = model
        self.stream = stream
        vocabulary = tokenizer.get_vocab()
        self.cls, self.sep = vocabulary["[CLS]"], vocabulary["[SEP]"]
        self.mask = vocabulary["[MASK]"]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        self.continues_word = torch.tensor([token.startswith("##") for token in tokens])
        self.device = next(model.parameters()).device

    def batch_loss(self, progress: float) -> tuple[Tensor, int]:
        length = MAX_LENGTH if progress >= LONG_FROM else MAX_LENGTH // 2
        inputs = self.sample_windows(self.stream, TOKENS_PER_BATCH // length, length)
        return self.masked_loss(inputs), inputs.numel()

    def sample_windows(self, stream: Tensor, batch: int, length: int) -> Tensor:
        """`[batch, length]` int64: [CLS], a run of `stream` from a random place, [SEP]."""
        inner = min(length - 2, len(stream) - 1)
        starts = torch.randint(len(stream) - inner, (batch, 1))
        windows = stream[starts + torch.arange(inner)].long()
        return functional.pad(
            functional.pad(windows, (1, 0), value=self.cls), (0, 1), value=self.sep
        )

    def masked_loss(self, inputs: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of the tokens hidden from `inputs` `[batch, length]`."""
        logits, labels = self.masked_logits(inputs)
        return cross_entropy(logits, labels).mean()

    def masked_logits(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """`[num_masked, vocabulary]` logits and `[num_masked]` labels, head on masked tokens only.

        Of the chosen words' tokens 80 % become [MASK], 10 % a random token, 10 % stay (BERT,
        Devlin et al. 2019, section 3.1).
        """
        chosen = self.choose_words(inputs)
        labels = inputs[chosen]
        fate = torch.rand(inputs.shape)
        hidden = torch.where(chosen & (fate < 0.8), self.mask, inputs)
        noise = torch.randint(5, len(self.continues_word), inputs.shape)
        hidden = torch.where(chosen & (fate >= 0.9), noise, hidden)
        states = self.model.bert(input_ids=hidden.to(self.device)).last_hidden_state
        logits: Tensor = self.model.cls(states[chosen.to(self.device)])
        return logits, labels.to(self.device)

    def choose_words(self, inputs: Tensor) -> Tensor:
        """`[batch, length]` bool: every token of a random share of each row's words."""
        word = torch.cumsum(~self.continues_word[inputs], dim=1)
        drawn = torch.rand(len(inputs), inputs.shape[1] + 1) < MASKED_SHARE
        chosen: Tensor = drawn.gather(1, word) & (inputs != self.cls) & (inputs != self.sep)
        return chosen


def build_model(tokenizer: PreTrainedTokenizerFast) -> BertForMaskedLM:
    """A BERT of 4 layers and width 128 whose attention starts out local."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=MAX_LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=INITIAL_STD,
        pad_token_id=tokenizer.pad_token_id,
    )
    # On a CPU the backward pass of the fused attention takes longer than the plain products.
    config._attn_implementation = "eager"
    model = BertForMaskedLM(config)
    _start_local(model)
    return model


def read_masked_texts(corpus: Path, seed: int) -> tuple[Books, list[str], list[str]]:
    """Books, a sample of the dictionary, and the rated sentences without their labels."""
    rated = read_rated_sentences(corpus / POLARITY_FILE)
    definitions = read_definitions(corpus, DEFINITIONS_SHARE, seed)
    return read_books(corpus), definitions, [sentence.text for sentence in rated]


def build_vocabulary(
    books: Books, definitions: Sequence[str], reviews: Sequence[str]
) -> PreTrainedTokenizerFast:
    """The WordPiece vocabulary; review words count as often as the model will read them."""
    texts = [*books.train, *definitions, *(list(reviews) * POLARITY_REPEATS)]
    return train_wordpiece(texts, VOCABULARY_SIZE, MAX_LENGTH)


def encode_stream(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """One int32 stream of all texts, each ended by [SEP]."""
    backend = tokenizer.backend_tokenizer
    sep = tokenizer.get_vocab()["[SEP]"]
    stream: list[int] = []
    for start in range(0, len(texts), 1000):
        chunk = list(texts[start : start + 1000])
        for encoding in backend.encode_batch(chunk, add_special_tokens=False):
            stream.extend(encoding.ids)
            stream.append(sep)
    return torch.tensor(stream, dtype=torch.int32)


@torch.no_grad()
def evaluate(objective: MaskedObjective, held_out: Tensor, length: int) -> tuple[float, float]:
    """Loss (nats) and top-1 accuracy on masked tokens of `held_out`, in windows of `length`.

    Masks and windows are drawn from a fixed seed; the tokens that became [MASK], those replaced
    and those kept all count.
    """
    objective.model.eval()
    batch = TOKENS_PER_BATCH // length
    num_batches = max(1, min(EVALUATION_BATCHES, 4 * len(held_out) // TOKENS_PER_BATCH))
    loss, hits, count = 0.0, 0, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(num_batches):
            windows = objective.sample_windows(held_out, batch, length)
            logits, labels = objective.masked_logits(windows)
            loss += cross_entropy(logits, labels).sum().item()
            hits += int((logits.argmax(-1) == labels).sum())
            count += len(labels)
    return loss / count, hits / count


def _start_local(model: BertForMaskedLM) -> None:
    # Each head of the first two layers starts out looking at one neighbour: positions start as
    # sinusoids, the same frequencies in every head, and the query projection turns them by the
    # head's offset. A random start spends millions of tokens at the loss of word frequencies
    # before attention finds the neighbours.
    positions = model.bert.embeddings.position_embeddings.weight
    length, width = positions.shape
    head_width = width // len(HEAD_OFFSETS)
    rate = torch.logspace(math.log10(3.0), math.log10(0.05), head_width // 2)
    angle = torch.arange(length).unsqueeze(1) * rate
    with torch.no_grad():
        waves = torch.stack([torch.sin(angle), torch.cos(angle)], dim=-1).flatten(1)
        positions.copy_(math.sqrt(2.0) * INITIAL_STD * waves.repeat(1, len(HEAD_OFFSETS)))
        turns = torch.block_diag(  # type: ignore[no-untyped-call]
            *(_turn(offset * rate) for offset in HEAD_OFFSETS)
        )
        for layer in model.bert.encoder.layer[:2]:
            layer.attention.self.query.weight.add_(LOCAL_GAIN * turns)
            layer.attention.self.key.weight.add_(LOCAL_GAIN * torch.eye(width))


def _turn(angles: Tensor) -> Tensor:
    """The matrix that turns each (sin a, cos a) pair into (sin(a + angle), cos(a + angle))."""
    blocks = [
        torch.stack([torch.stack([c, s]), torch.stack([-s, c])])
        for s, c in zip(torch.sin(angles), torch.cos(angles), strict=True)
    ]
    turn: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return turn
