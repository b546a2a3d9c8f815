"""The hybrid: one decoder trained under both attention masks.

Some rows of each batch are read under the causal mask, and every next token is predicted. The
others are read under the full mask with some words hidden, and each hidden token is predicted from
the position before it. So both objectives predict the next token, with one head (masked next-token
prediction; "GPT or BERT: why not both?", Charpentier and Samuel, 2024).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from training import stories
from training.cloze import Prediction, best
from training.pretrain import Plan, cross_entropy
from training.settings import Settings, Shape
from training.shipped import read_weights
from training.vocabulary import END_OF_TEXT, MASK

MAX_LENGTH = 512
FIRST_BATCHES = 0.25
"""In this first share of training, batches have half of their tokens."""
LEARNING_RATE, MATRIX_LEARNING_RATE = 3e-3, 2e-2
MASKED_SHARES = (0.35, 0.15)
"""Share of words hidden in masked rows, at the start and at the end of training."""
EVALUATED_SHARE = 0.15
"""Share of words hidden when accuracy is measured, as in BERT."""
EVALUATED_LENGTH = 128
EVALUATED_WINDOWS = 960
CAUSAL_SHARE = 0.5
"""Share of a hybrid's rows that are read under the causal mask."""
PASSAGE_TOKENS = (40, 300)
"""A passage ends with the last paragraph that fits a length drawn from this range."""
SHORT_LENGTH, SHORT_EVERY = 32, 8
CHILDREN_FROM, CHILDREN_SHARE = 0.7, 0.5
"""In the last part of training, this share of the windows is drawn from children's books alone."""
REVIEW_REPEATS = 2
"""How often the review sentences, without their labels, stand in the texts."""
HIDDEN_SCORE = -1e9


