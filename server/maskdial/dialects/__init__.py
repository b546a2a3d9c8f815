"""The wire formats that the server speaks. A dialect parses and renders; it knows no model logic.

A new one is a module with its ``ROUTES``, listed here.
"""

from maskdial.dialects import (
    anthropic_messages,
    models,
    openai_chat,
    openai_completions,
    openai_decisions,
    openai_embeddings,
    openai_models,
    openai_rerank,
    openai_responses,
    openai_tokens,
    service,
    tasks,
    tgi,
    tokens,
)
from maskdial.dialects.shared_routes import share
from maskdial.models.registry import Task

# Paths that the OpenAI dialect has, too: its endpoint, and the keys by which its bodies are known.
_SHARED = {
    "/rerank": (openai_rerank.rerank, ("documents",)),
    "/tokenize": (openai_tokens.tokenize, ("prompt", "messages")),
    "/detokenize": (openai_tokens.detokenize, ("tokens",)),
}

ROUTES = (
    *(
        share(route, *_SHARED[route.path]) if route.path in _SHARED else route
        for route in (*tasks.ROUTES, *tgi.ROUTES, *tokens.ROUTES)
    ),
    *openai_completions.ROUTES,
    *openai_chat.ROUTES,
    *openai_responses.ROUTES,
    *openai_embeddings.ROUTES,
    *openai_rerank.ROUTES,
    *openai_decisions.ROUTES,
    *openai_models.ROUTES,
    *anthropic_messages.ROUTES,
    *openai_tokens.ROUTES,
    *models.ROUTES,
    *service.ROUTES,
)

TASKS: tuple[Task, ...] = (*tasks.TASKS, tgi.GENERATE, tasks.SCORE, tokens.TOKENIZE)
"""Everything that models can be asked for, in the order of listings."""
