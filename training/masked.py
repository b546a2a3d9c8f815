"""The masked language model: a small ModernBERT that learns to restore whole hidden words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import ModernBertConfig, ModernBertForMaskedLM, PreTrainedTokenizerFast

from training.cloze import Prediction, best
from training.data import (
    POLARITY_FILE,
    Books,
    read_books,
    read_definitions,
    read_rated_sentences,
)
from training.pretrain import cross_entropy
from training.settings import Shape
from training.vocabulary import train_wordpiece

MAX_LENGTH = 256
DEFINITIONS_SHARE = 0.25
POLARITY_REPEATS = 3
MASKED_SHARES = (0.35, 0.15)
"""Share of words hidden at the start of training, and at its end and when measured."""
LEARNING_RATE, MATRIX_LEARNING_RATE = 3e-3, 2e-2
TOKENS_PER_BATCH = 2048
EVALUATION_BATCHES = 100
LONG_FROM = 0.9
"""Progress from which sequences fill the context; before, they fill half of it."""


class MaskedObjective:
    """Whole-word masking over random windows of one token stream."""

    def __init__(
        self, model: ModernBertForMaskedLM, tokenizer: PreTrainedTokenizerFast, stream: Tensor
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
        first, last = MASKED_SHARES
        share = first + (last - first) * progress
        logits, labels = self.masked_logits(inputs, share)
        return cross_entropy(logits, labels).mean(), inputs.numel()

    def sample_windows(self, stream: Tensor, batch: int, length: int) -> Tensor:
        """`[batch, length]` int64: [CLS], a run of `stream` from a random position, [SEP]."""
        inner = min(length - 2, len(stream) - 1)
        starts = torch.randint(len(stream) - inner, (batch, 1))
        windows = stream[starts + torch.arange(inner)].long()
        return functional.pad(
            functional.pad(windows, (1, 0), value=self.cls), (0, 1), value=self.sep
        )

    def masked_logits(self, inputs: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """`[num_masked, vocabulary]` logits and `[num_masked]` labels of the masked tokens.

        All tokens of a random `share` of the words become [MASK]; the head runs on these only.
        """
        chosen = self.choose_words(inputs, share)
        hidden = torch.where(chosen, self.mask, inputs)
        states = self.model.model(input_ids=hidden.to(self.device)).last_hidden_state
        logits: Tensor = self.model.decoder(self.model.head(states[chosen.to(self.device)]))
        return logits, inputs[chosen].to(self.device)

    def choose_words(self, inputs: Tensor, share: float) -> Tensor:
        """`[batch, length]` bool: all tokens of a random `share` of each row's words."""
        word = torch.cumsum(~self.continues_word[inputs], dim=1)
        drawn = torch.rand(len(inputs), inputs.shape[1] + 1) < share
        chosen: Tensor = drawn.gather(1, word) & (inputs != self.cls) & (inputs != self.sep)
        return chosen


def build_model(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> ModernBertForMaskedLM:
    """A ModernBERT with heads of 32 and full attention in every layer.

    A BERT of that size, with norms after the layers, was still at the loss of word frequencies
    after two million tokens of the same training.
    """
    vocabulary = tokenizer.get_vocab()
    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.width // 32,
        intermediate_size=shape.width * 8 // 3,
        max_position_embeddings=MAX_LENGTH,
        layer_types=["full_attention"] * shape.layers,
        classifier_pooling="mean",
        pad_token_id=vocabulary["[PAD]"],
        cls_token_id=vocabulary["[CLS]"],
        sep_token_id=vocabulary["[SEP]"],
        bos_token_id=vocabulary["[CLS]"],
        eos_token_id=vocabulary["[SEP]"],
    )
    # On a CPU the backward pass of fused attention is slower than plain matrix products.
    config._attn_implementation = "eager"
    model = ModernBertForMaskedLM(config)
    for layer in model.model.layers:  # each layer starts as the identity
        nn.init.zeros_(layer.attn.Wo.weight)
        nn.init.zeros_(layer.mlp.Wo.weight)
    return model


def read_masked_texts(corpus: Path, seed: int) -> tuple[Books, list[str], list[str]]:
    """Books, a sample of the dictionary, and the rated sentences without their labels."""
    rated = read_rated_sentences(corpus / POLARITY_FILE)
    definitions = read_definitions(corpus, DEFINITIONS_SHARE, seed)
    return read_books(corpus), definitions, [sentence.text for sentence in rated]


def build_vocabulary(
    books: Books, definitions: Sequence[str], reviews: Sequence[str], size: int
) -> PreTrainedTokenizerFast:
    """The WordPiece vocabulary; review words count as often as the model reads them."""
    texts = [*books.train, *definitions, *(list(reviews) * POLARITY_REPEATS)]
    return train_wordpiece(texts, size, MAX_LENGTH)


def encode_stream(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """One int32 stream of all texts, with [SEP] after each."""
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
    """Loss (nats) and top-1 accuracy on hidden tokens of `held_out`, in windows of `length`.

    15% of the words are hidden, with all their tokens, in windows from a fixed seed.
    """
    objective.model.eval()
    batch = TOKENS_PER_BATCH // length
    num_batches = max(1, min(EVALUATION_BATCHES, 4 * len(held_out) // TOKENS_PER_BATCH))
    loss, hits, count = 0.0, 0, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(num_batches):
            windows = objective.sample_windows(held_out, batch, length)
            logits, labels = objective.masked_logits(windows, MASKED_SHARES[1])
            loss += cross_entropy(logits, labels).sum().item()
            hits += int((logits.argmax(-1) == labels).sum())
            count += len(labels)
    return loss / count, hits / count


@torch.no_grad()
def predict(
    model: ModernBertForMaskedLM, tokenizer: PreTrainedTokenizerFast, text: str
) -> Prediction:
    """Fills the single [MASK] of `text`."""
    model.eval()
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    place = inputs["input_ids"][0] == tokenizer.mask_token_id
    return best(model(**inputs).logits[0, place][0], tokenizer)
