"""Routes with what the OpenAPI document says of them."""

from collections.abc import Awaitable, Callable, Collection
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from maskdial.http.exchange import ErrorReply
from maskdial.http.replies import NativeError, error_reply
from maskdial.http.sse import EVENTS

Endpoint = Callable[[Request], Awaitable[Response]]

_TASK_STATUSES = (401, 404, 408, 413, 429, 500, 503, 504)


class Route(APIRoute):
    """A route whose endpoint makes its own response.

    Attributes:
        reply: the type of its JSON.
        error: the type of an error's.
        statuses: of all errors.
        reply_statuses: those of them that come with a ``reply`` nevertheless.
        media_type: of the reply.
        body: the type of the body; None: it has none.
        body_type: its media type.
        body_is_optional: whether it may be left out.
        binary: whether the reply may also be bytes.
        streams: whether the reply may also be a stream.
        stream_type: its media type.
        queries: the parameters of the query, all optional.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        reply: Any = None,
        error: Any = NativeError,
        statuses: Collection[int] = (),
        reply_statuses: Collection[int] = (),
        media_type: str = "application/json",
        body: Any = None,
        body_type: str = "application/json",
        body_is_optional: bool = False,
        binary: bool = False,
        streams: bool = False,
        stream_type: str = EVENTS.media_type,
        queries: Collection[str] = (),
        **options: Any,
    ) -> None:
        super().__init__(path, endpoint, response_model=None, **options)
        self.reply = reply
        self.error = error
        self.statuses = {401, 403, *statuses, *reply_statuses}
        self.reply_statuses = reply_statuses
        self.media_type = media_type
        self.body = body
        self.body_type = body_type
        self.body_is_optional = body_is_optional
        self.binary = binary
        self.streams = streams
        self.stream_type = stream_type
        self.queries = queries


class TaskRoute(Route):
    """A route that a model answers: POST, with a JSON body that the endpoint parses itself.

    The guard calls its endpoint directly, which takes about a fifth of FastAPI's time.

    Args:
        path: as FastAPI writes it.
        endpoint: takes the request.
        error_reply: how the route's dialect writes errors.
        invalid_status: of a body that cannot be served.
        statuses: of errors beside those of all tasks.
        admin: whether it changes the server, which takes an admin key.
        takes_file: whether the body holds a file, so that it may be as large as one.
        options: those of `Route`, and FastAPI's own: tags, summary, description.
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        *,
        error_reply: ErrorReply = error_reply,
        invalid_status: int = 422,
        statuses: Collection[int] = (),
        admin: bool = False,
        takes_file: bool = False,
        **options: Any,
    ) -> None:
        all_statuses = (*_TASK_STATUSES, invalid_status, *statuses)
        super().__init__(path, endpoint, methods=["POST"], statuses=all_statuses, **options)
        self.error_reply = error_reply
        self.admin = admin
        self.takes_file = takes_file
        if self.dependant.dependencies:
            raise TypeError(f"{path}: the guard resolves no dependencies of FastAPI")
