"""`POST /api/generate`: prompts to answer or to continue, as Ollama has them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

from fastapi import Response
from pydantic import Field, model_validator

from maskdial.causal.chat.message import ChatMessage
from maskdial.causal.chat.request import ChatRequest, ReplyReader
from maskdial.causal.events import TokenEvent
from maskdial.causal.model import WritingModel
from maskdial.causal.request import Infilling
from maskdial.causal.tools import ContentDelta
from maskdial.dialects.body import FieldError, example
from maskdial.dialects.call import Call
from maskdial.dialects.ollama.answer import Clock, Part, answer, keep
from maskdial.dialects.ollama.body import Images, TextBody
from maskdial.errors import ValidationError

_PLAIN = ("{{ .Prompt }}", "{{.Prompt}}")


class OllamaGenerateBody(TextBody):
    """A prompt; without one, the model is loaded."""

    model_config = example({"prompt": "Who lives here?"})

    neutral = {**TextBody.neutral, "suffix": ("",)}  # noqa: RUF012

    prompt: str = Field(
        "",
        description="A user's message for the chat template; continued as it is if the model has "
        "no template, and with raw.",
    )
    system: str | None = Field(None, description="The system prompt, for the chat template.")
    template: str | None = Field(
        None, description="Only {{ .Prompt }}, which means raw: templates are the model's own."
    )
    raw: bool | None = Field(None, description="Continue the prompt as it is. Default: false.")
    suffix: str | None = Field(
        None,
        description="The text after the one that is written, for models with fill-in-the-middle "
        "tokens; there is no chat template then.",
    )
    images: Images = None

    @model_validator(mode="after")
    def _check_raw(self) -> Self:
        if self.template and self.template.strip() not in _PLAIN:
            raise FieldError(
                "template",
                "the model's own chat template is used; leave it out, or send the rendered prompt "
                "with raw",
            )
        if self.is_raw and self.system:
            raise FieldError("system", "a raw prompt has no place for it; leave it out")
        if self.suffix is not None and self.system:
            raise FieldError("system", "a prompt with a suffix has no place for it; leave it out")
        if self.suffix is not None and self.raw:
            raise FieldError("suffix", "a raw prompt has its own marks around it; leave it out")
        if self.suffix is not None and self.think:
            raise FieldError("think", "a prompt with a suffix has no place for it; leave it out")
        if self.is_raw and self.think:
            raise FieldError("think", "a raw prompt says itself what to think; leave it out")
        return self

    @property
    def is_raw(self) -> bool:
        """Whether no chat template is used, whatever the model."""
        return bool(self.raw or self.template or self.suffix is not None)

    @property
    def is_empty(self) -> bool:
        return not self.prompt and self.suffix is None

    def names(self) -> Mapping[str, str]:
        return {**super().names(), "prompts": "prompt", "texts": "prompt", "messages": "prompt"}

    def chat(self, model: WritingModel) -> ChatRequest | None:
        """The prompt as a conversation; None if it is continued as it is.

        Raises:
            ValidationError: the model has no place for the system prompt, or does not think.
        """
        if self.is_raw:
            return None
        thinking = self.thinking(model)
        if not model.chat_template.exists:
            if self.system:
                raise ValidationError(
                    f"model {model.name!r} has no chat template, and no place for it; leave it out",
                    field="system",
                )
            return None
        messages = [ChatMessage("user", self.prompt)]
        if self.system:
            messages.insert(0, ChatMessage("system", self.system))
        return ChatRequest(messages, self.generation(model), **thinking)


async def generate(call: Call[OllamaGenerateBody]) -> Response:
    """Answers or continues a prompt; unless `"stream": false`, line by line."""
    body, clock = call.body, Clock()
    if body.is_empty:
        return await keep(call, body, _response)
    model = await call.writer()
    clock.load()
    body.note_context(call, model)
    chat = body.chat(model)
    if chat is None:
        infill = None if body.suffix is None else Infilling(body.suffix)
        request = replace(body.generation(model), prompts=[body.prompt], infill=infill)
        generation = await call.generation(request, model)
        return await answer(call, body, generation, model, _read, _response, clock)
    generation = await call.generation(chat, model)
    reader = ReplyReader(chat, generation.prompts[0], model)
    return await answer(call, body, generation, model, reader.push, _response, clock)


def _read(event: TokenEvent) -> Iterable[ContentDelta]:
    return (ContentDelta(event.text),) if event.text else ()


def _response(part: Part) -> dict[str, Any]:
    thinking = {"thinking": part.thinking} if part.thinking else {}
    return {"response": part.content, **thinking}
