"""How Ollama's dialect answers: one object, or lines that grow to it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from fastapi import Response
from pydantic_core import from_json

from maskdial.ask.write import AnyGeneration
from maskdial.bundle.tokenizer import TokenSpeller
from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.generate import Completion
from maskdial.causal.model import WritingModel
from maskdial.causal.prompts import Prompt
from maskdial.causal.tools import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta
from maskdial.dialects.call import Call
from maskdial.dialects.flow import Renderer, write
from maskdial.dialects.logprobs import chat_logprobs
from maskdial.dialects.ollama.body import TextBody
from maskdial.dialects.ollama.errors import LINES, error_content, line
from maskdial.errors import ForbiddenError, MaskdialError, UnauthorizedError, ValidationError
from maskdial.http.replies import json_reply
from maskdial.http.sse import StreamForm


@dataclass(slots=True)
class Part:
    """A part of a reply, or all of it. Calls are complete."""

    content: str = ""
    thinking: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.thinking or self.calls or self.logprobs)

    def add(self, other: "Part") -> None:
        """Appends the next part."""
        self.content += other.content
        self.thinking += other.thinking
        self.calls += other.calls
        self.logprobs += other.logprobs


Read = Callable[[TokenEvent], Iterable[ReplyDelta]]
"""What a token adds to a reply."""

Shape = Callable[[Part], dict[str, Any]]
"""The fields of a route's replies that a part fills."""


class PartReader:
    """Makes parts of the tokens of one reply.

    Args:
        read: tells the text from reasoning and calls.
        speller: spells the tokens to describe; None: they are not described.
    """

    def __init__(self, read: Read, speller: TokenSpeller | None) -> None:
        self._read = read
        self._speller = speller
        self._call: dict[str, Any] | None = None
        self._arguments: list[str] = []

    def push(self, event: TokenEvent) -> Part:
        """Takes the next token and returns what it adds."""
        part = Part()
        for delta in self._read(event):
            match delta:
                case ContentDelta(text):
                    part.content += text
                case ReasoningDelta(text):
                    part.thinking += text
                case ToolCallDelta():
                    self._grow(delta, part)
        if event.finish is not None:
            self._close(part)
        if self._speller is not None:
            part.logprobs = chat_logprobs([event], self._speller)["content"]
        return part

    def _grow(self, delta: ToolCallDelta, part: Part) -> None:
        if delta.name is not None:
            self._close(part)
            function = {"index": delta.index, "name": delta.name}
            self._call = {"id": delta.call_id, "function": function}
        self._arguments.append(delta.arguments)

    def _close(self, part: Part) -> None:
        """Ends the open call, if there is one."""
        if self._call is not None:
            # A call cut off by num_predict keeps the arguments that were complete.
            arguments = from_json("".join(self._arguments) or "{}", allow_partial=True)
            self._call["function"]["arguments"] = arguments
            part.calls.append(self._call)
        self._call = None
        self._arguments.clear()


@dataclass(slots=True)
class Clock:
    """When a request began, and when it had its model; in nanoseconds."""

    began: int = field(default_factory=time.perf_counter_ns)
    loaded: int = 0

    def load(self) -> None:
        """Notes that the model is loaded."""
        self.loaded = time.perf_counter_ns()

    def durations(self, prompt: Prompt, finish: Finish) -> dict[str, int]:
        """What the end of a reply says of them; clients divide by those of tokens."""
        decoding = finish.inference_seconds - finish.prefill_seconds
        return {
            "total_duration": time.perf_counter_ns() - self.began,
            "load_duration": self.loaded - self.began,
            "prompt_eval_count": len(prompt.ids),
            "prompt_eval_duration": max(int(finish.prefill_seconds * 1e9), 1),
            "eval_count": finish.generated_tokens,
            "eval_duration": max(int(decoding * 1e9), 1),
        }


class LineRenderer(Renderer):
    """Writes one reply, whole or line by line.

    Args:
        name: of the model, as the client wrote it.
        shape: of the route's replies.
        reader: of the reply's tokens.
        prompt: what it replies to.
        clock: of the request.
    """

    seconds_per_token = 1e-5  # to read one

    def __init__(
        self, name: str, shape: Shape, reader: PartReader, prompt: Prompt, clock: Clock
    ) -> None:
        self._name = name
        self._shape = shape
        self._reader = reader
        self._prompt = prompt
        self._clock = clock
        # A line that adds nothing keeps a stream alive.
        self.form = StreamForm(LINES, line(self._line(Part())))

    def reply(self, completions: Sequence[Completion]) -> dict[str, Any]:
        ((text,),) = (completion.texts for completion in completions)
        whole = Part()
        for event in text.events:
            whole.add(self._reader.push(event))
        return self._line(whole) | self._ending(text.finish)

    async def frames(self, index: int, event: TokenEvent) -> bytes:
        part = self._reader.push(event)
        frames = line(self._line(part)) if part else b""
        if event.finish is not None:  # the last line has the counts
            frames += line(self._line(Part()) | self._ending(event.finish))
        return frames

    def error_frame(self, error: MaskdialError) -> bytes:
        return line(error_content(error))

    def _line(self, part: Part) -> dict[str, Any]:
        logprobs = {"logprobs": part.logprobs} if part.logprobs else {}
        return opening(self._name) | self._shape(part) | {"done": False} | logprobs

    def _ending(self, finish: Finish) -> dict[str, Any]:
        reason = "length" if finish.reason == "length" else "stop"
        counts = self._clock.durations(self._prompt, finish)
        return {"done": True, "done_reason": reason, **counts, **finish.policy}


def opening(name: str) -> dict[str, Any]:
    """The fields that every line begins with."""
    return {"model": name, "created_at": timestamp(datetime.now(UTC))}


def timestamp(when: datetime) -> str:
    """A time as Ollama writes it."""
    return when.isoformat().replace("+00:00", "Z")


async def answer(
    call: Call[Any],
    body: TextBody,
    generation: AnyGeneration,
    model: WritingModel,
    read: Read,
    shape: Shape,
    clock: Clock,
) -> Response:
    """Answers an admitted request, whole or line by line."""
    (prompt,) = generation.prompts
    speller = TokenSpeller(model.tokenizer, prompt.context_ids) if body.logprobs else None
    name = body.model or model.name
    renderer = LineRenderer(name, shape, PartReader(read, speller), prompt, clock)
    return await write(call, generation, renderer, streams=body.streams)


async def keep(call: Call[Any], body: TextBody, shape: Shape) -> Response:
    """Answers a request without input, which has its model loaded, or unloaded.

    Only the owner of the server may have a model unloaded, or kept for another time than the
    server's.

    Raises:
        ForbiddenError, UnauthorizedError: the model is to be unloaded, by another.
        As `Call.model` and `Models.load`.
    """
    name, models = call.choice().name, call.server.models
    reason = "load"
    if body.keep_alive == 0:
        call.check_admin()
        if name is None:
            raise ValidationError("name the model to unload", field="model")
        await models.unload(name)
        reason = "unload"
    elif body.keep_alive is not None and name is not None and _is_admin(call):
        await models.load(name, keep_alive=body.keep_alive)
    else:
        name = (await call.writer()).name
    content = opening(body.model or name or "") | shape(Part())
    return json_reply(content | {"done": True, "done_reason": reason})


def _is_admin(call: Call[Any]) -> bool:
    try:
        call.check_admin()
    except (ForbiddenError, UnauthorizedError):
        return False
    return True
