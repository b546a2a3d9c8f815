"""How every dialect answers a request to write: one flow from the admitted request to its reply.

A dialect reads its body into a `GenerationRequest`, and has a `Renderer` for the tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from fastapi import Response

from maskdial.ask.unmasking import UnmaskedBlock, UnmaskedGeneration
from maskdial.ask.write import AnyGeneration
from maskdial.causal.events import TokenEvent
from maskdial.causal.generate import Completion, count_generated
from maskdial.dialects.call import Call
from maskdial.engine.offload import offload
from maskdial.errors import MaskdialError, ValidationError
from maskdial.http.replies import (
    encode_json,
    error_content,
    json_reply,
    timing_headers,
    truncation_header,
    warnings_header,
)
from maskdial.http.sse import EVENTS, Frames, StreamForm, data_frame


class Renderer(ABC):
    """Renders the texts of one request: all of them as `reply`, or token by token as `frames`.

    Attributes:
        form: of the stream.
        seconds_per_token: about what a whole reply takes to render, for each of its tokens.
    """

    form: StreamForm = EVENTS
    seconds_per_token = 0.0

    @abstractmethod
    def reply(self, completions: Sequence[Completion]) -> object:
        """The whole reply as JSON has it. It is called in a thread if it takes long.

        Args:
            completions: one for each prompt.
        """

    @abstractmethod
    async def frames(self, index: int, event: TokenEvent) -> bytes:
        """What a token adds to a stream; empty for nothing.

        Args:
            index: of the text, counted prompt by prompt, and copy by copy within a prompt.
            event: the token.
        """

    async def block(self, index: int, block: UnmaskedBlock) -> bytes:
        """What a block of a text that is unmasked adds to a stream: by default, its tokens one by
        one.
        """
        return b"".join([await self.frames(index, token) for token in block.tokens])

    def end(self) -> bytes:
        """What a stream has after the last token of the last text."""
        return b""

    def error_frame(self, error: MaskdialError) -> bytes:
        """What a stream that failed ends with."""
        return error_frame(error)

    def seconds(self, completions: Sequence[Completion]) -> float:
        """About how long the whole reply takes to render."""
        return count_generated(completions) * self.seconds_per_token

    async def finish(self) -> None:  # noqa: B027 (few have anything to do)
        """Called with the whole reply rendered, before it is sent."""


def error_frame(error: MaskdialError) -> bytes:
    """An event with an error, as our own routes tell it."""
    return data_frame(encode_json(error_content(error)))


async def write(
    call: Call[Any],
    generation: AnyGeneration,
    renderer: Renderer,
    *,
    streams: bool,
) -> Response:
    """Runs an admitted request, and answers it whole or as a stream.

    Args:
        call: asks for it.
        generation: is admitted.
        renderer: writes the reply.
        streams: whether the reply is a stream.

    Raises:
        ValidationError: a reply that is not streamed is to show what each pass unmasks.
    """
    if isinstance(generation, UnmaskedGeneration) and generation.shows_passes and not streams:
        raise ValidationError(
            "only a stream shows what a pass unmasks; set stream", field="stream_unmasking"
        )
    headers = warnings_header(generation.warnings)
    if streams:
        headers |= truncation_header(sum(prompt.num_truncated for prompt in generation.prompts))
        frames = _frames(generation, renderer)
        return await call.stream(frames, renderer.error_frame, headers, renderer.form)
    completions = await generation.complete()
    headers |= timing_headers(generation.timings(completions))
    seconds = renderer.seconds(completions)
    content = await offload(lambda: renderer.reply(completions), seconds)
    await renderer.finish()
    return await offload(lambda: json_reply(content, headers=headers), seconds)


async def _frames(generation: AnyGeneration, renderer: Renderer) -> Frames:
    async with generation.stream() as stream:
        async for index, event in stream:
            if isinstance(event, TokenEvent):
                frames = await renderer.frames(index, event)
            else:
                frames = await renderer.block(index, event)
            if frames:
                yield frames
    if last := renderer.end():
        yield last
