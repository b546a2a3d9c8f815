"""`POST /api/chat`: conversations, as Ollama has them."""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Response
from pydantic import Field

from maskdial.bounds import Size
from maskdial.causal.chat.request import ChatRequest, ReplyReader
from maskdial.causal.model import WritingModel
from maskdial.dialects.body import MAX_MESSAGES, example
from maskdial.dialects.call import Call
from maskdial.dialects.ollama.answer import Clock, Part, answer, keep
from maskdial.dialects.ollama.body import TextBody
from maskdial.dialects.ollama.messages import MessageBody, ToolBody, conversation
from maskdial.errors import ValidationError


class OllamaChatBody(TextBody):
    """A conversation to answer; without messages, the model is loaded."""

    model_config = example({"messages": [{"role": "user", "content": "Who lives here?"}]})

    messages: Annotated[list[MessageBody], Size(0, MAX_MESSAGES, "messages")] = Field(
        default_factory=list,
        description="A last message of the assistant is continued.",
    )
    tools: list[ToolBody] | None = Field(None, description="Functions that the model may call.")

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def names(self) -> Mapping[str, str]:
        names = {**super().names(), "prompts": "messages", "texts": "messages"}
        return names if self.format else {**names, "grammar": "tools"}

    def chat(self, model: WritingModel) -> ChatRequest:
        """The body as a dialect-neutral request.

        Raises:
            ValidationError: the model does not think, or calls no tools.
        """
        if self.tools and model.reply_format.calls is None:
            raise ValidationError(
                f"the chat template of model {model.name!r} does not support tools; leave them out",
                field="tools",
            )
        last = self.messages[-1]
        return ChatRequest(
            conversation(self.messages),
            self.generation(model),
            tools=[tool.to_tool() for tool in self.tools or ()],
            continue_final_message=last.role == "assistant" and not last.tool_calls,
            **self.thinking(model),
        )


async def chat(call: Call[OllamaChatBody]) -> Response:
    """Answers a conversation; unless `"stream": false`, line by line."""
    body, clock = call.body, Clock()
    if body.is_empty:
        return await keep(call, body, _message)
    model = await call.writer()
    clock.load()
    body.note_context(call, model)
    request = body.chat(model)
    generation = await call.generation(request, model)
    reader = ReplyReader(request, generation.prompts[0], model)
    return await answer(call, body, generation, model, reader.push, _message, clock)


def _message(part: Part) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.content}
    if part.thinking:
        message["thinking"] = part.thinking
    if part.calls:
        message["tool_calls"] = part.calls
    return {"message": message}
