"""`/v2/models/NAME/generate` and `/generate_stream`: Triton's generate extension."""

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion
from maskdial.dialects.body import TaskBody, example, parse_body
from maskdial.dialects.call import Call, task_route
from maskdial.dialects.flow import Renderer, write
from maskdial.dialects.kserve.infer import kserve_error_reply
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.native.generate_bodies import GenerateBody
from maskdial.errors import ValidationError
from maskdial.http.replies import encode_json
from maskdial.http.sse import data_frame


class GenerateTextBody(Lenient, TaskBody):
    """A prompt, as Triton's backends for language models take it."""

    model_config = example({"text_input": "Once upon a time", "parameters": {"max_new_tokens": 40}})
    spellings = {"prompts": "text_input", "texts": "text_input"}  # noqa: RUF012

    id: str | None = Field(None, description="Comes back with the reply.")
    text_input: str = Field(description="A prompt.")
    parameters: dict[str, Any] | None = Field(None, description="Those of /generate.")


class GenerateTextReply(TypedDict):
    """A text, or of a stream what a token adds to it."""

    model_name: str
    model_version: str
    id: NotRequired[str]
    text_output: str


async def generate(call: Call[GenerateTextBody]) -> Response:
    """Continues a prompt."""
    return await _answer(call, streams=False)


async def generate_stream(call: Call[GenerateTextBody]) -> Response:
    """Continues a prompt as server-sent events, one per token."""
    return await _answer(call, streams=True)


async def _answer(call: Call[GenerateTextBody], *, streams: bool) -> Response:
    body = call.body
    content = {
        "inputs": body.text_input,
        "parameters": body.parameters,
        "model": body.model,
        "mask": body.mask,
    }
    read = await call.reread(lambda: parse_body(GenerateBody, encode_json(content), call.ignored))
    inner = call.with_body(read)
    parameters = inner.body.parameters
    if parameters is not None and parameters.num_sequences > 1:
        raise ValidationError("parameters.n: there is one text; leave out n and best_of")
    try:
        model = await inner.writer()
        generation = await inner.generation(inner.body.request(model.defaults), model)
    except ValidationError as error:
        raise inner.located(error) from error
    header = {"model_name": model.name, "model_version": "1"}
    if body.id is not None:
        header["id"] = body.id
    return await write(call, generation, _TextOutput(header), streams=streams)


class _TextOutput(Renderer):
    """Writes a text, or of a stream what a token adds to it, behind what all replies begin with."""

    def __init__(self, header: Mapping[str, str]) -> None:
        self._header = dict(header)

    def reply(self, completions: Sequence[Completion]) -> dict[str, str]:
        return self._header | {"text_output": completions[0].texts[0].finish.generated_text}

    async def frames(self, index: int, event: TokenEvent) -> bytes:
        return data_frame(encode_json(self._header | {"text_output": event.text}))


ROUTES = tuple(
    task_route(
        f"/v2/models/{{name:path}}/{answer.__name__}",
        answer,
        GenerateTextBody,
        GenerateTextReply,
        error_reply=kserve_error_reply,
        invalid_status=400,
        streams=answer is generate_stream,
        tags=["kserve"],
        name=f"kserve_{answer.__name__}",
    )
    for answer in (generate, generate_stream)
)
