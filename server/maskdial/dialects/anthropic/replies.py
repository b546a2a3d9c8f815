"""What Anthropic's routes reply, for the OpenAPI document; tests compare real replies with it."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from maskdial.causal.events import Verdict


class AnthropicErrorContent(TypedDict):
    """The type of an error and a sentence about it."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """An error as Anthropic's API writes it."""

    type: Literal["error"]
    error: AnthropicErrorContent


class MessageBlock(TypedDict):
    """A text, thinking, or a call of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    citations: NotRequired[None]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str | None]
    name: NotRequired[str | None]
    input: NotRequired[dict[str, Any]]
    caller: NotRequired[dict[str, str]]


class ThinkingTokens(TypedDict):
    """Generated tokens that are thinking."""

    thinking_tokens: int


class CacheCreation(TypedDict):
    """Tokens that were written into caches with a lifetime, of which there are none."""

    ephemeral_1h_input_tokens: int
    ephemeral_5m_input_tokens: int


class MessageUsage(TypedDict):
    """Token counts; those from the prefix cache apart from the other input."""

    input_tokens: int
    cache_creation: CacheCreation
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    inference_geo: None
    server_tool_use: None
    service_tier: str


class AssistantMessage(TypedDict):
    """The reply of `/v1/messages`: content blocks, the reason of the stop and the usage."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal[
        "end_turn",
        "max_tokens",
        "stop_sequence",
        "tool_use",
        "model_context_window_exceeded",
        "refusal",
    ]
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage
    policy: NotRequired[list[Verdict]]


class TokenCount(TypedDict):
    """The tokens of a conversation."""

    input_tokens: int
