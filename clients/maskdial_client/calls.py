"""The API: for each route, the call with its body, and the results in its reply.

Both clients send the ``Call`` objects made here and read replies through them, so neither knows a
route, a body or an error shape of its own. Where inputs may be one or a list, a call's result has
one entry for each, also for a single one.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from maskdial_client import replies
from maskdial_client.core import Call, Request
from maskdial_client.parameters import (
    ClassifyBatch,
    ClassifyInput,
    ClassifyParameters,
    DetokenizeParameters,
    EmbedParameters,
    FillMaskParameters,
    GenerateParameters,
    Messages,
    Question,
    QuestionAnsweringParameters,
    RerankParameters,
    SamplingParameters,
    TextOptions,
    TokenClassifyParameters,
    TokenizeParameters,
    ZeroShotClassifyParameters,
)
from maskdial_client.results import (
    Answers,
    Classification,
    Embedding,
    Entity,
    FillMaskResult,
    Generation,
    Health,
    ModelInfo,
    RankedText,
    ServerInfo,
    TextScore,
    TextToken,
)

T = TypeVar("T")


def fill_mask_call(
    inputs: str | list[str], model: str | None, parameters: FillMaskParameters
) -> Call[list[FillMaskResult]]:
    """POST /fill-mask."""
    body = _task_body(inputs, model, parameters)
    return _task_call("/fill-mask", inputs, body, replies.fill_mask_result)


def classify_call(
    inputs: ClassifyInput | ClassifyBatch, model: str | None, parameters: ClassifyParameters
) -> Call[list[Classification]]:
    """POST /classify."""
    wire = [_pair(item) for item in inputs] if isinstance(inputs, list) else _pair(inputs)
    body = _task_body(wire, model, parameters)
    return _task_call("/classify", inputs, body, replies.classification, always_list=True)


def token_classify_call(
    inputs: str | list[str], model: str | None, parameters: TokenClassifyParameters
) -> Call[list[tuple[Entity, ...]]]:
    """POST /token-classify."""
    body = _task_body(inputs, model, parameters)
    return _task_call("/token-classify", inputs, body, replies.entities)


def question_answering_call(
    inputs: Question | list[Question], model: str | None, parameters: QuestionAnsweringParameters
) -> Call[list[Answers]]:
    """POST /question-answering."""
    wire = [_question(item) for item in inputs] if isinstance(inputs, list) else _question(inputs)
    body = _task_body(wire, model, parameters)
    return _task_call("/question-answering", inputs, body, replies.answers)


def zero_shot_classify_call(
    inputs: str | list[str],
    candidate_labels: list[str],
    model: str | None,
    parameters: ZeroShotClassifyParameters,
) -> Call[list[Classification]]:
    """POST /zero-shot-classify."""
    body = _task_body(inputs, model, {**parameters, "candidate_labels": candidate_labels})
    return _task_call("/zero-shot-classify", inputs, body, replies.classification)


def embed_call(
    inputs: str | list[str], model: str | None, parameters: EmbedParameters
) -> Call[list[Embedding]]:
    """POST /embed."""
    body = _task_body(inputs, model, parameters)
    return _task_call("/embed", inputs, body, replies.numbers, always_list=True)


def similarity_call(
    source_sentence: str, sentences: list[str], model: str | None, parameters: TextOptions
) -> Call[list[float]]:
    """POST /similarity; the result has one entry per sentence."""
    inputs = {"source_sentence": source_sentence, "sentences": sentences}
    body = _task_body(inputs, model, parameters)
    return _task_call("/similarity", sentences, body, float)


def rerank_call(
    query: str, texts: list[str], model: str | None, parameters: RerankParameters
) -> Call[list[RankedText]]:
    """POST /rerank; the result has one entry per text, best first."""
    body = _flat_body({"query": query, "texts": texts}, model, parameters)
    return _task_call("/rerank", texts, body, replies.ranked_text)


def score_call(
    inputs: str | list[str], model: str | None, parameters: TextOptions
) -> Call[list[TextScore]]:
    """POST /score."""
    body = _task_body(inputs, model, parameters)
    return _task_call("/score", inputs, body, replies.text_score, always_list=True)


def tokenize_call(
    inputs: str | list[str], model: str | None, parameters: TokenizeParameters
) -> Call[list[tuple[TextToken, ...]]]:
    """POST /tokenize."""
    body = _flat_body({"inputs": inputs}, model, parameters)
    return _task_call("/tokenize", inputs, body, replies.text_tokens, always_list=True)


def detokenize_call(
    ids: list[int] | list[list[int]], model: str | None, parameters: DetokenizeParameters
) -> Call[list[str]]:
    """POST /detokenize."""
    body = _flat_body({"ids": ids}, model, parameters)
    texts = ids if is_id_batch(ids) else None
    return _task_call("/detokenize", texts, body, replies.text, always_list=True)


def is_id_batch(ids: list[int] | list[list[int]]) -> bool:
    """Whether these are the token ids of several texts."""
    return bool(ids) and isinstance(ids[0], list)


def generate_call(
    prompt: str | list[str] | None,
    messages: Messages | None,
    model: str | None,
    parameters: GenerateParameters,
    *,
    details: bool,
) -> Call[list[Generation]]:
    """POST /generate, answered in one piece."""
    body = _prompt_body(prompt, messages, model, {**parameters, "details": details or None})
    return _task_call("/generate", prompt, body, replies.generation)


def stream_request(
    prompt: str | None,
    messages: Messages | None,
    model: str | None,
    parameters: SamplingParameters,
) -> Request:
    """POST /generate, answered token by token."""
    body = {**_prompt_body(prompt, messages, model, parameters), "stream": True}
    return Request("POST", "/generate", body)


def models_call() -> Call[list[ModelInfo]]:
    """GET /models."""
    return Call(
        Request("GET", "/models"), lambda document: [replies.model_info(item) for item in document]
    )


def info_call() -> Call[ServerInfo]:
    """GET /info."""
    return Call(Request("GET", "/info"), replies.server_info)


def health_call() -> Call[Health]:
    """GET /health/ready, where not to be ready is an answer and no failure."""
    return Call(Request("GET", "/health/ready", accepts=frozenset({200, 503})), replies.health)


def _task_call(
    path: str,
    inputs: object,
    body: Mapping[str, Any],
    parse_one: Callable[[Any], T],
    *,
    always_list: bool = False,
) -> Call[list[T]]:
    """A call whose reply is a list with one entry per input.

    The reply to a single input is the entry itself, except where a route has ``always_list``.
    """
    batch = isinstance(inputs, list)
    count = len(inputs) if isinstance(inputs, list) else 1

    def parse(document: Any) -> list[T]:
        entries = document if batch or always_list else [document]
        if not isinstance(entries, list):
            raise TypeError("a list was expected")
        if len(entries) != count:
            raise ValueError(f"{len(entries)} results for {count} inputs")
        return [parse_one(entry) for entry in entries]

    return Call(Request("POST", path, body), parse)


# Options of a call that stand beside the parameters in the body, by their names there.
_REQUEST_FIELDS = {"deadline": "timeout", "priority": "priority", "cache_salt": "cache_salt"}


def _prompt_body(
    prompt: str | list[str] | None,
    messages: Messages | None,
    model: str | None,
    parameters: Mapping[str, Any],
) -> dict[str, Any]:
    if (prompt is None) == (messages is None):
        raise ValueError("give either a prompt or messages")
    if messages is None:
        return _task_body(prompt, model, parameters)
    body = _task_body(None, model, parameters)
    del body["inputs"]
    return {"messages": [dict(message) for message in messages], **body}


def _task_body(inputs: object, model: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"inputs": inputs}
    given = {name: value for name, value in parameters.items() if value is not None}
    fields = {_REQUEST_FIELDS[name]: given.pop(name) for name in _REQUEST_FIELDS if name in given}
    if given:
        body["parameters"] = given
    if model is not None:
        body["model"] = model
    return {**body, **fields}


def _flat_body(
    inputs: Mapping[str, Any], model: str | None, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """The body of a route whose parameters stand beside the inputs."""
    given = {**parameters, "model": model}
    fields = {_REQUEST_FIELDS.get(name, name): value for name, value in given.items()}
    return {**inputs, **{name: value for name, value in fields.items() if value is not None}}


def _pair(item: ClassifyInput) -> str | dict[str, str]:
    if isinstance(item, str):
        return item
    text, text_pair = item
    return {"text": text, "text_pair": text_pair}


def _question(item: Question) -> dict[str, str]:
    question, context = item
    return {"question": question, "context": context}
