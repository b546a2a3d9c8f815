"""`POST /v1/responses`: OpenAI's Responses API without a store.

Every request carries its whole conversation; the reply is a list of items: reasoning, a message,
function calls.
"""

import time
import uuid
from collections.abc import Iterable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from maskdial.causal.events import Finish
from maskdial.causal.tools import ContentDelta
from maskdial.dialects.openai_errors import http_error_reply, openai_route
from maskdial.dialects.openai_models import about_model
from maskdial.dialects.openai_responses_body import ResponsesBody
from maskdial.dialects.openai_responses_output import Event, ResponseOutput, Status
from maskdial.dialects.schema import parse_body, wire_names
from maskdial.dialects.tgi import GENERATE
from maskdial.errors import MaskdialError, OverloadedError, ValidationError
from maskdial.http.context import server_context
from maskdial.http.disconnect import unless_gone
from maskdial.http.replies import encode_json, json_reply, timing_headers, truncation_header
from maskdial.http.sse import Frames, data_frame, stream_reply
from maskdial.requests.generation import Generation, Prompt, timings
from maskdial.requests.timing import Deadline


class ResponseWriter:
    """Writes one response: whole, or as numbered stream events."""

    def __init__(self, body: ResponsesBody, model_name: str, prompt: Prompt) -> None:
        self.output = ResponseOutput()
        self.num_generated = 0
        self._prompt = prompt
        self._echoed = body.echoed()
        self._num_events = 0
        self._header = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model_name,
        }

    def begin(self) -> list[bytes]:
        """The frames that open a stream."""
        content = self._content("in_progress", self.output.items(), usage=None)
        kinds = ("response.created", "response.in_progress")
        return self.frames([{"type": kind, "response": content} for kind in kinds])

    def frames(self, events: Iterable[Event]) -> list[bytes]:
        """Events as they are sent, each with its sequence number."""
        return [self._frame(event) for event in events]

    def end(self, finish: Finish) -> list[bytes]:
        """The frames that close a stream."""
        closing = self.output.finish(_status(finish))
        content = self.response(finish)
        last = {"type": f"response.{content['status']}", "response": content}
        return self.frames([*closing, last])

    def failed(self, error: MaskdialError) -> bytes:
        """The frames that end a stream which failed, possibly before its first token."""
        opening = [] if self._num_events else self.begin()
        closing = self.output.close("incomplete")
        about = {"code": _error_code(error), "message": error.message}
        content = self._content("failed", self.output.items(), self._usage()) | {"error": about}
        last = {"type": "response.failed", "response": content}
        return b"".join([*opening, *self.frames([*closing, last])])

    def response(self, finish: Finish) -> dict[str, Any]:
        """The whole response, once its output is finished."""
        return self._content(_status(finish), self.output.items(), self._usage())

    def _content(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._header,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": reason,
            "output": output,
            "usage": usage,
            **self._echoed,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = len(self._prompt.ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": self._prompt.num_cached,
                "cache_write_tokens": 0,
            },
            "output_tokens": self.num_generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + self.num_generated,
        }

    def _frame(self, event: Event) -> bytes:
        numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
        self._num_events += 1
        return f"event: {event['type']}\n".encode() + data_frame(encode_json(numbered))


def _status(finish: Finish) -> Status:
    return "incomplete" if finish.reason == "length" else "completed"


def _error_code(error: MaskdialError) -> str:
    """One of the codes that OpenAI gives failed responses."""
    if isinstance(error, ValidationError):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"


async def create_response(request: Request) -> Response:
    """Answers a conversation; with `"stream": true` as server-sent events."""
    body = parse_body(ResponsesBody, await request.body())
    server = server_context(request)
    deadline = Deadline(body.timeout, server.config)
    with about_model():
        model = server.models.causal_for(GENERATE, body.model)
    request.state.model = model.name
    with wire_names(body.names(), batch=False):
        generation = await unless_gone(
            request, Generation.prepare(body.request(model), model, server.config, deadline)
        )
        (prompt,) = generation.prompts
        writer = ResponseWriter(body, model.name, prompt)
        if body.stream:
            return await stream_reply(
                request,
                _frames(generation, body, writer),
                writer.failed,
                truncation_header(prompt.num_truncated),
            )
        completions = await unless_gone(request, generation.complete())
    ((text,),) = (completion.texts for completion in completions)
    writer.num_generated = len(text.events)
    writer.output.push(ContentDelta(text.finish.generated_text))
    writer.output.finish(_status(text.finish))
    return json_reply(writer.response(text.finish), headers=timing_headers(timings(completions)))


async def _frames(generation: Generation, body: ResponsesBody, writer: ResponseWriter) -> Frames:
    """The events of a stream. It begins with the first token: an error before it has its status."""
    with wire_names(body.names(), batch=False):
        async with generation.stream() as stream:
            async for _, event in stream:
                frames = writer.begin() if writer.num_generated == 0 else []
                writer.num_generated += 1
                if event.text:
                    frames += writer.frames(writer.output.push(ContentDelta(event.text)))
                if event.finish is not None:
                    frames += writer.end(event.finish)
                for frame in frames:
                    yield frame


async def retrieve_response(request: Request) -> Response:
    """Always 404: nothing is stored."""
    message = "responses are not stored; there is none to retrieve"
    return http_error_reply(404, message, {})


ROUTES = (
    openai_route("/v1/responses", create_response, ResponsesBody),
    APIRoute("/v1/responses/{id}", retrieve_response, methods=["GET"], tags=["openai"]),
)
