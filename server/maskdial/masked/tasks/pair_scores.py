"""Scores of pairs of texts: what a reranker gives a pair, or the cosine of two embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from maskdial.bundle.manifest import Manifest, TaskName
from maskdial.errors import ValidationError
from maskdial.masked.request import MaskedResult
from maskdial.masked.tasks.embed import SimilarityRequest
from maskdial.masked.tasks.rerank import RerankRequest
from maskdial.masked.tasks.task import REFUSE, Reading, TaskModel, TaskRequest, Truncation


@dataclass(frozen=True, slots=True)
class PairScoresRequest(TaskRequest[list[float]]):
    """One text and many to score it with, or as many of both, which are paired in order.

    ``raw_scores``: the scores of a cross-encoder are its logits, not their sigmoids.
    """

    task: ClassVar[str] = "score-pairs"
    head: ClassVar[TaskName] = "classify"

    firsts: Sequence[str]
    seconds: Sequence[str]
    truncation: Truncation = REFUSE
    raw_scores: bool = False

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        return RerankRequest.serves(manifest) or SimilarityRequest.serves(manifest)

    @property
    def num_texts(self) -> int:
        return len(self.seconds)

    def least_inputs(self, model: TaskModel) -> int:
        apart = SimilarityRequest.serves(model.manifest)
        return len(self.seconds) + len(self.firsts) * apart

    @property
    def read_seconds(self) -> float:
        return sum(self._ranking(*group).read_seconds for group in self._groups())

    def check(self, model: TaskModel) -> None:
        if len(self.firsts) not in (1, len(self.seconds)):
            raise ValidationError(
                f"has {len(self.firsts)} texts for {len(self.seconds)}; send one, or as many",
                field="firsts",
            )

    def read(self, model: TaskModel) -> Reading[list[float]]:
        read = self._read_similar if SimilarityRequest.serves(model.manifest) else self._read_ranked
        readings = []
        for number, group in enumerate(self._groups()):
            try:
                readings.append(read(model, *group))
            except ValidationError as error:
                raise self._about_a_pair(error, number) from error
        return _joined(readings)

    def _groups(self) -> list[tuple[str, Sequence[str]]]:
        """Each first text with those that it is scored with."""
        if len(self.firsts) == 1:
            return [(self.firsts[0], self.seconds)]
        pairs = zip(self.firsts, self.seconds, strict=True)
        return [(first, [second]) for first, second in pairs]

    def _ranking(self, first: str, seconds: Sequence[str]) -> RerankRequest:
        return RerankRequest(first, seconds, self.truncation, self.raw_scores)

    def _read_ranked(
        self, model: TaskModel, first: str, seconds: Sequence[str]
    ) -> Reading[list[float]]:
        ranks = self._ranking(first, seconds).read(model)
        return ranks.map(
            lambda found: [each.score for each in sorted(found, key=lambda rank: rank.index)]
        )

    def _read_similar(
        self, model: TaskModel, first: str, seconds: Sequence[str]
    ) -> Reading[list[float]]:
        cosines = SimilarityRequest(first, seconds, self.truncation).read(model)
        return cosines.map(lambda found: [float(each) for each in found])

    def _about_a_pair(self, error: ValidationError, group: int) -> ValidationError:
        """An error about a group's query or texts, as one about this request's texts."""
        single = len(self.firsts) == 1
        if error.index is None:
            return ValidationError(error.message, field="firsts", index=None if single else group)
        return ValidationError(
            error.message, field="seconds", index=error.index if single else group
        )


def _joined(readings: Sequence[Reading[list[float]]]) -> Reading[list[float]]:
    """Readings of one pass each, as one whose inputs are queued together."""

    def answer(results: Sequence[MaskedResult]) -> list[float]:
        scores: list[float] = []
        start = 0
        for reading in readings:
            end = start + len(reading.inputs)
            found = reading.answer(results[start:end])
            assert isinstance(found, list), "no model needs further passes for a pair"
            scores += found
            start = end
        return scores

    return Reading(
        [each for reading in readings for each in reading.inputs],
        answer,
        sum(reading.num_truncated for reading in readings),
        sum(reading.seconds for reading in readings),
    )
