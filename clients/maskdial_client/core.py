"""The API without any input or output: what a request looks like, what a reply means.

Both clients send the ``Call`` objects made here and read replies through them, so neither knows a
route, a body or an error shape of its own.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypedDict, TypeVar

from maskdial_client import replies
from maskdial_client.results import (
    Classification,
    FillMaskResult,
    Generation,
    Health,
    ModelInfo,
    ServerInfo,
)

T = TypeVar("T")

ClassifyInput = str | tuple[str, str]
"""A text, or a pair of texts."""
ClassifyBatch = list[str] | list[tuple[str, str]] | list[ClassifyInput]


Messages = Sequence[Mapping[str, Any]]
"""A conversation: mappings of ``role`` and ``content``, the latter a text or a list of parts."""


class TaskOptions(TypedDict, total=False):
    """``deadline``: seconds after which the server itself gives up (DeadlineError).

    A deadline longer than the client's own timeout needs a longer timeout.
    """

    deadline: float | None


class FillMaskParameters(TaskOptions, total=False):
    """``top_k`` candidates a mask; ``targets`` scores these words only. None means not given."""

    top_k: int | None
    targets: list[str] | None


class ClassifyParameters(TaskOptions, total=False):
    """``top_k`` labels a text; what is done to the logits. None means not given."""

    top_k: int | None
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None


class Grammar(TypedDict):
    """What a text has to be: a JSON schema, a regular expression or a Lark grammar."""

    type: Literal["json", "json_schema", "regex", "lark"]
    value: Any


class SamplingParameters(TaskOptions, total=False):
    """How a text is generated. None means not given; a temperature of 0 is greedy.

    ``priority`` (lower is earlier) and ``cache_salt`` (prompts share cached prefixes only under the
    same one) are the request's, the others its parameters.
    """

    max_new_tokens: int | None
    min_new_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: list[str] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    return_full_text: bool | None
    truncate: int | None
    top_n_tokens: int | None
    grammar: Grammar | None
    priority: int | None
    cache_salt: str | None


class GenerateParameters(SamplingParameters, total=False):
    """``n`` texts, the best of ``best_of``; the prompt's tokens if ``decoder_input_details``."""

    n: int | None
    best_of: int | None
    decoder_input_details: bool | None


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request, and the statuses of the replies that are no errors."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    accepts: frozenset[int] = frozenset({200})

    @property
    def content(self) -> bytes | None:
        """The JSON body. Raises ValueError for NaN and infinity, which JSON does not have."""
        if self.body is None:
            return None
        return json.dumps(self.body, allow_nan=False).encode()


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request, and how the document in its successful reply becomes a result."""

    request: Request
    parse: Callable[[Any], T]

    def read(self, body: bytes) -> T:
        """The result in a successful reply's body. Raises ProtocolError."""
        try:
            return self.parse(json.loads(body))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            what = f"{self.request.method} {self.request.path}"
            raise replies.not_understood(what, error) from error


def fill_mask_call(
    inputs: str | list[str], model: str | None, parameters: FillMaskParameters
) -> Call[list[FillMaskResult]]:
    """POST /fill-mask; the result has one entry per text, also for a single one."""
    single = isinstance(inputs, str)

    def parse(document: Any) -> list[FillMaskResult]:
        entries = [document] if single else document
        return [replies.fill_mask_result(entry) for entry in _same_count(inputs, entries)]

    return Call(Request("POST", "/fill-mask", _task_body(inputs, model, parameters)), parse)


def classify_call(
    inputs: ClassifyInput | ClassifyBatch, model: str | None, parameters: ClassifyParameters
) -> Call[list[Classification]]:
    """POST /classify; the result has one entry per text or pair, also for a single one."""
    wire = [_pair(item) for item in inputs] if isinstance(inputs, list) else _pair(inputs)

    def parse(document: Any) -> list[Classification]:
        return [replies.classification(entry) for entry in _same_count(inputs, document)]

    return Call(Request("POST", "/classify", _task_body(wire, model, parameters)), parse)


def generate_call(
    prompt: str | list[str] | None,
    messages: Messages | None,
    model: str | None,
    parameters: GenerateParameters,
    *,
    details: bool,
) -> Call[list[Generation]]:
    """POST /generate, answered in one piece; one entry per prompt, also for a single one."""
    single = not isinstance(prompt, list)

    def parse(document: Any) -> list[Generation]:
        entries = [document] if single else document
        return [replies.generation(entry) for entry in _same_count(prompt, entries)]

    body = _prompt_body(prompt, messages, model, {**parameters, "details": details or None})
    return Call(Request("POST", "/generate", body), parse)


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


def _same_count(inputs: object, entries: list[Any]) -> list[Any]:
    count = len(inputs) if isinstance(inputs, list) else 1
    if len(entries) != count:
        raise ValueError(f"{len(entries)} results for {count} inputs")
    return entries


def _pair(item: ClassifyInput) -> str | dict[str, str]:
    if isinstance(item, str):
        return item
    text, text_pair = item
    return {"text": text, "text_pair": text_pair}
