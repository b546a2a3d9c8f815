"""The probabilities of a tagger's labels for each token of a text, special tokens included."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import TaskName
from maskdial.bundle.texts import tokenizing_seconds
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks.hybrid_rows import all_rows
from maskdial.masked.tasks.logits import finite, softmax
from maskdial.masked.tasks.task import (
    REFUSE,
    Reading,
    TaskModel,
    TaskRequest,
    Truncation,
    read_inputs,
)

_SECONDS_PER_TOKEN = 2e-6


@dataclass(frozen=True, slots=True)
class TokenScoresRequest(TaskRequest[list[NDArray[np.float64]]]):
    """Texts, or token ids, whose tokens to score: float64 (num_tokens, num_labels) for each.

    ``raw_scores``: the scores are logits, not their softmax.
    """

    task: ClassVar[str] = "token-scores"
    head: ClassVar[TaskName] = "token-classify"

    texts: Sequence[TextOrIds]
    truncation: Truncation = REFUSE
    raw_scores: bool = False

    @property
    def num_texts(self) -> int:
        return len(self.texts)

    @property
    def read_seconds(self) -> float:
        return tokenizing_seconds([text for text in self.texts if isinstance(text, str)])

    def read(self, model: TaskModel) -> Reading[list[NDArray[np.float64]]]:
        inputs, num_truncated = read_inputs(model, self.texts, self.truncation)

        def answer(results: Sequence[MaskedResult]) -> list[NDArray[np.float64]]:
            logits = [finite(result.logits) for result in results]
            return logits if self.raw_scores else [softmax(each) for each in logits]

        seconds = sum(each.length for each in inputs) * _SECONDS_PER_TOKEN
        return Reading(all_rows(inputs), answer, num_truncated, seconds)
