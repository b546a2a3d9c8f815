"""What Ollama's routes reply, for the OpenAPI document; tests compare real replies with it."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from maskdial.causal.events import Verdict


class OllamaError(TypedDict):
    """An error as Ollama's API writes it."""

    error: str


class Durations(TypedDict):
    """Times in nanoseconds, and tokens; only the last line of a reply has them."""

    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class AlternativeToken(TypedDict):
    """A token with its natural log-probability and its UTF-8 bytes."""

    token: str
    logprob: float | None
    bytes: list[int]


class ReplyToken(AlternativeToken):
    """A generated token, and the most likely ones in its place."""

    top_logprobs: list[AlternativeToken]


class ReplyLine(Durations):
    """What replies have in common."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    logprobs: NotRequired[list[ReplyToken]]
    policy: NotRequired[list[Verdict]]


class ReplyFunction(TypedDict):
    """The function of a call; its arguments are an object."""

    index: int
    name: str
    arguments: dict[str, Any]


class ReplyCall(TypedDict):
    """A call of a tool."""

    id: str
    function: ReplyFunction


class ReplyMessage(TypedDict):
    """The assistant's message, or a part of it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[ReplyCall]]


class ChatLine(ReplyLine):
    """An answered conversation, or a part of the answer."""

    message: ReplyMessage


class GenerateLine(ReplyLine):
    """A generated text, or a part of it."""

    response: str
    thinking: NotRequired[str]


class EmbedReply(TypedDict):
    """Vectors of length 1, one for each text."""

    model: str
    embeddings: list[list[float | None]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingReply(TypedDict):
    """The vector of one prompt."""

    embedding: list[float | None]


class Version(TypedDict):
    """The version of Ollama's API."""

    version: str


class Details(TypedDict):
    """Format, family, size and quantization of a model."""

    parent_model: str
    format: Literal["onnx"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _Model(TypedDict):
    name: str
    model: str
    size: int
    digest: str
    details: Details


class ListedModel(_Model):
    """A model, loaded or not. Its size is that of its files, in bytes."""

    modified_at: str


class ListedModels(TypedDict):
    """The models that requests may ask for."""

    models: list[ListedModel]


class RunningModel(_Model):
    """A loaded model, and when it is unloaded unless it is used."""

    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(TypedDict):
    """The models in memory, and until when they stay there."""

    models: list[RunningModel]


class ShownModel(TypedDict):
    """The template, the details and the capabilities of a model."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, str | int]
    capabilities: list[Literal["completion", "insert", "tools", "thinking", "embedding"]]
    modified_at: str


class Status(TypedDict):
    """How a change of the models goes, in bytes or other things."""

    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]
