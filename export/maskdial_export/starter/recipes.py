"""From texts to a checkpoint folder with its card: one function for each model."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    BertForMaskedLM,
    BertForSequenceClassification,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from maskdial_export.starter import causal, masked, sentiment, teachers
from maskdial_export.starter.card import (
    POLARITY,
    SOURCES,
    WORDNET,
    Card,
    Figure,
    machine,
    model_figures,
)
from maskdial_export.starter.data import (
    POLARITY_FILE,
    SENTIMENT_VALIDATION_FILE,
    read_books,
    read_rated_sentences,
)
from maskdial_export.starter.pretrain import Objective, Plan, Record, pretrain
from maskdial_export.starter.settings import Settings

TEACHERS_TIME = 0.5
"""Share of the sentiment model's time that its teachers get."""
CLOZES = (
    "The cat sat on the [MASK] and looked at the mouse.",
    "She opened the [MASK] and walked into the garden.",
    "The king lived in a great [MASK].",
    "Good [MASK], said the old man.",
    "The film was [MASK] and I enjoyed every minute of it.",
)
REVIEWS = (
    "A warm, funny and touching film.",
    "The plot is dull and the acting is worse.",
    "Not bad at all.",
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
    tokenizer = _tokenizer(
        out, settings, lambda: masked.build_vocabulary(books, definitions, reviews)
    )
    stream = masked.encode_stream(
        tokenizer, [*books.train, *definitions, *(reviews * masked.POLARITY_REPEATS)]
    )
    model = masked.build_model(tokenizer).to(settings.device)
    objective = masked.MaskedObjective(model, tokenizer, stream)
    record = _train(objective, settings, settings.minutes, masked.LEARNING_RATE, out)
    model.save_pretrained(out)
    masked_card(model, tokenizer, settings, out, _run_figures(record, settings, stream)).write(out)
    return out


def masked_card(
    model: BertForMaskedLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    out: Path,
    run: Mapping[str, Figure],
) -> Card:
    """Measure the masked model saved in `out`; `run` holds the figures of its training."""
    held_out = masked.encode_stream(tokenizer, read_books(settings.corpus).held_out)
    objective = masked.MaskedObjective(model, tokenizer, held_out)
    half, full = masked.MAX_LENGTH // 2, masked.MAX_LENGTH
    loss, top1 = masked.evaluate(objective, held_out, half)
    full_loss, full_top1 = masked.evaluate(objective, held_out, full)
    return Card(
        title="maskdial starter: masked",
        summary=f"A small lower-casing BERT for filling in blanks: {_shape(model)}, whole-word "
        f"masking, its own WordPiece vocabulary of {len(tokenizer)} tokens.",
        task="fill-mask",
        sources=[SOURCES, WORDNET, POLARITY],
        limits="A toy by size: it knows common words and simple grammar, few facts. English "
        f"only. Texts of up to {half} tokens suit it best: the second half of its {full} "
        "positions was trained in the last tenth of the time only, and shows it (see the "
        "figures). Its texts are old books for the most part.",
        figures={
            **model_figures(model, out),
            **run,
            "validation_loss": loss,
            "masked_top1": top1,
            f"validation_loss_at_{full}_tokens": full_loss,
            f"masked_top1_at_{full}_tokens": full_top1,
        },
        samples={cloze: fill_mask(model, tokenizer, cloze) for cloze in CLOZES},
    )


def train_sentiment(settings: Settings) -> Path:
    """Fine-tune `<out>/masked` and write `<out>/sentiment`."""
    torch.manual_seed(settings.seed)
    out, masked_checkpoint = settings.out / "sentiment", settings.out / "masked"
    tokenizer = AutoTokenizer.from_pretrained(masked_checkpoint)
    sentences = read_rated_sentences(settings.corpus / POLARITY_FILE)
    labels = torch.tensor([float(sentence.label) for sentence in sentences])
    num_spliced = round(len(sentences) * teachers.SPLICED_PER_SENTENCE)
    spliced = teachers.splice(sentences, num_spliced, settings.seed)
    minutes = settings.minutes * TEACHERS_TIME
    taught = teachers.train_teachers(
        settings, minutes, tokenizer, sentences, spliced, out / "teachers"
    )

    texts = [sentence.text for sentence in sentences]
    targets = sentiment.distillation_targets(labels, taught.unseen_odds)
    examples = sentiment.build_examples(tokenizer, texts, targets)
    soft = torch.sigmoid(taught.spliced_odds).tolist()
    examples += sentiment.build_examples(tokenizer, spliced, soft)
    unmarked = torch.zeros(len(tokenizer))
    model = sentiment.build_model(masked_checkpoint, unmarked).to(settings.device)
    sentiment.average_weights(model, taught.weights)
    averaged = measure_sentiment(model, tokenizer, settings)
    objective = sentiment.SentimentObjective(model, tokenizer, examples, settings.seed)
    minutes = settings.minutes - minutes
    record = _train(objective, settings, minutes, sentiment.LEARNING_RATE, out)
    model.save_pretrained(out)
    # Read again: encoding left its own truncation length in `tokenizer`.
    AutoTokenizer.from_pretrained(masked_checkpoint).save_pretrained(out)
    run: dict[str, Figure] = {
        "labelled_sentences": len(sentences),
        "spliced_texts": len(spliced),
        "tokens_seen_after_teachers": record.tokens,
        "steps_after_teachers": record.steps,
        "training_minutes": settings.minutes,
        "machine": machine(settings.device.type, settings.threads),
        "precision": _precision(settings),
        "seed": settings.seed,
        "training_losses": record.losses,
        "ngram_teachers_held_out_accuracy": sentiment.accuracy(taught.ngram_odds, labels),
        "model_teachers_held_out_accuracy": sentiment.accuracy(taught.model_odds, labels),
        "blended_teachers_held_out_accuracy": sentiment.accuracy(taught.unseen_odds, labels),
        "averaged_teachers_sst2_validation_accuracy": averaged,
    }
    sentiment_card(model, tokenizer, settings, out, run).write(out)
    shutil.rmtree(out / "teachers")
    return out


def sentiment_card(
    model: BertForSequenceClassification,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    out: Path,
    run: Mapping[str, Figure],
) -> Card:
    """Measure the sentiment model saved in `out`; `run` holds the figures of its training."""
    return Card(
        title="maskdial starter: sentiment",
        summary="The masked starter model fine-tuned to tell positive from negative sentences of "
        "film reviews, with labels and with the scores of teachers trained on other folds.",
        task="text-classification",
        sources=[POLARITY, SOURCES, WORDNET],
        limits="A toy by size, trained on film reviews alone: it knows no neutral class and "
        "misses irony. English only. SST-2 validation served to measure, never to train or choose.",
        figures={
            **model_figures(model, out),
            **run,
            "sst2_validation_accuracy": measure_sentiment(model, tokenizer, settings),
        },
        samples={review: classify(model, tokenizer, review) for review in REVIEWS},
    )


def train_causal(settings: Settings) -> Path:
    """Train the causal model and write `<out>/causal`."""
    torch.manual_seed(settings.seed)
    out = settings.out / "causal"
    books = read_books(settings.corpus)
    tokenizer = _tokenizer(out, settings, lambda: causal.build_vocabulary(books))
    stream = causal.encode_stream(tokenizer, books.train)
    model = causal.build_model(tokenizer).to(settings.device)
    objective = causal.CausalObjective(model, stream)
    record = _train(objective, settings, settings.minutes, causal.LEARNING_RATE, out)
    model.save_pretrained(out)
    causal_card(model, tokenizer, settings, out, _run_figures(record, settings, stream)).write(out)
    return out


def causal_card(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    settings: Settings,
    out: Path,
    run: Mapping[str, Figure],
) -> Card:
    """Measure the causal model saved in `out`; `run` holds the figures of its training."""
    return Card(
        title="maskdial starter: causal",
        summary=f"A small Llama that tells stories in the manner of old books: {_shape(model)}, "
        "grouped-query attention, tied embeddings, byte-level BPE vocabulary of "
        f"{len(tokenizer)} tokens.",
        task="text-generation",
        sources=[SOURCES],
        limits="A toy by size: sentences mostly hold together, stories do not. English only.",
        figures={
            **model_figures(model, out),
            **run,
            **causal.evaluate(model, tokenizer, read_books(settings.corpus).held_out),
        },
        samples={
            prompt: causal.sample_story(model, tokenizer, prompt, seed)
            for seed, prompt in enumerate(PROMPTS)
        },
    )


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


def classify(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, text: str
) -> str:
    """The likelier label of `text` with its probability."""
    rows = sentiment.encode(tokenizer, [text])
    positive = float(torch.sigmoid(sentiment.score(model, tokenizer, rows, bf16=False)[0]))
    label = "POSITIVE" if positive > 0.5 else "NEGATIVE"
    return f"{label} {max(positive, 1.0 - positive):.3f}"


def measure_sentiment(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, settings: Settings
) -> float:
    """Accuracy on the validation part of SST-2, in fp32."""
    sentences = read_rated_sentences(settings.corpus / SENTIMENT_VALIDATION_FILE)
    rows = sentiment.encode(tokenizer, [sentence.text for sentence in sentences])
    labels = torch.tensor([float(sentence.label) for sentence in sentences])
    return sentiment.accuracy(sentiment.score(model, tokenizer, rows, bf16=False), labels)


def _tokenizer(
    out: Path, settings: Settings, build: Callable[[], PreTrainedTokenizerFast]
) -> PreTrainedTokenizerFast:
    # Saved before training starts, so that a resumed run numbers its tokens as it did before.
    if not (settings.resume and (out / "tokenizer.json").exists()):
        build().save_pretrained(out)
    return AutoTokenizer.from_pretrained(out)


def _train(
    objective: Objective, settings: Settings, minutes: float, learning_rate: float, out: Path
) -> Record:
    plan = Plan(minutes, learning_rate, bf16=settings.bf16)
    return pretrain(objective, plan, out, out.name, settings.resume)


def _run_figures(record: Record, settings: Settings, stream: torch.Tensor) -> dict[str, Figure]:
    return {
        "corpus_tokens": len(stream),
        "tokens_seen": record.tokens,
        "steps": record.steps,
        "training_minutes": record.seconds / 60.0,
        "machine": machine(settings.device.type, settings.threads),
        "precision": _precision(settings),
        "seed": settings.seed,
        "training_losses": record.losses,
    }


def _precision(settings: Settings) -> str:
    return "bf16 autocast" if settings.bf16 else "fp32"


def _shape(model: BertForMaskedLM | LlamaForCausalLM) -> str:
    config = model.config
    return f"{config.num_hidden_layers} layers of width {config.hidden_size}"
