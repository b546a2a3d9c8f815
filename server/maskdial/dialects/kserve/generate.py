"""`/v2/models/NAME/generate` and `/generate_stream`: Triton's generate extension."""

from typing import Any, NotRequired

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from maskdial.causal.generate import Generation, timings
from maskdial.dialects.body import TaskBody, example, parse_body
from maskdial.dialects.call import Call, task_route
from maskdial.dialects.kserve.infer import kserve_error_reply
from maskdial.dialects.lenient import Lenient
from maskdial.dialects.native.generate import GENERATE
from maskdial.dialects.native.generate_bodies import GenerateBody
from maskdial.errors import MaskdialError, ValidationError
from maskdial.http.replies import encode_json, error_content, json_reply, timing_headers
from maskdial.http.sse import Frames, data_frame


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
    generation, header = await _prepare(call)
    completions = await generation.complete()
    text = completions[0].texts[0].finish.generated_text
    return json_reply(header | {"text_output": text}, headers=timing_headers(timings(completions)))


async def generate_stream(call: Call[GenerateTextBody]) -> Response:
    """Continues a prompt as server-sent events, one per token."""
    generation, header = await _prepare(call)
    return await call.stream(_frames(generation, header), _error_frame, {})


async def _prepare(call: Call[GenerateTextBody]) -> tuple[Generation, dict[str, str]]:
    """The admitted request, and what its replies begin with."""
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
        model = await inner.causal(GENERATE)
        generation = await inner.generation(inner.body.request(model.defaults), model)
    except ValidationError as error:
        raise inner.located(error) from error
    header = {"model_name": model.name, "model_version": "1"}
    if body.id is not None:
        header["id"] = body.id
    return generation, header


async def _frames(generation: Generation, header: dict[str, str]) -> Frames:
    async with generation.stream() as stream:
        async for _, event in stream:
            yield data_frame(encode_json(header | {"text_output": event.text}))


def _error_frame(error: MaskdialError) -> bytes:
    return data_frame(encode_json(error_content(error)))


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
