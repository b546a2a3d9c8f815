"""The routes of Ollama's API."""

from maskdial.dialects.ollama import changes, models
from maskdial.dialects.ollama.chat import OllamaChatBody, chat
from maskdial.dialects.ollama.embed import EmbedBody, EmbeddingsBody, embed, embeddings
from maskdial.dialects.ollama.errors import FORM
from maskdial.dialects.ollama.generate import OllamaGenerateBody, generate
from maskdial.dialects.ollama.replies import (
    ChatLine,
    EmbeddingReply,
    EmbedReply,
    GenerateLine,
    ListedModels,
    OllamaError,
    RunningModels,
    ShownModel,
    Status,
    Version,
)
from maskdial.http.route import Route, TaskRoute

ROUTES = (
    FORM.route("/api/chat", chat, OllamaChatBody, ChatLine, streams=True),
    FORM.route("/api/generate", generate, OllamaGenerateBody, GenerateLine, streams=True),
    FORM.route("/api/embed", embed, EmbedBody, EmbedReply),
    FORM.route("/api/embeddings", embeddings, EmbeddingsBody, EmbeddingReply),
    FORM.route("/api/show", models.show, models.ShowBody, ShownModel),
    FORM.route("/api/pull", changes.pull, changes.PullBody, Status, streams=True),
    *(
        TaskRoute(
            path,
            endpoint,
            body=changes.AnyBody,
            reply=Status,
            error=OllamaError,
            error_reply=FORM.reply,
            invalid_status=400,
            tags=["ollama"],
        )
        for path, endpoint in (
            ("/api/push", changes.refusing("copy a bundle's folder instead of pushing it")),
            ("/api/create", changes.refusing("make a model with 'maskdial export'")),
            ("/api/copy", changes.refusing("serve it by another name with --model NAME=FOLDER")),
            ("/api/blobs/{digest}", changes.refusing("make a model with 'maskdial export'")),
        )
    ),
    Route(
        "/api/delete",
        changes.delete,
        methods=["DELETE"],
        reply=Status,
        error=OllamaError,
        tags=["ollama"],
    ),
    *(
        Route(path, endpoint, methods=["GET"], reply=reply, error=OllamaError, tags=["ollama"])
        for path, endpoint, reply in (
            ("/api/version", models.version, Version),
            ("/api/tags", models.tags, ListedModels),
            ("/api/ps", models.running, RunningModels),
        )
    ),
)
