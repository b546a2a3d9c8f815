"""How the OpenAI dialect answers a generation request: one flow for completions and chat."""

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from fastapi import Response

from maskdial.causal.events import FinishReason, TokenEvent
from maskdial.causal.generate import Completion, Generation, Text, timings
from maskdial.causal.model import CausalModel
from maskdial.dialects.call import Call
from maskdial.dialects.native.generate import GENERATE
from maskdial.dialects.openai.errors import error_frame
from maskdial.dialects.openai.logprobs import count_generated, usage
from maskdial.dialects.openai.sampling import GenerationBody
from maskdial.engine.offload import offload
from maskdial.http.replies import (
    encode_json,
    json_reply,
    timing_headers,
    truncation_header,
    warnings_header,
)
from maskdial.http.sse import Frames, data_frame

_SECONDS_PER_TOKEN = 2e-6  # to render one
FINISH_REASONS: Mapping[FinishReason, str] = {
    "length": "length",
    "eos_token": "stop",
    "stop_sequence": "stop",
}
DONE = data_frame(b"[DONE]")


class Writer(Protocol):
    """Renders the choices of one request; the replies and chunks around them are all alike.

    Attributes:
        id_prefix: of the reply's id.
        object: of a whole reply.
        chunk_object: of a stream's chunks.
    """

    id_prefix: str
    object: str
    chunk_object: str
    seconds_per_token: float
    """What a whole text takes to write, in seconds for each of its tokens."""

    @property
    def details(self) -> Mapping[str, int] | None:
        """What the generated tokens are, so far; None where there is nothing to report."""

    def choice(self, completion: Completion, text: Text) -> dict[str, Any]:
        """A finished text, without its index."""

    def chunks(self, index: int, event: TokenEvent) -> Iterable[tuple[int, dict[str, Any]]]:
        """What a token adds to a stream: the indices and contents of the chunks to send.

        Args:
            index: of the choice that the token belongs to.
            event: the token.
        """


BodyT = TypeVar("BodyT", bound=GenerationBody)
MakeWriter = Callable[[BodyT, Generation, CausalModel], Writer]
"""Makes the writer of an admitted request."""


async def answer(call: Call[BodyT], make_writer: MakeWriter[BodyT]) -> Response:
    """Answers a body as one reply or as a stream."""
    body = call.body
    model = await call.causal(GENERATE)
    body.check_causal()
    generation = await call.generation(body.request(model), model)
    warnings = warnings_header(generation.warnings)
    if body.stream:
        writer = make_writer(body, generation, model)
        num_truncated = sum(prompt.num_truncated for prompt in generation.prompts)
        return await call.stream(
            _frames(generation, body, writer, model.name),
            error_frame,
            truncation_header(num_truncated) | warnings,
        )
    completions = await generation.complete()
    writer = make_writer(body, generation, model)

    def reply() -> Response:
        content = reply_header(writer.id_prefix, writer.object, model.name)
        content["choices"] = _choices(completions, body.n or 1, writer)
        num_generated = 0 if body.echoes_only else count_generated(completions)
        content["usage"] = usage(generation.prompts, num_generated, writer.details)
        return json_reply(content, headers=timing_headers(timings(completions)) | warnings)

    num_described = _count_described(completions) if body.describes_tokens else 0
    seconds = num_described * _SECONDS_PER_TOKEN * (1 + body.num_top)
    return await offload(reply, seconds + count_generated(completions) * writer.seconds_per_token)


def _count_described(completions: list[Completion]) -> int:
    """About how many tokens a reply describes."""
    num_echoed = sum(
        len(text.finish.prompt_logprobs) for each in completions for text in each.texts
    )
    return num_echoed + count_generated(completions)


def reply_header(id_prefix: str, kind: str, model_name: str) -> dict[str, Any]:
    """The fields that a reply, and every chunk of a stream, begins with."""
    return {
        "id": f"{id_prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model_name,
    }


def _choices(completions: list[Completion], n: int, writer: Writer) -> list[dict[str, Any]]:
    texts = [(each, text) for each in completions for text in each.best(n)[:n]]
    return [
        {"index": index} | writer.choice(completion, text)
        for index, (completion, text) in enumerate(texts)
    ]


async def _frames(
    generation: Generation, body: GenerationBody, writer: Writer, model_name: str
) -> Frames:
    """The chunks of a stream, one per token, each with one choice."""
    header = reply_header(writer.id_prefix, writer.chunk_object, model_name)
    num_generated = 0
    async with generation.stream() as stream:
        async for sequence, event in stream:
            num_generated += not body.echoes_only
            for index, content in writer.chunks(sequence, event):
                chunk = header | {"choices": [{"index": index} | content]}
                if body.continuous_usage:
                    chunk["usage"] = usage(generation.prompts, num_generated, writer.details)
                elif body.includes_usage:
                    chunk["usage"] = None
                yield data_frame(encode_json(chunk))
    if body.includes_usage:
        totals = usage(generation.prompts, num_generated, writer.details)
        yield data_frame(encode_json(header | {"choices": [], "usage": totals}))
    yield DONE
