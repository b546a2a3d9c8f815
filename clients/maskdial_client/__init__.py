"""A Python client for maskdial servers, sync and async.

from maskdial_client import Client

with Client("http://127.0.0.1:8000") as client:
    print(client.fill_mask("Paris is the [MASK] of France.").fills[0].token_str)
    for event in client.stream("Once upon a time", max_new_tokens=40):
        print(event.text, end="", flush=True)
"""

from maskdial_client._async.classify import Classification, LabelScore
from maskdial_client._async.client import AsyncClient
from maskdial_client._async.decide import DecisionAnswer
from maskdial_client._async.embed import (
    Embedding,
    HybridEmbedding,
    RankedText,
    SparseEmbedding,
    StoredVectors,
    TokenEmbeddings,
)
from maskdial_client._async.fill_mask import (
    Fill,
    FillMaskResult,
    GapFill,
    Infilled,
    JointFill,
    JointToken,
)
from maskdial_client._async.generate import Generation, GenerationDetails, Token
from maskdial_client._async.server import Health, ModelInfo, ModelStatus, ServerInfo
from maskdial_client._async.spans import Answer, Answers, Entity, Redaction, Replacement
from maskdial_client._async.stream import AsyncTokenStream, StreamDetails, StreamEvent
from maskdial_client._async.tokens import PromptToken, TextScore, TextToken
from maskdial_client._sync.client import Client
from maskdial_client._sync.stream import TokenStream
from maskdial_client.errors import (
    ApiError,
    ConnectionFailedError,
    DeadlineError,
    ForbiddenError,
    GenerationError,
    InferenceError,
    MaskdialClientError,
    NotFoundError,
    OverloadedError,
    ProtocolError,
    ResponseTimeoutError,
    SlowBodyError,
    StreamEndedError,
    TooLargeError,
    TransportError,
    UnauthorizedError,
    UnavailableError,
    ValidationError,
)
from maskdial_client.retry import NO_RETRIES, RetryPolicy

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
    "DecisionAnswer",
    "Embedding",
    "Entity",
    "Fill",
    "FillMaskResult",
    "ForbiddenError",
    "GapFill",
    "Generation",
    "GenerationDetails",
    "GenerationError",
    "Health",
    "HybridEmbedding",
    "InferenceError",
    "Infilled",
    "JointFill",
    "JointToken",
    "LabelScore",
    "MaskdialClientError",
    "ModelInfo",
    "ModelStatus",
    "NotFoundError",
    "OverloadedError",
    "PromptToken",
    "ProtocolError",
    "RankedText",
    "Redaction",
    "Replacement",
    "ResponseTimeoutError",
    "RetryPolicy",
    "ServerInfo",
    "SlowBodyError",
    "SparseEmbedding",
    "StoredVectors",
    "StreamDetails",
    "StreamEndedError",
    "StreamEvent",
    "TextScore",
    "TextToken",
    "Token",
    "TokenEmbeddings",
    "TokenStream",
    "TooLargeError",
    "TransportError",
    "UnauthorizedError",
    "UnavailableError",
    "ValidationError",
]
