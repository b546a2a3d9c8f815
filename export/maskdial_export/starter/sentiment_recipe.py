"""The sentiment model from rated sentences to checkpoint: teachers, distillation, card."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, BertForSequenceClassification, PreTrainedTokenizerFast

from maskdial_export.starter import sentiment
from maskdial_export.starter.card import (
    POLARITY,
    SOURCES,
    WORDNET,
    Card,
    machine,
    model_figures,
)
from maskdial_export.starter.data import (
    POLARITY_FILE,
    SENTIMENT_VALIDATION_FILE,
    RatedSentence,
    read_rated_sentences,
)
from maskdial_export.starter.pretrain import Plan, pretrain
from maskdial_export.starter.sentiment import Example
from maskdial_export.starter.settings import Settings

TEACHERS_TIME = 0.5
"""Share of the time budget the teachers get; the shipped model has the rest."""
SAMPLES = (
    "A warm, funny and touching film.",
    "The plot is dull and the acting is worse.",
    "Not bad at all.",
)


@dataclass(frozen=True, slots=True)
class Teachers:
    """What the teachers learned: scores of rows they never saw, and of spliced texts."""

    unseen_odds: Tensor
    """`[rows]` blended log-odds, each row's from the one fold that held it out."""
    spliced_odds: Tensor
    states: list[dict[str, Tensor]]
    ngram_accuracy: float
    model_accuracy: float


def train_sentiment(settings: Settings) -> Path:
    """Fine-tune `<out>/masked` and write `<out>/sentiment`."""
    torch.manual_seed(settings.seed)
    out, masked_checkpoint = settings.out / "sentiment", str(settings.out / "masked")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(masked_checkpoint)
    sentences = read_rated_sentences(settings.corpus / POLARITY_FILE)
    labels = torch.tensor([float(sentence.label) for sentence in sentences])
    num_spliced = round(len(sentences) * sentiment.SPLICED_PER_SENTENCE)
    spliced = sentiment.splice(sentences, num_spliced, settings.seed)
    teachers = _train_teachers(settings, tokenizer, sentences, spliced, out)

    rows = sentiment.encode(tokenizer, [sentence.text for sentence in sentences])
    targets = sentiment.distillation_targets(labels, teachers.unseen_odds)
    examples = [Example(row, target) for row, target in zip(rows, targets, strict=True)]
    soft = torch.sigmoid(teachers.spliced_odds).tolist()
    spliced_rows = sentiment.encode(tokenizer, spliced)
    examples += [Example(row, target) for row, target in zip(spliced_rows, soft, strict=True)]
    model = sentiment.build_model(masked_checkpoint).to(settings.device)
    sentiment.average_weights(model, teachers.states)
    average_accuracy = measure(model, tokenizer, settings)
    objective = sentiment.SentimentObjective(model, tokenizer, examples, settings.seed)
    minutes = settings.minutes * (1.0 - TEACHERS_TIME)
    plan = Plan(minutes, sentiment.LEARNING_RATE, bf16=settings.bf16)
    record = pretrain(objective, plan, out, "sentiment", settings.resume)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    shutil.rmtree(out / "teachers", ignore_errors=True)
    Card(
        title="maskdial starter: sentiment",
        summary="The masked starter model fine-tuned to tell positive from negative sentences of "
        "film reviews, in part by cross-fitted distillation.",
        task="text-classification",
        sources=[POLARITY, SOURCES, WORDNET],
        limits="A toy by size, trained on film reviews alone; it knows no neutral class and "
        "misses irony. SST-2 validation served for measuring only. English only.",
        figures={
            **model_figures(model, out),
            "labelled_sentences": len(sentences),
            "spliced_texts": len(spliced),
            "tokens_seen_after_teachers": record.tokens,
            "training_minutes_after_teachers": record.seconds / 60.0,
            "training_minutes": settings.minutes,
            "machine": machine(settings.device.type, settings.threads),
            "seed": settings.seed,
            "training_losses": record.losses,
            "ngram_teacher_held_out_accuracy": teachers.ngram_accuracy,
            "model_teacher_held_out_accuracy": teachers.model_accuracy,
            "blended_teachers_held_out_accuracy": sentiment.accuracy(teachers.unseen_odds, labels),
            "averaged_teachers_sst2_validation_accuracy": average_accuracy,
            "sst2_validation_accuracy": measure(model, tokenizer, settings),
        },
        samples=_classify(model, tokenizer),
    ).write(out)
    return out


def measure(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, settings: Settings
) -> float:
    """Accuracy on the validation part of SST-2, in fp32."""
    sentences = read_rated_sentences(settings.corpus / SENTIMENT_VALIDATION_FILE)
    rows = sentiment.encode(tokenizer, [sentence.text for sentence in sentences])
    labels = torch.tensor([float(sentence.label) for sentence in sentences])
    return sentiment.accuracy(sentiment.score(model, tokenizer, rows, bf16=False), labels)


def _train_teachers(
    settings: Settings,
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[RatedSentence],
    spliced: Sequence[str],
    out: Path,
) -> Teachers:
    texts = [sentence.text for sentence in sentences]
    labels = torch.tensor([float(sentence.label) for sentence in sentences])
    rows, spliced_rows = sentiment.encode(tokenizer, texts), sentiment.encode(tokenizer, spliced)
    ngram_odds, model_odds = torch.zeros(len(rows)), torch.zeros(len(rows))
    spliced_odds = torch.zeros(len(spliced))
    states = []
    minutes = settings.minutes * TEACHERS_TIME / sentiment.FOLDS
    plan = Plan(minutes, sentiment.LEARNING_RATE, bf16=settings.bf16)
    for number, fold in enumerate(
        sentiment.split_folds(len(rows), sentiment.FOLDS, settings.seed)
    ):
        ngrams = sentiment.teach_ngrams(texts, labels, fold)
        ngram_odds[fold.held_out] = ngrams.logits([texts[row] for row in fold.held_out])
        # Every teacher starts from one and the same head, else their mean would mean nothing.
        torch.manual_seed(settings.seed)
        model = sentiment.build_model(str(settings.out / "masked")).to(settings.device)
        examples = [Example(rows[row], float(labels[row])) for row in fold.train]
        objective = sentiment.SentimentObjective(model, tokenizer, examples, number)
        pretrain(objective, plan, out / f"teacher-{number}", f"teacher {number}", resume=False)
        unseen = sentiment.score(
            model, tokenizer, [rows[row] for row in fold.held_out], settings.bf16
        )
        model_odds[fold.held_out] = unseen
        spliced_odds += sentiment.blend(
            ngrams.logits(spliced),
            sentiment.score(model, tokenizer, spliced_rows, settings.bf16),
        )
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        print(
            f"teacher {number}: n-grams "
            f"{sentiment.accuracy(ngram_odds[fold.held_out], labels[fold.held_out]):.4f}, model "
            f"{sentiment.accuracy(unseen, labels[fold.held_out]):.4f} on rows held out",
            flush=True,
        )
    return Teachers(
        unseen_odds=sentiment.blend(ngram_odds, model_odds),
        spliced_odds=spliced_odds / sentiment.FOLDS,
        states=states,
        ngram_accuracy=sentiment.accuracy(ngram_odds, labels),
        model_accuracy=sentiment.accuracy(model_odds, labels),
    )


def _classify(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast
) -> dict[str, str]:
    odds = sentiment.score(model, tokenizer, sentiment.encode(tokenizer, SAMPLES), bf16=False)
    return {
        text: f"POSITIVE {float(p):.3f}"
        for text, p in zip(SAMPLES, torch.sigmoid(odds), strict=True)
    }
