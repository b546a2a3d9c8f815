"""The causal language model: a small Llama that goes on telling a story."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from maskdial_export.starter.data import Books
from maskdial_export.starter.pretrain import cross_entropy
from maskdial_export.starter.vocabulary import train_byte_level_bpe

VOCABULARY_SIZE = 6000
MAX_LENGTH = 512
LEARNING_RATE = 3e-3
TOKENS_PER_BATCH = 2048


class CausalObjective:
    """Next-token prediction over random windows of one long token stream."""

    def __init__(self, model: LlamaForCausalLM, stream: Tensor) -> None:
        self.model = model
        self.stream = stream
        self.device = next(model.parameters()).device

    def batch_loss(self, progress: float) -> tuple[Tensor, int]:
        length = length_at(progress)
        inputs = self.sample_windows(TOKENS_PER_BATCH // length, length + 1)
        return self.loss(inputs), inputs.shape[0] * length

    def sample_windows(self, batch: int, length: int) -> Tensor:
        """`[batch, length]` int64 runs of the stream from random places."""
        length = min(length, len(self.stream) - 1)
        starts = torch.randint(len(self.stream) - length, (batch, 1))
        return self.stream[starts + torch.arange(length)].long()

    def loss(self, inputs: Tensor) -> Tensor:
        """Mean cross-entropy, in nats, of all but the first token of `inputs` `[batch, length]`."""
        inputs = inputs.to(self.device)
        logits = self.model(input_ids=inputs[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten()).mean()


def length_at(progress: float) -> int:
    """Sequence length in tokens: short while the model learns words, the full context last."""
    if progress < 0.7:
        return MAX_LENGTH // 4
    return MAX_LENGTH // 2 if progress < 0.9 else MAX_LENGTH


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 5 layers and width 128: 4 query heads, 2 key-value heads, tied embeddings."""
    eos = tokenizer.eos_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    # On a CPU the backward pass of the fused attention takes longer than the plain products.
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=eos, eos_token_id=eos, pad_token_id=eos, do_sample=True, temperature=0.7
    )
    return model


def build_vocabulary(books: Books) -> PreTrainedTokenizerFast:
    """Books alone: a dictionary's lines would teach a storyteller to define words."""
    return train_byte_level_bpe(books.train, VOCABULARY_SIZE, MAX_LENGTH)


def encode_stream(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """One int32 stream of all texts, each ended by the end-of-text token."""
    stream: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(list(texts)):
        stream.extend(encoding.ids)
        stream.append(int(tokenizer.eos_token_id))
    return torch.tensor(stream, dtype=torch.int32)


@torch.no_grad()
def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> dict[str, float]:
    """Loss (nats per token) and bits per UTF-8 byte over `texts`, cut into full contexts."""
    model.eval()
    stream = encode_stream(tokenizer, texts).long()
    objective = CausalObjective(model, stream)
    num_bytes = sum(len(text.encode()) + 1 for text in texts)
    total, count = 0.0, 0
    for start in range(0, len(stream) - 1, MAX_LENGTH):
        window = stream[start : start + MAX_LENGTH + 1].unsqueeze(0)
        num_tokens = window.shape[1] - 1
        total += objective.loss(window).item() * num_tokens
        count += num_tokens
    return {
        "validation_loss": total / count,
        "bits_per_byte": total / math.log(2) / num_bytes,
    }


@torch.no_grad()
def sample_story(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str, seed: int
) -> str:
    """`prompt` and up to 80 further tokens, drawn at temperature 0.7 from the whole vocabulary."""
    model.eval()
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(
            **inputs, max_new_tokens=80, do_sample=True, temperature=0.7, top_k=0
        )
    story = tokenizer.decode(output[0], skip_special_tokens=True)
    assert isinstance(story, str)
    return story