class HybridObjective:
    """Next-token prediction over random windows of one token stream, under either mask.

    `causal_share`, 0 to 1, is the share of causal rows: 1 trains an ordinary causal model, 0 a
    masked one. The losses of both kinds of rows are weighted by their share, however many of their
    tokens are predicted. The first `num_children` tokens of the stream are of children's books,
    which the last part of training prefers.
    """

    def __init__(
        self,
        model: Qwen3ForCausalLM,
        tokenizer: PreTrainedTokenizerFast,
        stream: Tensor,
        causal_share: float,
        num_children: int = 0,
        batch_tokens: int = 4096,
    ) -> None:
        self.model = model
        self.batch_tokens = batch_tokens
        self.tokenizer = tokenizer
        self.stream = stream
        self.num_children = num_children
        self.causal_share = causal_share
        vocabulary = tokenizer.get_vocab()
        self.end, self.mask = vocabulary[END_OF_TEXT], vocabulary[MASK]
        tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        special = {self.end, self.mask}
        # In byte-level BPE a space belongs to the next word and is written as a letter of its own.
        self.starts_letter = torch.tensor(
            [i not in special and _is_letter(token[0]) for i, token in enumerate(tokens)]
        )
        self.ends_letter = torch.tensor(
            [i not in special and _is_letter(token[-1]) for i, token in enumerate(tokens)]
        )
        newline = torch.tensor([i == self.end or token == "Ċ" for i, token in enumerate(tokens)])
        # A window's first token becomes the end-of-text token: here, the newline of a paragraph.
        self.paragraphs = newline[stream.long()].nonzero()[:, 0]
        self.steps = 0
        self.device = next(model.parameters()).device

    def batch_loss(self, progress: float) -> tuple[Tensor, int]:
        self.steps += 1
        length = length_at(progress, self.steps)
        rows = self.batch_tokens // (length if progress >= FIRST_BATCHES else 2 * length)
        num_simple = round(rows * CHILDREN_SHARE) if progress >= CHILDREN_FROM else 0
        windows = torch.cat(
            [
                self.sample_windows(num_simple, length + 1, self.num_children or None),
                self.sample_windows(rows - num_simple, length + 1),
            ]
        )
        windows = windows[torch.randperm(rows)]  # the first rows are read under the causal mask
        first, last = MASKED_SHARES
        return self.loss(windows, first + (last - first) * progress), len(windows) * length

    def sample_windows(self, batch: int, length: int, end: int | None = None) -> Tensor:
        """`[batch, length]` int64: the end-of-text token, then a run of the stream's first `end`.

        Half of the runs start at a paragraph, the others anywhere.
        """
        end = len(self.stream) if end is None else end
        length = min(length, end)
        last = end - length
        starts = torch.randint(last + 1, (batch, 1))
        paragraphs = self.paragraphs[self.paragraphs <= last]
        if len(paragraphs):
            drawn = paragraphs[torch.randint(len(paragraphs), (batch, 1))]
            starts = torch.where(torch.rand(batch, 1) < 0.5, starts, drawn)
        windows = self.stream[starts + torch.arange(length)].long()
        windows[:, 0] = self.end
        return windows

    def loss(self, windows: Tensor, masked_share: float) -> Tensor:
        """Weighted mean cross-entropy in nats; `windows` is `[batch, length + 1]`."""
        num_causal = round(self.causal_share * len(windows))
        inputs, targets = windows[:, :-1].clone(), windows[:, 1:]
        predicted = torch.ones(inputs.shape, dtype=torch.bool)
        chosen = self.hide(windows[num_causal:], masked_share)
        hidden = torch.where(chosen, self.mask, windows[num_causal:])
        inputs[num_causal:] = hidden[:, :-1]
        predicted[num_causal:] = chosen[:, 1:]
        weight = self.token_weights(predicted, num_causal)
        losses = cross_entropy(
            self.logits(inputs, num_causal, predicted),
            targets[predicted].to(self.device),
        )
        return (losses * weight[predicted].to(self.device)).sum()

    def hide(self, windows: Tensor, share: float) -> Tensor:
        """`[rows, length]` bool: what the masked rows hide, never the first token."""
        return self.choose_words(windows, share)

    def token_weights(self, predicted: Tensor, num_causal: int) -> Tensor:
        """`[rows, length]` float32: the weight of each token's loss. All add up to 1."""
        weights = torch.zeros(predicted.shape)
        for rows, share in (
            (slice(None, num_causal), num_causal / len(predicted)),
            (slice(num_causal, None), 1.0 - num_causal / len(predicted)),
        ):
            weights[rows] = share / max(1, int(predicted[rows].sum()))
        return weights

    def logits(self, inputs: Tensor, num_causal: int, predicted: Tensor) -> Tensor:
        """`[number predicted, vocabulary]` logits at the positions that `predicted` marks.

        The first `num_causal` rows are read under the causal mask, the others under the full one.
        """
        batch, length = inputs.shape
        allowed = torch.ones(length, length, dtype=torch.bool, device=self.device).tril()
        scores = torch.zeros(batch, 1, length, length, device=self.device)
        scores[:num_causal].masked_fill_(~allowed, HIDDEN_SCORE)
        states = self.model.model(
            input_ids=inputs.to(self.device),
            attention_mask=scores,
            use_cache=False,
        ).last_hidden_state
        chosen: Tensor = self.model.lm_head(states[predicted.to(self.device)])
        return chosen

    def choose_words(self, windows: Tensor, share: float) -> Tensor:
        """`[batch, length]` bool: all tokens of a random share of each row's words."""
        drawn = torch.rand(len(windows), windows.shape[1] + 1) < share
        chosen: Tensor = drawn.gather(1, self.word_numbers(windows)) & (windows != self.end)
        chosen[:, 0] = False  # there is no position before it to predict it from
        return chosen

    def word_numbers(self, windows: Tensor) -> Tensor:
        """`[batch, length]` int64: the number of each token's word in its row, from 1."""
        goes_on = self.starts_letter[windows[:, 1:]] & self.ends_letter[windows[:, :-1]]
        return nn.functional.pad(~goes_on, (1, 0), value=True).cumsum(dim=1)


def _is_letter(character: str) -> bool:
    # Byte-level BPE writes bytes that are no printable ASCII as letters from U+0100 on: a space, a
    # newline. Parts of other letters' UTF-8 bytes fall to words of their own, which is rare.
    return character.isalpha() and ord(character) < 0x100


def length_at(progress: float, step: int) -> int:
    """Sequence length in tokens: short while the model learns words, the full context at the end.

    Every eighth batch has texts as short as those of typical requests.
    """
    if step % SHORT_EVERY == 0:
        return SHORT_LENGTH
    if progress < 0.7:
        return MAX_LENGTH // 4
    return MAX_LENGTH // 2 if progress < 0.9 else MAX_LENGTH


