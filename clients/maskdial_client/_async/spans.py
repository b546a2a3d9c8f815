"""Spans: entities in a text, what a schema names, and answers in a context."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

from maskdial_client._async.caller import AsyncCaller
from maskdial_client.call import TaskOptions, TextOptions, task_body, task_call

Question = tuple[str, str]
"""A question, and the context to look for the answer in."""


class TokenClassifyParameters(TaskOptions, total=False):
    """Parameters of ``token_classify``. None means the server's default.

    ``aggregation_strategy`` says how tokens are merged into entities, and ``ignore_labels`` which
    labels are left out. A long text is split into windows that overlap by ``stride`` tokens.

    A GLiNER model finds entities of the ``candidate_labels`` whose score exceeds ``threshold``.
    With ``flat_ner`` none overlap, with ``multi_label`` a span may have several labels.
    """

    candidate_labels: list[str] | None
    threshold: float | None
    flat_ner: bool | None
    multi_label: bool | None
    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] | None
    ignore_labels: list[str] | None
    stride: int | None


class RedactParameters(TaskOptions, total=False):
    """Parameters of ``redact``. None means the server's default.

    ``labels`` are those to redact, of which a GLiNER model has none of its own, and ``threshold``
    is a score that an entity exceeds. ``replacement`` is a text with ``{label}`` where the label
    goes, or one for each label; ``mask_character`` takes the place of each character instead.
    """

    labels: list[str] | None
    threshold: float | None
    replacement: str | dict[str, str] | None
    mask_character: str | None
    return_original: bool | None
    aggregation_strategy: Literal["simple", "first", "average", "max"] | None
    stride: int | None


class ExtractParameters(TextOptions, total=False):
    """Parameters of ``extract``. None means the server's default.

    ``threshold`` is a score that a span must reach. With ``include_confidence`` the values have
    their scores, with ``include_spans`` their character offsets.
    """

    threshold: float | None
    include_confidence: bool | None
    include_spans: bool | None


Extracted = dict[str, Any]
"""What was found in a text, by the names of the schema."""


class QuestionAnsweringParameters(TaskOptions, total=False):
    """Parameters of ``question_answering``; lengths in tokens. None means the server's default.

    ``top_k`` is the number of answers per question. A long context is split into windows of
    ``max_seq_len`` tokens that overlap by ``doc_stride``. With ``handle_impossible_answer`` the
    answer may be empty; with ``align_to_words`` it consists of whole words.
    """

    top_k: int | None
    doc_stride: int | None
    max_answer_len: int | None
    max_question_len: int | None
    max_seq_len: int | None
    handle_impossible_answer: bool | None
    align_to_words: bool | None


@dataclass(frozen=True, slots=True)
class Entity:
    """A labeled span of a text: an entity, or a single token with aggregation ``none``.

    ``start`` and ``end`` are character offsets into the text, ``end`` exclusive. ``index`` is the
    position of a single token in the text, None for an entity.
    """

    label: str
    score: float
    word: str
    start: int
    end: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Replacement:
    """A part of a text that was replaced.

    ``start`` and ``end`` are character offsets into the text, ``redacted_start`` and
    ``redacted_end`` into the redacted one, ends exclusive. ``original`` is what was there, None
    without ``return_original``.
    """

    label: str
    score: float
    start: int
    end: int
    redacted_start: int
    redacted_end: int
    original: str | None = None


@dataclass(frozen=True, slots=True)
class Redaction:
    """A redacted text, and its replacements in the order of the text."""

    text: str
    replacements: tuple[Replacement, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, and its character offsets into the context, ``end`` exclusive.

    ``answer`` is empty if the model finds none, which only ``handle_impossible_answer`` allows.
    """

    answer: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to a question, best first: ``top_k`` of them, or one."""

    answers: tuple[Answer, ...]

    @property
    def answer(self) -> str:
        """The best answer."""
        return self.answers[0].answer

    @property
    def score(self) -> float:
        """The score of the best answer."""
        return self.answers[0].score


class AsyncSpans(AsyncCaller):
    """The methods for /token-classify, /redact, /extract and /question-answering."""

    @overload
    async def token_classify(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenClassifyParameters],
    ) -> tuple[Entity, ...]: ...
    @overload
    async def token_classify(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenClassifyParameters],
    ) -> list[tuple[Entity, ...]]: ...
    async def token_classify(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[TokenClassifyParameters],
    ) -> tuple[Entity, ...] | list[tuple[Entity, ...]]:
        """The entities of a text, in text order; for a list, one result per text."""
        body = task_body({"inputs": inputs}, model, parameters)
        call = task_call("/token-classify", inputs, body, parse_entities)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def redact(
        self,
        inputs: str,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[RedactParameters],
    ) -> Redaction: ...
    @overload
    async def redact(
        self,
        inputs: list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[RedactParameters],
    ) -> list[Redaction]: ...
    async def redact(
        self,
        inputs: str | list[str],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[RedactParameters],
    ) -> Redaction | list[Redaction]:
        """A text with something else in the place of its entities; for a list, one per text."""
        body = task_body({"inputs": inputs}, model, parameters)
        call = task_call("/redact", inputs, body, parse_redaction)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def extract(
        self,
        inputs: str,
        schema: Mapping[str, Any],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ExtractParameters],
    ) -> Extracted: ...
    @overload
    async def extract(
        self,
        inputs: list[str],
        schema: Mapping[str, Any],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ExtractParameters],
    ) -> list[Extracted]: ...
    async def extract(
        self,
        inputs: str | list[str],
        schema: Mapping[str, Any],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[ExtractParameters],
    ) -> Extracted | list[Extracted]:
        """What a schema names in a text; for a list, one result per text."""
        body = task_body({"inputs": inputs}, model, {"schema": schema, **parameters})
        call = task_call("/extract", inputs, body, parse_extracted)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]

    @overload
    async def question_answering(
        self,
        inputs: Question,
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[QuestionAnsweringParameters],
    ) -> Answers: ...
    @overload
    async def question_answering(
        self,
        inputs: list[Question],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[QuestionAnsweringParameters],
    ) -> list[Answers]: ...
    async def question_answering(
        self,
        inputs: Question | list[Question],
        *,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[QuestionAnsweringParameters],
    ) -> Answers | list[Answers]:
        """The answers to a (question, context) pair; for a list, one result per pair."""
        wire = (
            [wire_question(item) for item in inputs]
            if isinstance(inputs, list)
            else wire_question(inputs)
        )
        body = task_body({"inputs": wire}, model, parameters)
        call = task_call("/question-answering", inputs, body, parse_answers)
        results = await self._send(call, timeout)
        return results if isinstance(inputs, list) else results[0]


def wire_question(item: Question) -> dict[str, str]:
    """A question as the wire has it."""
    question, context = item
    return {"question": question, "context": context}


def parse_entities(entry: Sequence[Mapping[str, Any]]) -> tuple[Entity, ...]:
    """The entities of one text, or its tokens with aggregation ``none``."""
    return tuple(
        Entity(
            label=str(item["entity_group"] if "entity_group" in item else item["entity"]),
            score=float(item["score"]),
            word=str(item["word"]),
            start=int(item["start"]),
            end=int(item["end"]),
            index=item.get("index"),
        )
        for item in entry
    )


def parse_redaction(entry: Mapping[str, Any]) -> Redaction:
    """The redacted text of one text."""
    return Redaction(
        str(entry["text"]),
        tuple(
            Replacement(
                label=str(item["label"]),
                score=float(item["score"]),
                start=int(item["start"]),
                end=int(item["end"]),
                redacted_start=int(item["redacted_start"]),
                redacted_end=int(item["redacted_end"]),
                original=item.get("original"),
            )
            for item in entry["replacements"]
        ),
    )


def parse_extracted(entry: Mapping[str, Any]) -> Extracted:
    """What was found in one text."""
    return dict(entry)


def parse_answers(entry: Any) -> Answers:
    """The answers to one question: a bare object if there is one, a list if ``top_k`` is more."""
    items = entry if isinstance(entry, list) else [entry]
    return Answers(
        tuple(
            Answer(str(item["answer"]), float(item["score"]), int(item["start"]), int(item["end"]))
            for item in items
        )
    )
