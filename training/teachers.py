"""The sentiment model's teachers: for each fold of the sentences, two models that never saw it.

One is a bag-of-n-grams model, the other a fine-tuned copy of the masked model. The shipped model
learns from the labels, from their scores of the fold they did not see, and from all teachers' mean
score of spliced sentences (cross-fitted distillation).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from training import sentiment
from training.data import RatedSentence
from training.naive_bayes import NaiveBayesRegression
from training.pretrain import Plan, pretrain
from training.sentiment import Example, SentimentObjective
from training.settings import Settings

FOLDS = 4
LEARNING_RATE = 7e-4
SPLICED_PER_SENTENCE = 1.0
SPLICED_WORDS = 14
"""The most words of a sentence on either side of a splice."""
TEACHER_SHARES = (0.4, 0.6)
"""Weights of the n-gram model's and the fine-tuned model's log-odds in the blend."""


@dataclass(frozen=True, slots=True)
class Fold:
    """The rows that a fold's teachers learn from, and those that they score."""

    train: list[int]
    held_out: list[int]


@dataclass(frozen=True, slots=True)
class Lesson:
    """The scores of one fold's teachers: float32 log-odds of POSITIVE."""

    ngram_odds: Tensor
    """`[held-out rows]`, from the n-gram model."""
    model_odds: Tensor
    """`[held-out rows]`, from the fine-tuned model."""
    spliced_odds: Tensor
    """`[spliced texts]`, both blended."""
    weights: dict[str, Tensor]
    """Of the fine-tuned model."""


@dataclass(frozen=True, slots=True)
class Teachers:
    """The lessons of all folds, combined."""

    ngram_odds: Tensor
    """`[sentences]`; each row is scored by the teacher that did not see it."""
    model_odds: Tensor
    """`[sentences]`, likewise."""
    spliced_odds: Tensor
    """`[spliced texts]`, the mean over the folds."""
    weights: list[dict[str, Tensor]]

    @property
    def unseen_odds(self) -> Tensor:
        """`[sentences]`, both kinds of teacher blended."""
        return blend(self.ngram_odds, self.model_odds)


def train_teachers(
    settings: Settings,
    minutes: float,
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[RatedSentence],
    spliced: Sequence[str],
    out: Path,
) -> Teachers:
    """Trains every fold's teachers in `minutes`; with `resume`, only those missing in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    folds = split_folds(len(sentences), FOLDS, settings.seed)
    ngram_odds, model_odds = torch.zeros(len(sentences)), torch.zeros(len(sentences))
    lessons = []
    for number, fold in enumerate(folds):
        saved = out / f"lesson-{number}.pt"
        if settings.resume and saved.exists():
            lesson = Lesson(*torch.load(saved, weights_only=True))
        else:
            lesson = _teach_fold(
                settings, minutes / FOLDS, tokenizer, sentences, spliced, fold, number
            )
            parts = (lesson.ngram_odds, lesson.model_odds, lesson.spliced_odds, lesson.weights)
            torch.save(parts, saved)
        ngram_odds[fold.held_out] = lesson.ngram_odds
        model_odds[fold.held_out] = lesson.model_odds
        lessons.append(lesson)
    return Teachers(
        ngram_odds=ngram_odds,
        model_odds=model_odds,
        spliced_odds=torch.stack([lesson.spliced_odds for lesson in lessons]).mean(dim=0),
        weights=[lesson.weights for lesson in lessons],
    )


def split_folds(num_rows: int, num_folds: int, seed: int) -> list[Fold]:
    """Random folds whose sizes differ by at most one row."""
    rows = list(range(num_rows))
    random.Random(seed).shuffle(rows)
    parts = [rows[start::num_folds] for start in range(num_folds)]
    return [
        Fold([row for other in parts if other is not part for row in other], part) for part in parts
    ]


def splice(sentences: Sequence[RatedSentence], count: int, seed: int) -> list[str]:
    """`count` new texts, each the beginning of one sentence and the end of another."""
    chance = random.Random(seed)
    texts = []
    for _ in range(count):
        first = chance.choice(sentences).text.split()
        second = chance.choice(sentences).text.split()
        head = first[: chance.randint(1, max(1, min(len(first), SPLICED_WORDS)))]
        texts.append(
            " ".join(head + second[-chance.randint(1, max(1, min(len(second), SPLICED_WORDS))) :])
        )
    return texts


def blend(ngram_odds: Tensor, model_odds: Tensor) -> Tensor:
    """The weighted sum of both teachers' log-odds."""
    return TEACHER_SHARES[0] * ngram_odds + TEACHER_SHARES[1] * model_odds


def _teach_fold(
    settings: Settings,
    minutes: float,
    tokenizer: PreTrainedTokenizerFast,
    sentences: Sequence[RatedSentence],
    spliced: Sequence[str],
    fold: Fold,
    number: int,
) -> Lesson:
    texts = [sentence.text for sentence in sentences]
    labels = torch.tensor([float(sentence.label) for sentence in sentences])
    rows = sentiment.encode(tokenizer, texts)
    ngrams = NaiveBayesRegression([texts[row] for row in fold.train], labels[fold.train])
    lexicon = sentiment.polarity_lexicon(
        [rows[row] for row in fold.train], labels[fold.train], len(tokenizer)
    )
    # All folds start from the same head: otherwise averaging their weights would be meaningless.
    torch.manual_seed(settings.seed)
    model = sentiment.build_model(settings.out / "masked", lexicon).to(settings.device)
    examples = [Example(rows[row], float(labels[row])) for row in fold.train]
    objective = SentimentObjective(model, tokenizer, examples, seed=number)
    plan = Plan(minutes, LEARNING_RATE, bf16=settings.bf16)
    out = settings.out / "sentiment" / f"teacher-{number}"
    pretrain(objective, plan, out, f"teacher {number}", settings.resume)
    unseen = [rows[row] for row in fold.held_out]
    spliced_rows = sentiment.encode(tokenizer, spliced)
    return Lesson(
        ngram_odds=ngrams.logits([texts[row] for row in fold.held_out]),
        model_odds=sentiment.score(model, tokenizer, unseen, settings.bf16),
        spliced_odds=blend(
            ngrams.logits(spliced),
            sentiment.score(model, tokenizer, spliced_rows, settings.bf16),
        ),
        weights={name: value.cpu() for name, value in model.state_dict().items()},
    )
