"""What a GLiNER2 model reads before a text: the schema, as gliner2's SchemaTransformer writes it.

Each task is written ( [P] name ( [E] label [E] label ) ), with a marker for each field or label.
Choices of fields come after the schema, as words before the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from maskdial.bundle.manifest import SCHEMA_MARKERS
from maskdial.bundle.texts import check_media
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.errors import ValidationError, shortened
from maskdial.masked.tasks.extraction_schema import Choice, Field, Schema, Structure
from maskdial.masked.tasks.task import TaskModel
from maskdial.masked.tasks.text_words import TextWords

Kind = Literal["structure", "entities", "relation", "choice"]
_BETWEEN, _END, _TASK, _FIELD, _TYPE, _ROLE, _LABEL, _EXAMPLE, _OUTPUT, _DESCRIPTION = (
    SCHEMA_MARKERS
)
_MARKERS: dict[Kind, str] = {
    "structure": _FIELD,
    "entities": _TYPE,
    "relation": _ROLE,
    "choice": _LABEL,
}
ENTITIES = "entities"
_MIN_ROOM = 8  # part of the model's length that a schema leaves for the text
HEAD_AND_TAIL = (Field("head", single=True), Field("tail", single=True))


@dataclass(frozen=True, slots=True)
class PromptTask:
    """A task of a prompt.

    Attributes:
        kind: what it asks for.
        prompt: its name, with what describes it.
        names: of its fields or labels.
        row: the place of its own marker among the prompt's rows; those of the names follow.
        choices: for each name, the places of its choices among the words before the text.
    """

    kind: Kind
    prompt: str
    names: tuple[str, ...]
    row: int
    choices: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> slice:
        """The places of the names' markers."""
        return slice(self.row + 1, self.row + 1 + len(self.names))


@dataclass(frozen=True, slots=True)
class SchemaPrompt:
    """A schema as tokens.

    ``rows`` are the markers' tokens; ``words`` the choices, which are read before the text's words.
    """

    ids: tuple[int, ...]
    rows: tuple[int, ...]
    tasks: tuple[PromptTask, ...]
    words: TextWords

    @classmethod
    def read(cls, schema: Schema, tokenizer: Tokenizer) -> "SchemaPrompt":
        """Tokenizes a schema.

        Raises:
            ValidationError: a text of it contains a marker.
        """
        for text in schema.texts():
            marker = next((each for each in SCHEMA_MARKERS if each in text), None)
            if marker is not None:
                raise ValidationError(
                    f"{shortened(text)!r} contains {marker}, which marks parts of the schema in "
                    "the model's prompt; leave it out",
                    field="schema",
                )
        words = _choice_words(schema.structures)
        lowered = [word.lower() for word in words]
        tasks: list[PromptTask] = []
        pieces: list[str] = []
        marks: list[int] = []  # of the pieces that are rows
        for kind, prompt, names, fields in _tasks(schema):
            if tasks:
                pieces.append(_BETWEEN)
            # A choice stands for its first occurrence among all words, as in gliner2
            places = tuple(
                tuple(lowered.index(choice.lower()) for choice in each.choices) for each in fields
            )
            tasks.append(PromptTask(kind, prompt, names, len(marks), places))
            marks.append(len(pieces) + 1)
            pieces += ["(", _TASK, prompt, "("]
            for name in names:
                marks.append(len(pieces))
                pieces += [_MARKERS[kind], name]
            pieces += [")", ")"]
        pieces.append(_END)
        ids, owners = tokenizer.encode_each(pieces)
        rows = np.searchsorted(owners, marks)
        prefix = TextWords.of(words, tokenizer)
        if len(prefix) != len(words):
            raise ValidationError(
                "a choice has no tokens in the model's vocabulary; leave it out", field="schema"
            )
        return cls(tuple(ids.tolist()), tuple(rows.tolist()), tuple(tasks), prefix)

    def check(self, model: TaskModel, what: str) -> int:
        """The tokens that are left for a text.

        Args:
            model: which reads the prompt.
            what: what takes the tokens, in an error.

        Raises:
            ValidationError: there are next to none.
        """
        check_media(self.ids, model)
        used, max_length = len(self.ids) + len(self.words.ids), model.manifest.max_length
        longest = max_length - max(max_length // _MIN_ROOM, 1)
        if used > longest:
            raise ValidationError(
                f"{what} {used:,} tokens, and the model reads at most {longest:,} before a text; "
                "ask for less at once",
                field="schema",
            )
        return max_length - used


def _tasks(schema: Schema) -> Iterator[tuple[Kind, str, tuple[str, ...], Sequence[Field]]]:
    """The kind, prompt, names and fields of each task."""
    for structure in schema.structures:
        names = tuple(each.name for each in structure.fields)
        yield "structure", _described(structure.name, structure.fields), names, structure.fields
    if schema.entities:
        names = tuple(each.name for each in schema.entities)
        yield "entities", _described(ENTITIES, schema.entities), names, schema.entities
    for relation in schema.relations:
        prompt = relation.name
        if relation.description:
            prompt = f"{prompt}: {relation.description}"
        yield "relation", prompt, ("head", "tail"), HEAD_AND_TAIL
    for choice in schema.choices:
        yield "choice", _choice_prompt(choice), choice.labels, ()


def _described(name: str, fields: Sequence[Field]) -> str:
    described = [
        f" {_DESCRIPTION} {one.name}: {one.description}" for one in fields if one.description
    ]
    return "".join([name, *described])


def _choice_prompt(choice: Choice) -> str:
    parts = [f"{choice.task}: {choice.prompt}" if choice.prompt else choice.task]
    parts += [f" {_DESCRIPTION} {label}: {text}" for label, text in choice.descriptions.items()]
    for text, label in choice.examples:
        if label in choice.labels:
            parts.append(f" {_EXAMPLE} {text} {_OUTPUT} {label}")
    return "".join(parts)


def _choice_words(structures: Sequence[Structure]) -> list[str]:
    """The words before the text: ( name: field ( choice | choice ) , field ( choice ) )."""
    words: list[str] = []
    for structure in structures:
        inner: list[str] = []
        for each in structure.fields:
            if each.choices:
                choices = [part for choice in each.choices for part in ("|", choice)][1:]
                inner += [",", each.name, "(", *choices, ")"]
        if inner:
            words += ["(", f"{structure.name}:", *inner[1:], ")"]
    return words
