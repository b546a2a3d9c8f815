"""`POST /v1/fim/completions`: the text between two texts, as Mistral has it."""

from collections.abc import Iterable
from typing import Any

from fastapi import Response
from pydantic import Field

from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion, Text
from maskdial.dialects.body import example
from maskdial.dialects.call import Call
from maskdial.dialects.openai.completions import CompletionsBody, CompletionsWriter
from maskdial.dialects.openai.errors import openai_route
from maskdial.dialects.openai.generation import answer
from maskdial.dialects.openai.replies import ChatReply


class FimBody(CompletionsBody):
    """The text before the gap, and the one after it."""

    model_config = example(
        {"model": "hybrid", "prompt": "The old king ", "suffix": " the sea.", "max_tokens": 8}
    )

    renamed = {**CompletionsBody.renamed, "random_seed": "seed"}  # noqa: RUF012

    prompt: str = Field(description="The text before the gap.")


class FimWriter(CompletionsWriter):
    """Writes texts as messages."""

    id_prefix = "fim"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, completion: Completion, text: Text) -> dict[str, Any]:
        written = super().choice(completion, text)
        message = {
            "role": "assistant",
            "content": written["text"],
            "refusal": None,
            "annotations": [],
        }
        return {
            "message": message,
            "logprobs": None,
            "finish_reason": written["finish_reason"],
        }

    def chunks(self, index: int, event: TokenEvent) -> Iterable[tuple[int, dict[str, Any]]]:
        for number, chunk in super().chunks(index, event):
            delta: dict[str, Any] = {"content": chunk["text"]}
            if event.index == 1:
                delta["role"] = "assistant"
            reason = chunk["finish_reason"]
            yield number, {"delta": delta, "logprobs": None, "finish_reason": reason}


async def fim_completions(call: Call[FimBody]) -> Response:
    """Writes the text between a prompt and a suffix; with `"stream": true` as server-sent events.

    Without a suffix, it continues the prompt.
    """
    return await answer(call, FimWriter)


ROUTES = (openai_route("/v1/fim/completions", fim_completions, FimBody, ChatReply, streams=True),)
