"""A client for maskdial servers: ``Client`` and ``AsyncClient``.

from maskdial_client import Client

with Client("http://127.0.0.1:8000") as client:
    print(client.fill_mask("Paris is the [MASK] of France.").fills[0].token_str)
    for event in client.stream("Once upon a time", max_new_tokens=40):
        print(event.text, end="", flush=True)
"""

from maskdial_client.async_client import AsyncClient
from maskdial_client.client import Client
from maskdial_client.errors import (
    ApiError,
    ConnectionFailedError,
    DeadlineError,
    GenerationError,
    InferenceError,
    MaskdialClientError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    ResponseTimeoutError,
    StreamEndedError,
    TooLargeError,
    TransportError,
    UnauthorizedError,
    UnavailableError,
    ValidationError,
)
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
from maskdial_client.retry import NO_RETRIES, RetryPolicy
from maskdial_client.streams import AsyncTokenStream, TokenStream

__all__ = [
    "NO_RETRIES",
    "Answer",
    "Answers",
    "ApiError",
    "AsyncClient",
    "AsyncTokenStream",
    "Classification",
    "Client",
    "ConnectionFailedError",
    "DeadlineError",
    "Embedding",
    "Entity",
    "Fill",
    "FillMaskResult",
    "Generation",
    "GenerationDetails",
    "GenerationError",
    "Health",
    "InferenceError",
    "LabelScore",
    "MaskdialClientError",
    "ModelInfo",
    "NotFoundError",
    "OverloadedError",
    "PromptToken",
    "ProtocolError",
    "RankedText",
    "ResponseTimeoutError",
    "RetryPolicy",
    "ServerInfo",
    "StreamDetails",
    "StreamEndedError",
    "StreamEvent",
    "TextScore",
    "TextToken",
    "Token",
    "TokenStream",
    "TooLargeError",
    "TransportError",
    "UnauthorizedError",
    "UnavailableError",
    "ValidationError",
]
