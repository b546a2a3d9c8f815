"""ErrorForm: how a dialect that is not ours writes errors, and the routes that write them so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Response

from maskdial.dialects.call import Answerer, BodyT, task_route
from maskdial.errors import MaskdialError, NotFoundError, ValidationError
from maskdial.http.replies import json_reply, sdk_error_reply
from maskdial.http.route import TaskRoute
from maskdial.http.sse import EVENTS


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of a dialect's errors.

    Attributes:
        tag: of its routes, for the documentation.
        content: an error as its API has it.
        schema: the type of that, for the documentation.
        prefix: routing errors have this form at this path and below it; empty for nowhere.
        stream_type: the media type of its streams.
    """

    tag: str
    content: Callable[[MaskdialError], Any]
    schema: Any
    prefix: str = ""
    stream_type: str = EVENTS.media_type

    def reply(self, error: MaskdialError) -> Response:
        """An error as a response."""
        return sdk_error_reply(error, self.content(error))

    def routing_reply(self, status: int, message: str, headers: dict[str, str]) -> Response:
        """A routing error (no such path, wrong method) as a response."""
        error = NotFoundError(message, field=None) if status == 404 else ValidationError(message)
        return json_reply(self.content(error), status=status, headers=headers)

    def route(
        self,
        path: str,
        answer: Answerer[BodyT],
        body: type[BodyT],
        reply: Any,
        *,
        streams: bool = False,
        admin: bool = False,
    ) -> TaskRoute:
        """A task route whose errors have this form."""
        return task_route(
            path,
            answer,
            body,
            reply,
            streams=streams,
            stream_type=self.stream_type,
            error=self.schema,
            error_reply=self.reply,
            invalid_status=400,
            tags=[self.tag],
            admin=admin,
        )
