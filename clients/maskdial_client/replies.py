"""What the server's replies mean: JSON documents and error replies to results and exceptions.

The functions for single documents raise KeyError, TypeError and their like on a shape that is not
the API's; their callers turn that into a ProtocolError.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from maskdial_client.errors import ApiError, ProtocolError, api_error_class
from maskdial_client.results import (
    Answer,
    Answers,
    Classification,
    Embedding,
    Entity,
    Fill,
    FillMaskResult,
    Generation,
    GenerationDetails,
    Health,
    LabelScore,
    ModelInfo,
    PromptToken,
    RankedText,
    ServerInfo,
    StreamDetails,
    StreamEvent,
    TextScore,
    TextToken,
    Token,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole HTTP reply. ``headers`` finds names in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def error_from(reply: Reply) -> ApiError:
    """The exception for an error reply, whether or not it has the server's own shape."""
    document: Any
    try:
        document = json.loads(reply.body)
    except ValueError:
        document = None
    request_id = reply.headers.get("x-request-id")
    if isinstance(document, dict) and isinstance(document.get("error"), str):
        message = document["error"]
        error_type = document.get("error_type")
    else:
        start = reply.body[:200].decode("utf-8", "replace").strip()
        message = f"the reply was HTTP {reply.status}" + (f": {start}" if start else "")
        error_type = None
    error_type = error_type if isinstance(error_type, str) else None
    return api_error_class(error_type, reply.status)(
        message,
        status=reply.status,
        error_type=error_type,
        request_id=request_id,
        retry_after=retry_after_seconds(reply.headers.get("retry-after")),
    )


