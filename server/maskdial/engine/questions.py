"""Question: what is asked about a text, to be answered with probabilities."""

from dataclasses import dataclass
from typing import Literal

DecisionMethod = Literal["entailment", "labels", "mask", "likelihood"]
"""How a model arrives at its probabilities; `maskdial.decide` describes each."""

Probabilities = tuple[float, ...]
"""One for each option of a question, summing to 1; of a predicate, that it is true."""


@dataclass(frozen=True, slots=True)
class Option:
    """One of a question's answers: its text, and what it means if the text does not say so."""

    text: str
    description: str = ""

    @property
    def meaning(self) -> str:
        """The text with its description."""
        return f"{self.text} ({self.description})" if self.description else self.text


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a text.

    Attributes:
        kind: a predicate is true or false of the text, a choice picks one of several options, and a
            score picks one of several levels.
        instructions: the statement of a predicate, otherwise the question.
        options: the choices, or the levels from the lowest to the highest; a predicate has none.
    """

    kind: Literal["predicate", "choice", "score"]
    instructions: str
    options: tuple[Option, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that have to be tokenized."""
        return (self.instructions, *(option.meaning for option in self.options))
