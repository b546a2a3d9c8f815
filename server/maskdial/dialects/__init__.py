"""The wire formats that the server speaks. A dialect parses and renders; it knows no model logic.

A new one is a module with its ``ROUTES``, listed here. If its errors have a form of their own,
its errors module is listed in ``_ERRORS`` as well.
"""

from collections.abc import Callable

from fastapi import Response

from maskdial.dialects import (
    admin,
    anthropic_errors,
    anthropic_messages,
    kserve,
    models,
    openai_chat,
    openai_completions,
    openai_decisions,
    openai_embeddings,
    openai_errors,
    openai_models,
    openai_rerank,
    openai_responses,
    openai_tokens,
    page,
    service,
    tasks,
    text_to_text,
    tgi,
    tokens,
)
from maskdial.dialects.shared_routes import share
from maskdial.http.exchange import ErrorReply
from maskdial.models.served import Task

# Paths that the OpenAI dialect has, too.
_SHARED = {
    "/rerank": openai_rerank.SHARER,
    "/tokenize": openai_tokens.TOKENIZE_SHARER,
    "/detokenize": openai_tokens.DETOKENIZE_SHARER,
}

ROUTES = (
    *(
        share(route, _SHARED[route.path]) if route.path in _SHARED else route
        for route in (*tasks.ROUTES, *tgi.ROUTES, *text_to_text.ROUTES, *tokens.ROUTES)
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
    *admin.ROUTES,
    *models.ROUTES,
    *kserve.ROUTES,
    *service.ROUTES,
    *page.ROUTES,
)

TASKS: tuple[Task, ...] = (
    *tasks.TASKS,
    tgi.GENERATE,
    *text_to_text.TASKS,
    tasks.SCORE,
    tokens.TOKENIZE,
)
"""Everything that models can be asked for, in the order of listings."""

_ERRORS = (anthropic_errors, openai_errors)

ROUTING_ERRORS: tuple[tuple[str, Callable[[int, str, dict[str, str]], Response]], ...] = tuple(
    (errors.PREFIX, errors.http_error_reply) for errors in _ERRORS
)
"""How errors at unknown paths are written: by the first dialect with that prefix, if one has it."""

ERROR_REPLIES: tuple[tuple[str, ErrorReply], ...] = tuple(
    (errors.PREFIX, errors.error_reply) for errors in _ERRORS
)
"""The same for our own errors, where a path's route is not known."""