def retry_after_seconds(value: str | None, now: datetime | None = None) -> float | None:
    """A Retry-After header (RFC 9110 10.2.3: seconds, or a date) in seconds; None if unreadable."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - (now or datetime.now(UTC))).total_seconds())


def stream_event(document: Any) -> StreamEvent:
    """One event of a generation stream."""
    details = document.get("details")
    return StreamEvent(
        index=int(document["index"]),
        token=_token(document["token"]),
        generated_text=document.get("generated_text"),
        details=None
        if details is None
        else StreamDetails(
            finish_reason=str(details["finish_reason"]),
            generated_tokens=int(details["generated_tokens"]),
            seed=details.get("seed"),
            input_length=details.get("input_length"),
        ),
        top_tokens=_tokens(document.get("top_tokens")),
    )


def read_event(data: str, request_id: str | None) -> StreamEvent:
    """The event in one ``data:`` field. Raises the ApiError that an error event carries."""
    try:
        document = json.loads(data)
        if "error" not in document:
            return stream_event(document)
        error_type = document.get("error_type")
        message = str(document["error"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise not_understood("an event of the stream", error) from error
    raise api_error_class(error_type, None)(message, error_type=error_type, request_id=request_id)


def fill_mask_result(entry: Sequence[Any]) -> FillMaskResult:
    """The candidates for every mask of one text."""
    # One mask: a list of candidates. Several: a list of such lists.
    masks = entry if isinstance(entry[0], list) else [entry]
    return FillMaskResult(tuple(tuple(_fill(item) for item in mask) for mask in masks))


def _fill(item: Mapping[str, Any]) -> Fill:
    return Fill(
        score=float(item["score"]),
        token=int(item["token"]),
        token_str=str(item["token_str"]),
        sequence=str(item["sequence"]),
    )


def classification(entry: Sequence[Mapping[str, Any]]) -> Classification:
    """The labels of one text."""
    return Classification(
        tuple(LabelScore(str(item["label"]), float(item["score"])) for item in entry)
    )


def entities(entry: Sequence[Mapping[str, Any]]) -> tuple[Entity, ...]:
    """The entities or tokens of one text."""
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


def answers(entry: Any) -> Answers:
    """The answers to one question: a list where several were asked for."""
    items = entry if isinstance(entry, list) else [entry]
    return Answers(
        tuple(
            Answer(str(item["answer"]), float(item["score"]), int(item["start"]), int(item["end"]))
            for item in items
        )
    )


def numbers(entry: Sequence[Any]) -> Embedding:
    """The vector of one text."""
    return [float(number) for number in entry]


def ranked_text(item: Mapping[str, Any]) -> RankedText:
    """One text of a ranking."""
    return RankedText(int(item["index"]), float(item["score"]), item.get("text"))


def text_score(entry: Mapping[str, Any]) -> TextScore:
    """How likely one text is."""
    return TextScore(
        tokens=_prompt_tokens(entry["tokens"]),
        log_likelihood=float(entry["log_likelihood"]),
        perplexity=entry["perplexity"],
        method=str(entry["method"]),
    )


def text(entry: Any) -> str:
    """A text as it is."""
    if not isinstance(entry, str):
        raise TypeError("a text was expected")
    return entry


def text_tokens(entry: Sequence[Mapping[str, Any]]) -> tuple[TextToken, ...]:
    """The tokens of one text."""
    return tuple(
        TextToken(
            id=int(item["id"]),
            text=str(item["text"]),
            special=bool(item["special"]),
            start=item["start"],
            stop=item["stop"],
        )
        for item in entry
    )


def generation(document: Any) -> Generation:
    """A generated text, with details where they are there; of a list, the first with the others."""
    if not isinstance(document, list):
        return _generation(document)
    first, *others = (_generation(item) for item in document)
    return replace(first, others=tuple(others))


def _generation(document: Mapping[str, Any]) -> Generation:
    details = document.get("details")
    return Generation(
        generated_text=str(document["generated_text"]),
        details=None if details is None else _generation_details(details),
    )


def _generation_details(details: Mapping[str, Any]) -> GenerationDetails:
    return GenerationDetails(
        finish_reason=str(details["finish_reason"]),
        generated_tokens=int(details["generated_tokens"]),
        seed=details.get("seed"),
        prefill=_prompt_tokens(details.get("prefill")),
        tokens=_tokens(details.get("tokens")),
        input_length=details.get("input_length"),
        top_tokens=tuple(_tokens(items) for items in details.get("top_tokens") or ()),
        best_of_sequences=tuple(
            Generation(str(item["generated_text"]), _generation_details(item))
            for item in details.get("best_of_sequences") or ()
        ),
    )


def model_info(item: Mapping[str, Any]) -> ModelInfo:
    """One entry of /models."""
    return ModelInfo(
        name=str(item["name"]),
        family=str(item["family"]),
        tasks=tuple(str(task) for task in item["tasks"]),
        architecture=str(item["architecture"]),
        precision=str(item["precision"]),
        batch_invariant=bool(item["batch_invariant"]),
        max_length=int(item["max_length"]),
        labels=tuple(str(label) for label in item["labels"]),
        provider=str(item["provider"]),
        ready=bool(item["ready"]),
    )


def server_info(document: Mapping[str, Any]) -> ServerInfo:
    """The document of /info."""
    return ServerInfo(
        version=str(document["version"]),
        phase=str(document["phase"]),
        limits={str(name): int(limit) for name, limit in document["limits"].items()},
        models=tuple(model_info(item) for item in document["models"]),
    )


def health(document: Mapping[str, Any]) -> Health:
    """The document of /health/ready."""
    status = str(document["status"])
    return Health(status == "ready", status, tuple(str(m) for m in document.get("models", ())))


def _prompt_tokens(items: Sequence[Mapping[str, Any]] | None) -> tuple[PromptToken, ...]:
    return tuple(
        PromptToken(int(item["id"]), str(item["text"]), item.get("logprob")) for item in items or ()
    )


def _tokens(items: Sequence[Mapping[str, Any]] | None) -> tuple[Token, ...]:
    return tuple(_token(item) for item in items or ())


def _token(item: Mapping[str, Any]) -> Token:
    return Token(int(item["id"]), str(item["text"]), item.get("logprob"), bool(item["special"]))


def not_understood(what: str, error: Exception) -> ProtocolError:
    """The exception for a reply whose shape is not the API's."""
    return ProtocolError(
        f"the reply to {what} is not one of a maskdial server ({type(error).__name__}: {error})"
    )
