"""What every task of the masked family shares: a request reads texts and says what its logits mean.

`maskdial.masked.run` runs any of them: admit, read, submit, answer.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from maskdial.bundle.manifest import Manifest, Side, TaskName
from maskdial.bundle.texts import (
    NamedModel,
    ReadingModel,
    check_characters,
    check_ids,
    check_media,
)
from maskdial.bundle.tokenizer import TextOrIds
from maskdial.engine.timing import Deadline
from maskdial.errors import ValidationError, about, shortened
from maskdial.grammar.compiler import GrammarCompiler
from maskdial.kernels.logits import VocabularyKernels
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.runtime.adapter import Adapter

T_co = TypeVar("T_co", covariant=True)
OtherT = TypeVar("OtherT")

TextOrPair = tuple[str, str | None]
"""A text, or two that the model reads as one input."""


class LabelVectors(Protocol):
    """What a task needs of `maskdial.masked.label_encoder.LabelEncoder`."""

    async def vectors(self, labels: Sequence[str], deadline: Deadline) -> NDArray[np.float32]: ...


class Queries(Protocol):
    """What makes queries of the hidden states of a task's fields (`maskdial.bundle.bundle`)."""

    def __call__(self, fields: NDArray[np.float32], num_steps: int) -> NDArray[np.float32]:
        """Of fields (num_fields, hidden_size): (num_steps, num_fields, 4 * hidden_size + 1)."""
        ...


