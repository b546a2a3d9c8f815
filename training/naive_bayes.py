"""A bag-of-n-grams sentiment classifier: a teacher that knows words but not their order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

WORDS = re.compile(r"[a-z0-9]+(?:'[a-z]+)?|[!?.,;:]")
SMOOTHING = 1.0
L2 = 0.0003
STEPS = 150


class NaiveBayesRegression:
    """Logistic regression over n-grams (n = 1, 2), scaled by their naive Bayes log-count ratio.

    NB-SVM of Wang and Manning, "Baselines and Bigrams" (ACL 2012), with a logistic loss.
    """

    def __init__(self, texts: Sequence[str], labels: Tensor) -> None:
        """Trains on texts with `labels` `[len(texts)]` of 0.0 or 1.0."""
        counts: dict[str, int] = {}
        for text in texts:
            for gram in ngrams(text):
                counts[gram] = counts.get(gram, 0) + 1
        kept = [gram for gram, count in counts.items() if count > 1]
        self.number = {gram: number for number, gram in enumerate(kept)}
        features = self._features(texts)
        positive = SMOOTHING + torch.mv(features.t(), labels)
        negative = SMOOTHING + torch.mv(features.t(), 1.0 - labels)
        self.ratio = torch.log(positive / positive.sum()) - torch.log(negative / negative.sum())
        self.weight = torch.ones_like(self.ratio, requires_grad=True)
        self.bias = torch.zeros((), requires_grad=True)
        optimizer = torch.optim.Adam([self.weight, self.bias], lr=0.05)
        for _ in range(STEPS):
            logits = torch.mv(features, self.ratio * self.weight) + self.bias
            loss = functional.binary_cross_entropy_with_logits(logits, labels)
            loss = loss + L2 * (self.weight**2).sum()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    @torch.no_grad()
    def logits(self, texts: Sequence[str]) -> Tensor:
        """`[len(texts)]` fp32 log-odds of the positive class."""
        return torch.mv(self._features(texts), self.ratio * self.weight) + self.bias

    def _features(self, texts: Sequence[str]) -> Tensor:
        rows: list[int] = []
        columns: list[int] = []
        for row, text in enumerate(texts):
            found = [self.number[gram] for gram in ngrams(text) if gram in self.number]
            rows.extend([row] * len(found))
            columns.extend(found)
        shape = (len(texts), len(self.number))
        places = torch.tensor([rows, columns], dtype=torch.int64)
        return torch.sparse_coo_tensor(
            places, torch.ones(len(rows)), shape, check_invariants=True
        ).coalesce()


def ngrams(text: str) -> set[str]:
    """The distinct words and pairs of adjacent words of `text`, in lower case."""
    words = WORDS.findall(text.lower())
    return {*words, *(f"{first} {second}" for first, second in pairwise(words))}
