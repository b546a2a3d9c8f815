"""`POST /v1/responses/compact`: the model sums up a conversation, which then goes on from there.

The reply has the messages that are no answer, as they came, and one item with the summary, which
is sent back in `input` as any other.
"""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import Response
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from maskdial.bounds import Range
from maskdial.causal.chat.message import ChatMessage
from maskdial.causal.chat.request import ChatRequest, read_reply
from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion
from maskdial.causal.model import WritingModel
from maskdial.causal.prompts import Prompt
from maskdial.dialects.body import FieldError, example
from maskdial.dialects.call import Call
from maskdial.dialects.flow import Renderer, write
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import ResponseUsage
from maskdial.dialects.openai.responses.items import (
    CompactionItem,
    Input,
    Item,
    MessageItem,
    conversation,
)
from maskdial.dialects.openai.responses.output import usage
from maskdial.dialects.openai.responses.stored import items_before
from maskdial.dialects.openai.sampling import SamplingBody

ASK = (
    "Write a summary of this conversation for whoever goes on with it without having read it. Say "
    "what was asked for, what was done and found out, with the names, paths, numbers and decisions "
    "that matter, and what is still to be done. Write nothing but the summary."
)
"""What the model is asked after the conversation."""


class CompactionReply(TypedDict):
    """A conversation made shorter."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


class CompactBody(SamplingBody):
    """A conversation to sum up."""

    model_config = example({"input": "Who lives here?", "max_output_tokens": 40})

    # The model is not to call or to think about anything else, so these mean nothing.
    habits = SamplingBody.habits | {
        *("include", "parallel_tool_calls", "reasoning", "text", "tool_choice", "tools"),
        *("prompt_cache_options", "prompt_cache_retention"),
    }
    neutral = {**SamplingBody.neutral, "stream": (False,)}  # noqa: RUF012
    renamed = {**SamplingBody.renamed, "max_tokens": "max_output_tokens"}  # noqa: RUF012

    input: Input | None = None
    instructions: str | None = Field(
        None, description="Inserted before the input as a system message."
    )
    previous_response_id: str | None = Field(
        None, description="The stored response whose conversation comes before the input."
    )
    max_output_tokens: Annotated[int, Range(1)] | None = Field(
        None, description="Extension: tokens of the summary. Default: what the context leaves."
    )

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if self.input is None and self.previous_response_id is None:
            raise FieldError("input", "this field is required")
        return self

    def names(self) -> Mapping[str, str]:
        return {
            "prompts": "input",
            "messages": "input",
            "max_new_tokens": "max_output_tokens",
            "min_new_tokens": "min_tokens",
        }

    def chat_request(self, model: WritingModel, items: Sequence[Item]) -> ChatRequest:
        """The request for a summary of some items."""
        return ChatRequest(
            [*conversation(self.instructions, items), ChatMessage("user", ASK)],
            self.generation(
                model.defaults,
                max_new_tokens=self.max_output_tokens or self.rest_of_context(model),
                is_limited=self.max_output_tokens is not None,
            ),
            tool_choice=None,
        )


class CompactionWriter(Renderer):
    """Writes the shorter conversation."""

    def __init__(
        self, chat: ChatRequest, prompt: Prompt, model: WritingModel, items: Sequence[Item]
    ) -> None:
        self._chat, self._prompt, self._model, self._items = chat, prompt, model, items

    def reply(self, completions: Sequence[Completion]) -> CompactionReply:
        (completion,) = completions
        events = completion.texts[0].events
        summary = read_reply(self._chat, self._prompt, events, self._model)
        return {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*_kept(self._items), CompactionItem.written(summary.content.strip())],
            "usage": usage(self._prompt, len(events), summary.num_reasoning),
        }

    async def frames(self, index: int, event: TokenEvent) -> bytes:
        raise NotImplementedError("a conversation is made shorter as a whole")


def _kept(items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages that are no answers, as output items."""
    return [
        {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "status": "completed",
            "role": item.role,
            "content": [{"type": "input_text", "text": item.content}],
        }
        for item in items
        if isinstance(item, MessageItem) and item.role != "assistant"
    ]


async def compact_response(call: Call[CompactBody]) -> Response:
    """Sums up a conversation."""
    body = call.body
    items = [*await items_before(call, body.previous_response_id), *(body.input or ())]
    model = await call.writer()
    chat = body.chat_request(model, items)
    generation = await call.generation(chat, model)
    writer = CompactionWriter(chat, generation.prompts[0], model, items)
    return await write(call, generation, writer, streams=False)


ROUTES = (FORM.route("/v1/responses/compact", compact_response, CompactBody, CompactionReply),)
