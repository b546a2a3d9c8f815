"""Shots: the examples before a question, the ones that lm-evaluation-harness would choose."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

_SEED = 1234  # the harness' own


class Shots:
    """Chooses examples for one question after the other, in the order of the questions.

    Args:
        documents: to choose from.
        number: of examples.
        in_order: whether the first ones are taken; otherwise they are drawn.
        excludes: whether a question is none of its own examples, as where both come from one split.
    """

    def __init__(
        self,
        documents: Sequence[Mapping[str, Any]],
        number: int,
        *,
        in_order: bool,
        excludes: bool,
    ) -> None:
        self._documents = documents
        self._number = number
        self._in_order = in_order
        self._excludes = excludes
        self._random = Random(_SEED)

    def of(self, question: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The examples of the next question.

        Raises:
            ValueError: there are not as many.
        """
        others = [each for each in self._documents if not self._excludes or each != question]
        if len(others) < self._number:
            raise ValueError(f"there are {len(others)} examples, fewer than num_fewshot")
        if self._in_order:
            return others[: self._number]
        # One more, as the question may be among them.
        drawn = self._random.sample(self._documents, self._number + self._excludes)
        found = [each for each in drawn if not self._excludes or each != question]
        if len(found) < self._number:  # it was, more than once
            return self._random.sample(others, self._number)
        return found[: self._number]
