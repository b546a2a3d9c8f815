"""`POST /v1/responses`: OpenAI's Responses API.

A request carries its whole conversation, or goes on with that of a stored response; the reply is a
list of items: reasoning, a message, function calls.
"""

import time
from collections.abc import Sequence
from typing import Any

from fastapi import Response

from maskdial.bundle.tokenizer import TokenSpeller
from maskdial.causal.chat.request import ChatRequest, ReplyReader
from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.generate import Completion
from maskdial.causal.model import WritingModel
from maskdial.causal.prompts import Prompt
from maskdial.dialects.call import Call
from maskdial.dialects.flow import Renderer, write
from maskdial.dialects.logprobs import chat_logprobs
from maskdial.dialects.openai.errors import CONTEXT_LENGTH_EXCEEDED, FORM
from maskdial.dialects.openai.replies import ResponseReply, ResponseUsage
from maskdial.dialects.openai.responses import compact, stored
from maskdial.dialects.openai.responses.body import ResponsesBody
from maskdial.dialects.openai.responses.output import Event, ResponseOutput, Status, usage
from maskdial.dialects.openai.responses.stored import StoredTurn, begin
from maskdial.dialects.openai.responses.tools import by_model_name
from maskdial.errors import MaskdialError, OverloadedError, PromptTooLongError, ValidationError
from maskdial.http.replies import encode_json
from maskdial.http.sse import named_frame


class ResponseWriter(Renderer):
    """Writes one response: token by token as stream events, and whole once it has ended.

    Attributes:
        response: the whole response, after the last token.
    """

    seconds_per_token = 1e-5  # to read one

    def __init__(
        self,
        body: ResponsesBody,
        chat: ChatRequest,
        prompt: Prompt,
        model: WritingModel,
        turn: StoredTurn,
    ) -> None:
        self.response: dict[str, Any] = {}
        self._prompt = prompt
        self._turn = turn
        self._reader = ReplyReader(chat, prompt, model)
        self._speller = TokenSpeller(model.tokenizer, prompt.ids)
        self._describes_tokens = body.describes_tokens
        # Of tokens whose text is not part of any delta yet.
        self._logprobs: list[Any] = []
        self._output = ResponseOutput(by_model_name(body.offered))
        self._echoed = body.echoed(model.defaults, stored=turn.stores)
        self._num_generated = self._num_events = 0
        self._ended: Finish | None = None
        self._header = {
            "id": turn.id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
        }

    def push(self, token: TokenEvent) -> list[Event]:
        """Adds the next token; returns the events to send for it."""
        events = [] if self._num_generated else self._begin()
        self._num_generated += 1
        if self._describes_tokens:
            self._logprobs += chat_logprobs([token], self._speller)["content"]
        for delta in self._reader.push(token):
            logprobs, self._logprobs = self._logprobs, []
            events += self._output.push(delta, logprobs)
        if token.finish is not None:
            self._ended = token.finish
            cut = token.finish.reason in ("length", "content_filter")
            status: Status = "incomplete" if cut else "completed"
            events += self._output.finish(status)
            self.response = self._content(status)
            events.append({"type": f"response.{status}", "response": self.response})
        return events

    def reply(self, completions: Sequence[Completion]) -> dict[str, Any]:
        for completion in completions:
            for text in completion.texts:
                for token in text.events:
                    self.push(token)
        return self.response

    async def frames(self, index: int, event: TokenEvent) -> bytes:
        events = self.push(event)
        if event.finish is not None:  # the last event tells that it can be retrieved
            await self.finish()
        return b"".join(map(self._frame, events))

    async def finish(self) -> None:
        """Ends the response, and stores it unless the request says no."""
        await self._turn.save_written(self.response)

    def _frame(self, event: Event) -> bytes:
        """An event as it is sent, with its sequence number."""
        numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
        self._num_events += 1
        return named_frame(event["type"], encode_json(numbered))

    def error_frame(self, error: MaskdialError) -> bytes:
        """The frames that end a stream which failed, possibly before its first token."""
        events = [] if self._num_events else self._begin()
        events += self._output.close("incomplete")
        about = {"code": _error_code(error), "message": error.message}
        content = self._content("failed") | {"error": about}
        events.append({"type": "response.failed", "response": content})
        return b"".join(map(self._frame, events))

    def _begin(self) -> list[Event]:
        content = self._content("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [{"type": kind, "response": content} for kind in kinds]

    def _content(self, status: str) -> dict[str, Any]:
        ended, reason = self._ended, None
        if status == "incomplete":
            filtered = ended is not None and ended.reason == "content_filter"
            reason = {"reason": "content_filter" if filtered else "max_output_tokens"}
        return {
            **self._header,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": reason,
            "output": self._output.items(),
            "usage": None if status == "in_progress" else self._usage(),
            **self._echoed,
            **({} if ended is None else ended.policy),
        }

    def _usage(self) -> ResponseUsage:
        return usage(self._prompt, self._num_generated, self._reader.num_reasoning)


def _error_code(error: MaskdialError) -> str:
    """One of the codes that OpenAI gives failed responses."""
    if isinstance(error, PromptTooLongError):
        return CONTEXT_LENGTH_EXCEEDED
    if isinstance(error, ValidationError):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, OverloadedError) else "server_error"


async def create_response(call: Call[ResponsesBody]) -> Response:
    """Answers a conversation; with `"stream": true` as server-sent events."""
    body = call.body
    turn = await StoredTurn.of(call)
    if body.background and not turn.in_background:
        return await begin(call, turn)
    model = await call.writer()
    chat = body.chat_request(model, turn.before)
    generation = await call.generation(chat, model)
    (prompt,) = generation.prompts
    writer = ResponseWriter(body, chat, prompt, model, turn)
    return await write(call, generation, writer, streams=bool(body.stream))


ROUTES = (
    FORM.route("/v1/responses", create_response, ResponsesBody, ResponseReply, streams=True),
    *compact.ROUTES,  # before those of responses by their ids
    *stored.ROUTES,
)
