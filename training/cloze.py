"""Cloze: a sentence with one blank, and the words that fill it well."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerFast

TOP_K = 5
Prediction = list[tuple[str, float]]
"""The likeliest tokens for a blank and their probabilities, likeliest first."""


@dataclass(frozen=True, slots=True)
class Cloze:
    """A sentence whose blank is written [MASK], and the accepted answers."""

    text: str
    answers: frozenset[str]

    def accepts(self, word: str) -> bool:
        """Whether a predicted token is an answer, ignoring spaces and case."""
        return word.strip().casefold() in self.answers


def read_cloze(path: Path) -> list[Cloze]:
    """Reads a JSON list of objects with `text` and `answers`."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return [
        Cloze(row["text"], frozenset(answer.casefold() for answer in row["answers"]))
        for row in rows
    ]


def best(logits: Tensor, tokenizer: PreTrainedTokenizerFast) -> Prediction:
    """The `TOP_K` likeliest tokens of `logits` `[vocabulary]`."""
    likeliest = logits.softmax(-1).topk(TOP_K)
    tokens = [str(tokenizer.decode([token])) for token in likeliest.indices.tolist()]
    return list(zip(tokens, likeliest.values.tolist(), strict=True))


def shown(prediction: Prediction) -> str:
    """A prediction on one line."""
    return ", ".join(f"{token.strip()} {probability:.3f}" for token, probability in prediction)


def solved(clozes: Sequence[Cloze], predict: Callable[[str], Prediction]) -> float:
    """The share of sentences with an accepted answer among the `TOP_K` likeliest tokens."""
    hits = sum(
        any(cloze.accepts(word) for word, _ in predict(cloze.text)[:TOP_K]) for cloze in clozes
    )
    return hits / len(clozes)
