"""`POST /v1/fim/completions`: the text between two texts, as Mistral has it."""

from collections.abc import Iterable
from typing import Any

from fastapi import Response
from pydantic import Field

from maskdial.ask.write import AnyGeneration
from maskdial.bundle.tokenizer import TokenSpeller
from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion, Text
from maskdial.causal.model import WritingModel
from maskdial.dialects.body import example
from maskdial.dialects.call import Call
from maskdial.dialects.logprobs import chat_logprobs
from maskdial.dialects.openai.completions import CompletionsBody, CompletionsRenderer, answer
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import ChatReply


class FimBody(CompletionsBody):
    """The text before the gap, and the one after it."""

    model_config = example(
        {"model": "hybrid", "prompt": "The old king ", "suffix": " the sea.", "max_tokens": 8}
    )

    renamed = {**CompletionsBody.renamed, "random_seed": "seed"}  # noqa: RUF012

    prompt: str = Field(description="The text before the gap.")


class FimRenderer(CompletionsRenderer):
    """Writes texts as messages."""

    id_prefix = "fim"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    empty = {"delta": {}, "logprobs": None, "finish_reason": None}  # noqa: RUF012

    def __init__(
        self, body: CompletionsBody, generation: AnyGeneration, model: WritingModel
    ) -> None:
        super().__init__(body, generation, model)
        self._spellers: dict[int, TokenSpeller] = {}

    def choice(self, completion: Completion, text: Text) -> dict[str, Any]:
        written = super().choice(completion, text)
        message = {
            "role": "assistant",
            "content": written["text"],
            "refusal": None,
            "annotations": [],
        }
        logprobs = None
        if self._body.describes_tokens:
            # A message's tokens are those that were written, also where it begins with the prompt.
            events = [] if self._body.echoes_only else text.events
            logprobs = chat_logprobs(events, self._speller())
        return {
            "message": message,
            "logprobs": logprobs,
            "finish_reason": written["finish_reason"],
        }

    def chunks(self, index: int, event: TokenEvent) -> Iterable[tuple[int, dict[str, Any]]]:
        for number, chunk in super().chunks(index, event):
            delta: dict[str, Any] = {"content": chunk["text"]}
            if event.index == 1:
                delta["role"] = "assistant"
            reason = chunk["finish_reason"]
            logprobs = None
            if chunk["logprobs"] is not None:
                speller = self._spellers.setdefault(index, self._speller())
                logprobs = chat_logprobs([event], speller)
            yield number, {"delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _speller(self) -> TokenSpeller:
        (prompt,) = self._prompts
        return TokenSpeller(self._tokenizer, prompt.context_ids)


async def fim_completions(call: Call[FimBody]) -> Response:
    """Writes the text between a prompt and a suffix; with `"stream": true` as server-sent events.

    Without a suffix, it continues the prompt.
    """
    return await answer(call, FimRenderer)


ROUTES = (FORM.route("/v1/fim/completions", fim_completions, FimBody, ChatReply, streams=True),)
