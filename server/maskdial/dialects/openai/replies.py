"""What OpenAI's routes reply, for the OpenAPI document; tests compare real replies with it."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from maskdial.causal.events import Verdict
from maskdial.engine.questions import DecisionMethod

_FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ErrorContent(TypedDict):
    """What went wrong; ``param`` is the field at fault, if one is."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    """An error as OpenAI's API writes it."""

    error: ErrorContent


class CachedTokens(TypedDict):
    """Tokens of the prompt that were in the prefix cache."""

    cached_tokens: int


class ReasoningTokens(TypedDict):
    """Generated tokens that are reasoning."""

    reasoning_tokens: int


class CompletionTokens(ReasoningTokens):
    """With a prediction, also its tokens that are in the texts, and those that are not."""

    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class PromptUsage(TypedDict):
    """Token counts of a request that generates none."""

    prompt_tokens: int
    total_tokens: int


class Usage(PromptUsage):
    """Tokens of the prompt, of the reply and of both."""

    completion_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[CompletionTokens]


class PrefillUsage(TypedDict):
    """Tokens that were read, and those of them that were in the cache already."""

    prompt_tokens: int
    prompt_tokens_details: CachedTokens


class PrefillReply(TypedDict):
    """What was read into the prefix cache."""

    object: Literal["prefill"]
    model: str
    usage: PrefillUsage


class CompletionLogprobsReply(TypedDict):
    """The tokens of a text, with their log-probabilities."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float | None] | None]


class CompletionChoice(TypedDict):
    """One of the texts."""

    index: int
    text: str
    logprobs: CompletionLogprobsReply | None
    finish_reason: _FinishReason
    content_filter_results: NotRequired[dict[str, Any]]


class CompletionReply(TypedDict):
    """Continued prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class FunctionReply(TypedDict):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


class TextReply(TypedDict):
    """A custom tool, and the text for it."""

    name: str
    input: str


class ToolCallReply(TypedDict):
    """A call of a function, or of a custom tool."""

    id: str
    type: Literal["function", "custom"]
    function: NotRequired[FunctionReply]
    custom: NotRequired[TextReply]


class MessageReply(TypedDict):
    """The assistant's message: content, reasoning, calls of tools, or a refusal."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[dict[str, Any]]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallReply]]


class AlternativeToken(TypedDict):
    """A token and its log-probability."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatToken(AlternativeToken):
    """A token, with the most likely ones in its place."""

    top_logprobs: list[AlternativeToken]


class ChatLogprobsReply(TypedDict):
    """The tokens of an answer."""

    content: list[ChatToken]
    refusal: None


class ChatChoice(TypedDict):
    """One of the answers."""

    index: int
    message: MessageReply
    logprobs: ChatLogprobsReply | None
    finish_reason: _FinishReason
    content_filter_results: NotRequired[dict[str, Any]]


class ChatReply(TypedDict):
    """An answered conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class EmbeddingReply(TypedDict):
    """A vector: numbers, or the base64 of little-endian float32 values."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsReply(TypedDict):
    """Vectors in the order of the inputs, and the tokens that were read."""

    object: Literal["list"]
    data: list[EmbeddingReply]
    model: str
    usage: PromptUsage


class DocumentReply(TypedDict):
    """The text of a document that was ranked."""

    text: str


class RankedDocument(TypedDict):
    """A document by its index in the request, and its score."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentReply]


class RankReply(TypedDict):
    """Documents by relevance, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PromptUsage


class PairScore(TypedDict):
    """The score of a pair by its index in the request."""

    index: int
    object: Literal["score"]
    score: float


class ScoreListReply(TypedDict):
    """Scores of pairs, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage


class PooledText(TypedDict):
    """Numbers, for each token or the whole text, or the base64 of little-endian float32 values."""

    index: int
    object: Literal["pooling"]
    data: list[list[float]] | list[float] | str


class PoolingReply(TypedDict):
    """What a model makes of texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledText]
    usage: PromptUsage


class ModerationResult(TypedDict):
    """What a classifier finds in a text, by its labels."""

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]
    category_applied_input_types: dict[str, list[Literal["text"]]]


class ModerationReply(TypedDict):
    """Moderated texts."""

    id: str
    model: str
    results: list[ModerationResult]


class TokensReply(TypedDict):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class PromptReply(TypedDict):
    """The text of token ids, by vLLM's name and by llama.cpp's."""

    prompt: str
    content: str


class TokenPiece(TypedDict):
    """A token with its text."""

    id: int
    piece: str


class ContentTokens(TypedDict):
    """The token ids of a text, or its tokens with their texts."""

    tokens: list[int] | list[TokenPiece]


class TokenizerInfo(TypedDict):
    """What a client needs to use the tokenizer from afar."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    mask_token: str | None
    model_max_length: int
    chat_template: str | None


class ModelReply(TypedDict):
    """A model; ``parent`` is the base of an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    parent: NotRequired[str]


class ModelsReply(TypedDict):
    """The models."""

    object: Literal["list"]
    data: list[ModelReply]


class InputDetails(CachedTokens):
    """Tokens of the input that were in the prefix cache, or put there."""

    cache_write_tokens: int


class ResponseUsage(TypedDict):
    """Tokens of input and output, with those from the cache and those of reasoning."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseReply(TypedDict):
    """A response, with the settings of its request. Its items are those of OpenAI's API."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: Literal["queued", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    background: bool
    frequency_penalty: float
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    policy: NotRequired[list[Verdict]]


class DecisionAnswer(TypedDict):
    """An answer: a probability, a choice, or a score, with the probabilities of the options."""

    type: Literal["predicate", "choice", "score"]
    name: str | None
    probability: NotRequired[float]
    choice: NotRequired[str | bool]
    score: NotRequired[float]
    confidence: NotRequired[float]
    probabilities: NotRequired[list[dict[str, str | bool | int | float]]]


class DecisionsReply(TypedDict):
    """Answered questions."""

    answers: list[DecisionAnswer]
    model: str
    method: DecisionMethod
    usage: ResponseUsage