def build_model(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> Qwen3ForCausalLM:
    """A decoder with heads of 32, two for each key-value head, and tied embeddings.

    Qwen3 is a Llama with normalized queries and keys. Under the full mask, this normalization
    shortened the phase in which attention does not yet find adjacent tokens.
    """
    end = tokenizer.eos_token_id
    num_heads = shape.width // 32
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=32,
        intermediate_size=shape.width * 8 // 3,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    # On a CPU the backward pass of fused attention is slower than plain matrix products.
    config._attn_implementation = "eager"
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:  # each layer starts as the identity
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    model.generation_config = GenerationConfig(
        bos_token_id=end, eos_token_id=end, pad_token_id=end, **stories.SAMPLING
    )
    return model


@torch.no_grad()
def restore(model: Qwen3ForCausalLM, bundle: Path) -> None:
    """Gives `model` the weights that int8 has kept of a hybrid."""
    weights = read_weights(bundle)
    for name, parameter in model.named_parameters():  # the tied head comes once
        parameter.copy_(weights[name])


def plan(settings: Settings) -> Plan:
    """How decoders are trained."""
    return Plan(
        settings.minutes,
        LEARNING_RATE,
        matrix_learning_rate=MATRIX_LEARNING_RATE,
        bf16=settings.bf16,
    )


def encode_stream(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], seed: int) -> Tensor:
    """One int32 stream of the passages of all texts, with an end-of-text token between them.

    Paragraphs (lines) stay whole; a newline separates those of one passage.
    """
    chance = random.Random(seed)
    backend = tokenizer.backend_tokenizer
    end = int(tokenizer.eos_token_id)
    (newline,) = backend.encode("\n", add_special_tokens=False).ids
    stream = [end]
    for text in texts:
        room = 0
        for encoding in backend.encode_batch(text.split("\n"), add_special_tokens=False):
            if len(encoding.ids) > room:
                room = chance.randint(*PASSAGE_TOKENS)
                if stream[-1] != end:
                    stream.append(end)
            else:
                stream.append(newline)
            stream.extend(encoding.ids)
            room -= len(encoding.ids)
        if stream[-1] != end:
            stream.append(end)
    return torch.tensor(stream, dtype=torch.int32)


@torch.no_grad()
def evaluate_causal(objective: HybridObjective, num_bytes: int) -> dict[str, float]:
    """Loss in nats per token, and bits per byte, over the objective's stream in full contexts.

    `num_bytes` is the length of the stream's text in UTF-8. The loss on the end-of-text tokens
    counts.
    """
    objective.model.eval()
    stream = objective.stream.long()
    total, count = 0.0, 0
    for start in range(0, len(stream) - 1, MAX_LENGTH):
        window = stream[start : start + MAX_LENGTH + 1]
        inputs, targets = window[None, :-1], window[1:]
        predicted = torch.ones(inputs.shape, dtype=torch.bool)
        logits = objective.logits(inputs, 1, predicted)
        total += cross_entropy(logits, targets.to(objective.device)).sum().item()
        count += len(targets)
    return {
        "validation_loss": total / count,
        "bits_per_byte": total / math.log(2) / num_bytes,
    }


@torch.no_grad()
def evaluate_masked(objective: HybridObjective) -> dict[str, float]:
    """Loss in nats and top-1 accuracy on hidden tokens of the objective's stream.

    15% of the words are hidden, with all their tokens, in windows from a fixed seed.
    """
    objective.model.eval()
    loss, hits, count = 0.0, 0, 0
    batch = 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(EVALUATED_WINDOWS // batch):
            windows = objective.sample_windows(batch, EVALUATED_LENGTH)
            chosen = objective.choose_words(windows, EVALUATED_SHARE)
            inputs = torch.where(chosen, objective.mask, windows)
            predicted = nn.functional.pad(chosen[:, 1:], (0, 1))
            logits = objective.logits(inputs, 0, predicted)
            targets = windows[chosen].to(objective.device)
            loss += cross_entropy(logits, targets).sum().item()
            hits += int((logits.argmax(-1) == targets).sum())
            count += len(targets)
    return {"masked_validation_loss": loss / count, "masked_top1": hits / count}


@torch.no_grad()
def predict(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> Prediction:
    """Fills the single [MASK] of `text` under the full mask, from the position before it."""
    model.eval()
    inputs = tokenizer(text, return_tensors="pt")["input_ids"]
    objective = HybridObjective(model, tokenizer, inputs[0], causal_share=0.0)
    before = nn.functional.pad(inputs[:, 1:] == tokenizer.mask_token_id, (0, 1))
    return best(objective.logits(inputs, 0, before)[0], tokenizer)
