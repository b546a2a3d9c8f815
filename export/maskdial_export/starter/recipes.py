"""From texts to a checkpoint folder with its card: one function for each language model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import BertForMaskedLM, PreTrainedTokenizerFast

from maskdial_export.starter import causal, masked
from maskdial_export.starter.card import (
    POLARITY,
    SOURCES,
    WORDNET,
    Card,
    Figure,
    machine,
    model_figures,
)
from maskdial_export.starter.pretrain import Plan, Record, pretrain
from maskdial_export.starter.settings import Settings

CLOZES = (
    "The cat sat on the [MASK] and looked at the mouse.",
    "She opened the [MASK] and walked into the garden.",
    "The king lived in a great [MASK].",
    "Good [MASK], said the old man.",
    "The film was [MASK] and I enjoyed every minute of it.",
)
PROMPTS = (
    "Once upon a time there was a little",
    "The old man looked at the sea and",
    '"Where are you going?" said the',
)


def train_masked(settings: Settings) -> Path:
    """Train the masked model and write `<out>/masked`."""
    torch.manual_seed(settings.seed)
    out = settings.out / "masked"
    books, definitions, reviews = masked.read_masked_texts(settings.corpus, settings.seed)
    tokenizer = masked.build_vocabulary(books, definitions, reviews)
    stream = masked.encode_stream(
        tokenizer, [*books.train, *definitions, *(reviews * masked.POLARITY_REPEATS)]
    )
    model = masked.build_model(tokenizer).to(settings.device)
    objective = masked.MaskedObjective(model, tokenizer, stream)
    record = _pretrain(objective, settings, masked.LEARNING_RATE, out, "masked")
    _save(model, tokenizer, out)
    held_out = masked.encode_stream(tokenizer, books.held_out)
    Card(
        title="maskdial starter: masked",
        summary=f"A small lower-casing BERT for filling in blanks: {_shape(model)}, whole-word "
        "masking, its own WordPiece vocabulary.",
        task="fill-mask",
        sources=[SOURCES, WORDNET, POLARITY],
        limits="A toy by size: it knows common words and simple grammar, few facts. English only.",
        figures={
            **model_figures(model, out),
            **_run_figures(record, settings, stream),
            **masked.evaluate(objective, held_out, num_batches=100),
        },
        samples={cloze: fill_mask(model, tokenizer, cloze) for cloze in CLOZES},
    ).write(out)
    return out


def train_causal(settings: Settings) -> Path:
    """Train the causal model and write `<out>/causal`."""
    torch.manual_seed(settings.seed)
    out = settings.out / "causal"
    books = causal.read_causal_texts(settings.corpus)
    tokenizer = causal.build_vocabulary(books)
    stream = causal.encode_stream(tokenizer, books.train)
    model = causal.build_model(tokenizer).to(settings.device)
    objective = causal.CausalObjective(model, stream)
    record = _pretrain(objective, settings, causal.LEARNING_RATE, out, "causal")
    _save(model, tokenizer, out)
    Card(
        title="maskdial starter: causal",
        summary=f"A small Llama that tells stories in the manner of old books: {_shape(model)}, "
        "grouped-query attention, tied embeddings, byte-level BPE.",
        task="text-generation",
        sources=[SOURCES],
        limits="A toy by size: sentences mostly hold together, stories do not. English only.",
        figures={
            **model_figures(model, out),
            **_run_figures(record, settings, stream),
            **causal.evaluate(objective, tokenizer, books.held_out),
        },
        samples={
            prompt: causal.sample_story(model, tokenizer, prompt, seed)
            for seed, prompt in enumerate(PROMPTS)
        },
    ).write(out)
    return out


@torch.no_grad()
def fill_mask(model: BertForMaskedLM, tokenizer: PreTrainedTokenizerFast, text: str) -> str:
    """The five likeliest tokens for the one [MASK] of `text`, with their probabilities."""
    model.eval()
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    place = inputs["input_ids"][0] == tokenizer.mask_token_id
    best = model(**inputs).logits[0, place].softmax(-1)[0].topk(5)
    tokens = tokenizer.convert_ids_to_tokens(best.indices.tolist())
    pairs = zip(tokens, best.values.tolist(), strict=True)
    return ", ".join(f"{token} {probability:.3f}" for token, probability in pairs)


def _pretrain(
    objective: masked.MaskedObjective | causal.CausalObjective,
    settings: Settings,
    learning_rate: float,
    out: Path,
    title: str,
) -> Record:
    plan = Plan(settings.minutes, learning_rate, bf16=settings.bf16)
    return pretrain(objective, plan, out, title, settings.resume)


def _save(
    model: BertForMaskedLM | causal.LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
) -> None:
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _run_figures(record: Record, settings: Settings, stream: torch.Tensor) -> Mapping[str, Figure]:
    return {
        "corpus_tokens": len(stream),
        "tokens_seen": record.tokens,
        "steps": record.steps,
        "training_minutes": record.seconds / 60.0,
        "machine": machine(settings.device.type, settings.threads),
        "precision": "bf16 autocast" if settings.bf16 else "fp32",
        "seed": settings.seed,
        "training_losses": record.losses,
    }


def _shape(model: BertForMaskedLM | causal.LlamaForCausalLM) -> str:
    config = model.config
    return f"{config.num_hidden_layers} layers of width {config.hidden_size}"
