"""Question: what is asked about a text, to be answered with probabilities."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from maskdial.bundle.texts import NamedModel
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import ValidationError

Content = str | dict[str, Any] | list[Any] | None
"""A text, or JSON that a template writes out."""

DecisionMethod = Literal["head", "letters", "entailment", "labels", "mask", "likelihood"]
"""How a model arrives at its probabilities; `maskdial.ask.decide` describes each."""

Probabilities = tuple[float, ...]
"""One for each option of a question, summing to 1; of a predicate, that it is true."""


def as_text(content: Content) -> str:
    """A content as a text: JSON in its most compact form, and nothing for None."""
    if content is None or isinstance(content, str):
        return content or ""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Option:
    """One of a question's answers: its text, and what it means if the text does not say so.

    ``content`` is the meaning of a choice, or the level of a score, where it is JSON.
    """

    text: str
    description: str = ""
    content: Content = None

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
        name: what the request calls it.
        content: the instructions where they are JSON.
        meanings: of a predicate, what ``true`` and ``false`` mean, where the request says so.
    """

    kind: Literal["predicate", "choice", "score"]
    instructions: str
    options: tuple[Option, ...] = ()
    name: str = ""
    content: Content = None
    meanings: Mapping[str, Content] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts that have to be tokenized."""
        return (self.instructions, *(option.meaning for option in self.options))


@dataclass(frozen=True, slots=True)
class Readout:
    """Where a prompt answers a question.

    Attributes:
        question: which one, counted from 0.
        row: the token whose scores are read.
        columns: the options' scores, in the order of the prompt.
        temperature: divides them.
        order: for each option of the question, its place in ``columns``; of a predicate, the place
            of what is true.
    """

    question: int
    row: int
    columns: tuple[int, ...]
    temperature: float
    order: tuple[int, ...]
    softcap: float | None = None

    def probabilities(self, scores: Sequence[float]) -> Probabilities:
        """Those of the options, from the scores in ``columns``."""
        if self.softcap is not None:
            scores = [self.softcap * math.tanh(score / self.softcap) for score in scores]
        greatest = max(scores)
        weights = [math.exp((score - greatest) / self.temperature) for score in scores]
        total = math.fsum(weights)
        return tuple(weights[place] / total for place in self.order)


@dataclass(frozen=True, slots=True)
class DecisionPrompt:
    """A tokenized prompt that asks one or several questions."""

    ids: tuple[int, ...]
    readouts: tuple[Readout, ...]


def check_queue(num_inputs: int, what: str, max_queue: int) -> None:
    """Refuses questions that make more inputs than the queue ever holds.

    Raises:
        ValidationError: they do.
    """
    if num_inputs > max_queue:
        raise ValidationError(
            f"the questions make {num_inputs:,} {what}; one request may make at most "
            f"{max_queue:,} (--max-queue); ask in several requests",
            field="questions",
        )


def check_input(text: str, max_length: int, tokenizer: Tokenizer, name: str) -> None:
    """Refuses a prompt that has too many tokens for model ``name`` however it is tokenized.

    Raises:
        ValidationError: it does.
    """
    if tokenizer.exceeds(text, max_length):
        raise ValidationError(
            f"the input with the question has {len(text):,} characters; model {name!r} takes at "
            f"most {max_length} tokens; shorten it",
            field="text",
        )


def check_prompt(prompt: DecisionPrompt, max_length: int, model: NamedModel) -> None:
    """Refuses a prompt that is too long for its model.

    Raises:
        ValidationError: it is; the message has both lengths.
    """
    if len(prompt.ids) > max_length:
        raise ValidationError(
            f"the input with the question has {len(prompt.ids)} tokens; model {model.name!r} takes "
            f"at most {max_length}; shorten it",
            field="text",
        )


class PromptWriter(Protocol):
    """Writes the prompts in which a model reads questions."""

    async def fits(self, questions: Sequence[Question]) -> bool:
        """Whether the model has a label for each option of the questions."""

    async def write(
        self, state: Content, questions: Sequence[Question]
    ) -> Sequence[DecisionPrompt]:
        """The prompts for all questions about a text.

        Raises:
            ValidationError: the model cannot be asked that.
            OverloadedError: too many prompts wait to be written.
        """

    def close(self) -> None:
        """Ends what was started for it."""