class PairedSpans(Protocol):
    """What finds spans of fields by their boundaries (`maskdial.bundle.bundle`)."""

    def __call__(
        self,
        words: NDArray[np.float32],
        fields: NDArray[np.float32],
        forced: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        """Of (num_words, hidden_size) and (num_fields, hidden_size): (num_fields, num_candidates,
        3), the boundaries of spans, both 0 where there is none, and logits. The spans ``forced``
        (num_forced, 2) are among them.
        """
        ...


class TaskModel(ReadingModel, Protocol):
    """What a task needs to know of its model."""

    @property
    def max_queue(self) -> int: ...
    @property
    def label_encoder(self) -> LabelVectors | None: ...
    @property
    def queries(self) -> Queries | None: ...
    @property
    def spans(self) -> PairedSpans | None: ...
    @property
    def query_weights(self) -> NDArray[np.float32] | None: ...
    @property
    def grammars(self) -> GrammarCompiler | None: ...
    @property
    def adapter(self) -> Adapter | None: ...
    @property
    def task_adapters(self) -> Mapping[str, Adapter]: ...
    @property
    def why_no_adapters(self) -> str: ...
    def vocabulary_kernels(self) -> VocabularyKernels | None: ...


@dataclass(frozen=True, slots=True)
class Truncation:
    """What to do with a text longer than the model: refuse it, or cut it at one end.

    ``enabled``: whether to cut it; None for what the server is set to for the model.
    ``direction``: the end to cut; None for the one that the model's own tokenizer cuts.
    """

    enabled: bool | None = False
    direction: Side | None = None

    def cuts(self, model: ReadingModel) -> bool:
        """Whether this model's texts are cut."""
        return model.auto_truncate if self.enabled is None else self.enabled

    def side(self, model: NamedModel) -> Side:
        """The end at which this model's texts are cut."""
        return self.direction or model.manifest.tokenization.truncation_side


REFUSE = Truncation()


@dataclass(frozen=True, slots=True)
class Reading(Generic[T_co]):
    """A request, tokenized: the inputs of its passes, and what their results mean.

    ``answer`` makes the task's answer of the results, or another reading, whose inputs depend on
    them and are queued next; see `maskdial.masked.tasks.passes`. ``seconds`` estimates how long it
    takes, so that long work stays off the event loop.
    """

    inputs: Sequence[MaskedInput]
    answer: "Callable[[Sequence[MaskedResult]], T_co | Reading[T_co]]"
    num_truncated: int = 0
    seconds: float = 0.0

    def map(self, change: Callable[[T_co], OtherT]) -> "Reading[OtherT]":
        """The reading whose answer is made of this one's."""

        def answer(results: Sequence[MaskedResult]) -> "OtherT | Reading[OtherT]":
            content = self.answer(results)
            return content.map(change) if isinstance(content, Reading) else change(content)

        return Reading(self.inputs, answer, self.num_truncated, self.seconds)


class TaskRequest(abc.ABC, Generic[T_co]):
    """A request for one task, independent of the wire format in which it arrived."""

    __slots__ = ()

    task: ClassVar[str]
    """The task's name, as routes have it."""
    head: ClassVar[TaskName]
    """The task in the manifests of the models that may serve it."""

    @classmethod
    def serves(cls, manifest: Manifest) -> bool:
        """Whether a model can do the task."""
        return manifest.task == cls.head

    @property
    @abc.abstractmethod
    def num_texts(self) -> int:
        """Texts that the request carries."""

    @property
    def num_inputs(self) -> int:
        """Inputs that they make at least: entries of the engine's queue."""
        return self.num_texts

    def least_inputs(self, model: TaskModel) -> int:
        """The same of a model, where it depends on that."""
        return self.num_inputs

    @property
    @abc.abstractmethod
    def read_seconds(self) -> float:
        """Estimate of how long `read` takes."""

    def check(self, model: TaskModel) -> None:
        """Refuses what this model cannot do, before any text is tokenized.

        Raises:
            ValidationError: the request does not fit the model.
        """

    def adapter(self, model: TaskModel) -> Adapter | None:
        """The adapter that the texts are read with, after `check`."""
        return model.adapter

    async def prepared(self, model: TaskModel, deadline: Deadline) -> Self:
        """The request with what its model has to compute before the texts are read.

        Raises:
            ValidationError: the request does not fit the model.
            DeadlineError: the time is up.
        """
        return self

    @abc.abstractmethod
    def read(self, model: TaskModel) -> Reading[T_co]:
        """Tokenizes the texts.

        Raises:
            ValidationError: a text does not fit the model.
        """


def check_distinct(labels: Sequence[str]) -> None:
    """Checks that no label of a request is there twice.

    Raises:
        ValidationError: one is.
    """
    seen: set[str] = set()
    for label in labels:
        if label in seen:
            raise ValidationError(
                f"{shortened(label)!r} is there twice; send each label once",
                field="candidate_labels",
            )
        seen.add(label)


def masked_input(encoding: Encoding, rows: tuple[int, ...] = ()) -> MaskedInput:
    """A tokenized text as the engine takes it; ``rows`` are positions whose logits are wanted."""
    return MaskedInput(tuple(encoding.ids), rows, tuple(encoding.type_ids))


def read_texts(
    model: TaskModel, texts: Sequence[TextOrPair], truncation: Truncation, *, field: str = "texts"
) -> tuple[list[Encoding], int]:
    """Tokenizes texts and pairs, and truncates those that are too long if the request allows it.

    Args:
        field: what an error calls the list of texts.

    Returns:
        The encodings, and how many tokens were cut off.

    Raises:
        ValidationError: a text is too long; the message has both lengths.
    """
    encodings = []
    num_truncated = 0
    for index, text in enumerate(texts):
        with about(field, index):
            encoding, num_cut = read_text(model, text, truncation)
        encodings.append(encoding)
        num_truncated += num_cut
    return encodings, num_truncated


def read_inputs(
    model: TaskModel, texts: Sequence[TextOrIds], truncation: Truncation
) -> tuple[list[MaskedInput], int]:
    """Makes inputs of texts, as `read_texts` does, and of token ids, to which nothing is added.

    Raises:
        ValidationError: an input is empty or too long, or has ids that the model does not have.
    """
    inputs = []
    num_truncated = 0
    for index, text in enumerate(texts):
        with about("texts", index):
            if isinstance(text, str):
                encoding, num_cut = read_text(model, (text, None), truncation)
                inputs.append(masked_input(encoding))
            else:
                ids, num_cut = _read_ids(model, text, truncation)
                inputs.append(MaskedInput(ids))
        num_truncated += num_cut
    return inputs, num_truncated


def read_text(
    model: TaskModel, text: TextOrPair, truncation: Truncation, limit: int | None = None
) -> tuple[Encoding, int]:
    """Tokenizes one text or pair, as `read_texts` does; an error names no field.

    ``limit``: how many tokens it may have, if fewer than the model takes.
    """
    max_length = min(limit or model.manifest.max_length, model.manifest.max_length)
    if truncation.cuts(model):
        encoding, num_cut = model.tokenizer.encode_cut(
            *text, max_length=max_length, direction=truncation.side(model)
        )
        check_media(encoding.ids, model)
        return encoding, num_cut
    for each in filter(None, text):
        check_characters(each, max_length, model)
    encoding = model.tokenizer.encode(*text)
    check_media(encoding.ids, model)
    _check_length(len(encoding), max_length, model)
    return encoding, 0


def _read_ids(
    model: TaskModel, ids: Sequence[int], truncation: Truncation
) -> tuple[tuple[int, ...], int]:
    if not ids:
        raise ValidationError("has no tokens; send at least one")
    check_ids(ids, model)
    check_media(ids, model)
    max_length = model.manifest.max_length
    if not truncation.cuts(model):
        _check_length(len(ids), max_length, model)
    excess = max(len(ids) - max_length, 0)
    kept = ids[excess:] if truncation.side(model) == "left" else ids[: len(ids) - excess]
    return tuple(kept), excess


def _check_length(length: int, max_length: int, model: TaskModel) -> None:
    if length > max_length:
        raise ValidationError(
            f"the text has {length} tokens; model {model.name!r} takes at most {max_length}; "
            'shorten it, or set "truncate"'
        )
