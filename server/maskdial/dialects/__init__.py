"""The wire formats that the server speaks. A dialect parses and renders; it knows no model logic.

A new one is a module with its ``ROUTES``, listed here. If its errors have a form of their own,
their form is listed in ``_ERRORS`` as well.
"""

import functools
from collections.abc import Callable

from fastapi import Response

from maskdial.dialects import systemone
from maskdial.dialects.anthropic import errors as anthropic_errors
from maskdial.dialects.anthropic import route as anthropic_messages
from maskdial.dialects.cohere import chat as cohere_chat
from maskdial.dialects.cohere import embed as cohere_embed
from maskdial.dialects.kserve import generate as kserve_generate
from maskdial.dialects.kserve import infer as kserve_infer
from maskdial.dialects.kserve import predict as kserve_predict
from maskdial.dialects.kserve import repository as kserve_repository
from maskdial.dialects.kserve import triton as kserve_triton
from maskdial.dialects.llamacpp import completion as llamacpp_completion
from maskdial.dialects.llamacpp import infill
from maskdial.dialects.llamacpp import service as llamacpp_service
from maskdial.dialects.native import (
    admin,
    generate,
    models,
    page,
    seq2seq,
    service,
    tasks,
    tei,
    tokens,
)
from maskdial.dialects.ollama import errors as ollama_errors
from maskdial.dialects.ollama import route as ollama
from maskdial.dialects.openai import adapters as openai_adapters
from maskdial.dialects.openai import (
    chat,
    completions,
    decisions,
    embeddings,
    fim,
    moderations,
    pooling,
    prefill,
    rerank,
    scores,
)
from maskdial.dialects.openai import errors as openai_errors
from maskdial.dialects.openai import models as openai_models
from maskdial.dialects.openai import tokens as openai_tokens
from maskdial.dialects.openai.responses import route as openai_responses
from maskdial.dialects.shared_routes import share
from maskdial.http.exchange import ErrorReply
from maskdial.http.replies import error_reply

# Paths that the OpenAI dialect, vLLM and llama.cpp have, too.
_SHARED = {
    "/rerank": (rerank.SHARER,),
    "/score": (scores.SHARER,),
    "/tokenize": (openai_tokens.CONTENT_SHARER, openai_tokens.TOKENIZE_SHARER),
    "/detokenize": (openai_tokens.DETOKENIZE_SHARER,),
}

ROUTES = (
    *(
        functools.reduce(share, _SHARED.get(route.path, ()), route)
        for route in (
            *tasks.ROUTES,
            *generate.ROUTES,
            *infill.ROUTES,
            *seq2seq.ROUTES,
            *tokens.ROUTES,
        )
    ),
    *completions.ROUTES,
    *fim.ROUTES,
    *llamacpp_completion.ROUTES,
    *llamacpp_service.ROUTES,
    *chat.ROUTES,
    *openai_responses.ROUTES,
    *embeddings.ROUTES,
    *rerank.ROUTES,
    *scores.ROUTES,
    *pooling.ROUTES,
    *moderations.ROUTES,
    *cohere_embed.ROUTES,
    *cohere_chat.ROUTES,
    *decisions.ROUTES,
    *systemone.ROUTES,
    *openai_models.ROUTES,
    *openai_adapters.ROUTES,
    *prefill.ROUTES,
    *anthropic_messages.ROUTES,
    *ollama.ROUTES,
    *openai_tokens.ROUTES,
    *admin.ROUTES,
    *models.ROUTES,
    *tei.ROUTES,
    *kserve_infer.ROUTES,
    *kserve_generate.ROUTES,
    *kserve_predict.ROUTES,
    *kserve_triton.ROUTES,  # before those whose paths begin like theirs
    *kserve_repository.ROUTES,
    *service.ROUTES,
    *page.ROUTES,
)

_ERRORS = (anthropic_errors.FORM, ollama_errors.FORM, openai_errors.FORM)

ROUTING_ERRORS: tuple[tuple[str, Callable[[int, str, dict[str, str]], Response]], ...] = tuple(
    (form.prefix, form.routing_reply) for form in _ERRORS
)
"""How errors at unknown paths are written: by the first dialect with that prefix, if one has it."""

ERROR_REPLIES: tuple[tuple[str, ErrorReply], ...] = (
    ("/api/v0/", error_reply),  # LM Studio's, below Ollama's prefix
    *((form.prefix, form.reply) for form in _ERRORS),
)
"""The same for our own errors, where a path's route is not known."""
