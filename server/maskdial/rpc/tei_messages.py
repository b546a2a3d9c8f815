"""The messages of text-embeddings-inference (its ``tei.proto``)."""

from collections.abc import Mapping

from maskdial.rpc.schema import Fields, Schema

PACKAGE = "tei.v1"

LEFT = 1
"""Of `TruncationDirection`, which is right otherwise: 0."""
MODEL_TYPES: Mapping[str, int] = {"rerank": 2, "classify": 1}
"""Of `ModelType`, by what a model does; others are embedding models: 0."""

_METADATA: Fields = {
    "compute_chars": (1, "uint32"),
    "compute_tokens": (2, "uint32"),
    "total_time_ns": (3, "uint64"),
    "tokenization_time_ns": (4, "uint64"),
    "queue_time_ns": (5, "uint64"),
    "inference_time_ns": (6, "uint64"),
}
_PROMPTED: Fields = {
    "inputs": (1, "string"),
    "truncate": (2, "bool"),
    "truncation_direction": (3, "TruncationDirection"),
    "prompt_name": (4, "?string"),
}
_MESSAGES: Mapping[str, Fields] = {
    "InfoRequest": {},
    "InfoResponse": {
        "version": (1, "string"),
        "sha": (2, "?string"),
        "docker_label": (3, "?string"),
        "model_id": (4, "string"),
        "model_sha": (5, "?string"),
        "model_dtype": (6, "string"),
        "model_type": (7, "ModelType"),
        "max_concurrent_requests": (8, "uint32"),
        "max_input_length": (9, "uint32"),
        "max_batch_tokens": (10, "uint32"),
        "max_batch_requests": (11, "?uint32"),
        "max_client_batch_size": (12, "uint32"),
        "tokenization_workers": (13, "uint32"),
    },
    "Metadata": _METADATA,
    "EmbedRequest": {
        "inputs": (1, "string"),
        "truncate": (2, "bool"),
        "normalize": (3, "?bool"),
        "truncation_direction": (4, "TruncationDirection"),
        "prompt_name": (5, "?string"),
        "dimensions": (6, "?uint32"),
    },
    "EmbedResponse": {"embeddings": (1, "*float"), "metadata": (2, "Metadata")},
    "EmbedSparseRequest": _PROMPTED,
    "SparseValue": {"index": (1, "uint32"), "value": (2, "float")},
    "EmbedSparseResponse": {
        "sparse_embeddings": (1, "*SparseValue"),
        "metadata": (2, "Metadata"),
    },
    "EmbedAllRequest": _PROMPTED,
    "TokenEmbedding": {"embeddings": (1, "*float")},
    "EmbedAllResponse": {"token_embeddings": (1, "*TokenEmbedding"), "metadata": (2, "Metadata")},
    "PredictRequest": {
        "inputs": (1, "string"),
        "truncate": (2, "bool"),
        "raw_scores": (3, "bool"),
        "truncation_direction": (4, "TruncationDirection"),
    },
    "PredictPairRequest": {
        "inputs": (1, "*string"),
        "truncate": (2, "bool"),
        "raw_scores": (3, "bool"),
        "truncation_direction": (4, "TruncationDirection"),
    },
    "Prediction": {"score": (1, "float"), "label": (2, "string")},
    "PredictResponse": {"predictions": (1, "*Prediction"), "metadata": (2, "Metadata")},
    "RerankRequest": {
        "query": (1, "string"),
        "texts": (2, "*string"),
        "truncate": (3, "bool"),
        "raw_scores": (4, "bool"),
        "return_text": (5, "bool"),
        "truncation_direction": (6, "TruncationDirection"),
    },
    "RerankStreamRequest": {
        "query": (1, "string"),
        "text": (2, "string"),
        "truncate": (3, "bool"),
        "raw_scores": (4, "bool"),
        "return_text": (5, "bool"),
        "truncation_direction": (6, "TruncationDirection"),
    },
    "Rank": {"index": (1, "uint32"), "text": (2, "?string"), "score": (3, "float")},
    "RerankResponse": {"ranks": (1, "*Rank"), "metadata": (2, "Metadata")},
    "EncodeRequest": {
        "inputs": (1, "string"),
        "add_special_tokens": (2, "bool"),
        "prompt_name": (3, "?string"),
    },
    "SimpleToken": {
        "id": (1, "uint32"),
        "text": (2, "string"),
        "special": (3, "bool"),
        "start": (4, "?uint32"),
        "stop": (5, "?uint32"),
    },
    "EncodeResponse": {"tokens": (1, "*SimpleToken")},
    "DecodeRequest": {"ids": (1, "*uint32"), "skip_special_tokens": (2, "bool")},
    "DecodeResponse": {"text": (1, "string")},
}

SCHEMA = Schema(
    PACKAGE,
    _MESSAGES,
    enumerations={
        "TruncationDirection": ("TRUNCATION_DIRECTION_RIGHT", "TRUNCATION_DIRECTION_LEFT"),
        "ModelType": ("MODEL_TYPE_EMBEDDING", "MODEL_TYPE_CLASSIFIER", "MODEL_TYPE_RERANKER"),
    },
)
message, read = SCHEMA.message, SCHEMA.read
