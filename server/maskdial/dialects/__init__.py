"""The wire formats that the server speaks. A dialect parses and renders; it knows no model logic.

A new one is a module with its ``ROUTES``, listed here.
"""

from maskdial.dialects import (
    models,
    openai_chat,
    openai_completions,
    openai_models,
    service,
    tasks,
    tgi,
    tokens,
)
from maskdial.models.registry import Task

ROUTES = (
    *tasks.ROUTES,
    *tgi.ROUTES,
    *tokens.ROUTES,
    *openai_chat.ROUTES,
    *openai_completions.ROUTES,
    *openai_models.ROUTES,
    *models.ROUTES,
    *service.ROUTES,
)

TASKS: tuple[Task, ...] = (*tasks.TASKS, tgi.GENERATE, tasks.SCORE, tokens.TOKENIZE)
"""Everything that models can be asked for, in the order of listings."""
