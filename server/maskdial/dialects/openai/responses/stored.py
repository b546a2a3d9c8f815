"""Stored responses: the conversation before a request, and responses in the background."""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response
from typing_extensions import TypedDict

from maskdial.dialects.body import BodyError, Wire, read_body
from maskdial.dialects.call import Call
from maskdial.dialects.openai.errors import FORM
from maskdial.dialects.openai.replies import OpenAIError, ResponseReply
from maskdial.dialects.openai.responses.body import ResponsesBody
from maskdial.dialects.openai.responses.items import Item, dumped, read_items
from maskdial.engine.fairness import ClientUsage
from maskdial.errors import UnavailableError, shortened
from maskdial.http.context import ServerContext, server_context
from maskdial.http.in_process import InProcess
from maskdial.http.replies import encode_json, json_reply
from maskdial.http.route import Route, TaskRoute
from maskdial.responses_store import ResponseStore, StoredResponse

NO_STORE = (
    "this server stores no responses (--responses-store); send the whole conversation in input"
)
_NOT_HERE = "there is no response {name} here; it was not stored, or was deleted, or is too old"
_FINISHED = ("completed", "incomplete")
_PASSED_ON = ("authorization", "x-api-key", "traceparent", "x-policy")

_log = logging.getLogger("maskdial.requests")


class DeletedResponse(TypedDict):
    """That a response was deleted."""

    id: str
    object: str
    deleted: bool


def owner_of(request: Request) -> str:
    """Whose responses a request may use: its key's; where no keys are needed, anyone's."""
    if not server_context(request).keys.names:
        return ""
    usage: ClientUsage | None = getattr(request.state, "usage", None)
    return str(request.state.client) if usage is None else usage.key


class StoredTurn:
    """What a request has to do with the store.

    Attributes:
        id: of its response.
        stores: whether that is stored.
        in_background: whether this request is the work of one that was answered.
        before: the items of the conversation that it goes on with.
    """

    def __init__(self, call: Call[ResponsesBody], before: Sequence[Item]) -> None:
        self._store = call.server.responses
        self._owner = owner_of(call.request)
        given_id: str | None = getattr(call.request.state, "response_id", None)
        self.in_background = given_id is not None
        self.id = given_id or f"resp_{uuid.uuid4().hex}"
        self.stores = self._store is not None and call.body.store is not False
        self.before = before
        self._items = [*before, *call.body.input]

    @classmethod
    async def of(cls, call: Call[ResponsesBody]) -> "StoredTurn":
        """That of a call.

        Raises:
            ValidationError: the previous response is not there, or not finished.
        """
        return cls(call, await items_before(call, call.body.previous_response_id))

    async def save(self, response: dict[str, Any]) -> None:
        """Stores the response, if it is to be.

        Raises:
            UnavailableError: it cannot be stored.
        """
        if self.stores:
            assert self._store is not None
            content = json.loads(encode_json(response))
            await self._store.save(self._owner, content, dumped(self._items))

    async def save_written(self, response: dict[str, Any]) -> None:
        """Stores a response that was written. Where it cannot be, its client gets it all the same,
        and is told by its ``store`` that it is nowhere else.

        Raises:
            UnavailableError: it cannot be stored, and has no client that waits for it.
        """
        try:
            await self.save(response)
        except UnavailableError as error:
            if self.in_background:
                raise
            _log.warning("response %s is not stored: %s", self.id, error.message)
            response["store"] = False


async def items_before(call: Call[Any], previous: str | None) -> Sequence[Item]:
    """The items of the conversation up to a stored response, and its output; none without one.

    Raises:
        ValidationError: the response is not there, or not finished.
    """
    if previous is None:
        return ()
    if call.server.responses is None:
        raise BodyError(NO_STORE, field="previous_response_id")
    found = await call.server.responses.find(previous, owner_of(call.request))
    if found is None:
        raise BodyError(
            _NOT_HERE.format(name=repr(shortened(previous))), field="previous_response_id"
        )
    if found.status not in _FINISHED:
        raise BodyError(
            f"response {previous!r} has no answer to go on from; it is {found.status}",
            field="previous_response_id",
        )
    return read_items([*found.items, *found.response["output"]])


async def begin(call: Call[ResponsesBody], turn: StoredTurn) -> Response:
    """Has a response written in the background; it is as good as queued.

    The work is a request of its own within the server, with the client's key: it counts where
    others count, and the drain waits for it.

    Raises:
        ValidationError: nothing is stored, or the response is to be streamed.
    """
    body, store = call.body, call.server.responses
    if store is None:
        raise BodyError(NO_STORE, field="background")
    if not turn.stores:
        raise BodyError("a response in the background is stored; leave it out", field="store")
    if body.stream:
        raise BodyError("a response in the background is not streamed; ask for it", field="stream")
    model = await call.writer()
    queued = {
        "id": turn.id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model.name,
        "status": "queued",
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **body.echoed(model.defaults, stored=True),
    }
    await turn.save(queued)
    content, given, client = await call.request.body(), call.request.headers, call.request.client
    headers = [(name, given[name]) for name in _PASSED_ON if name in given]
    address = None if client is None else (client.host, client.port)
    application = InProcess(call.request.app)

    async def write() -> tuple[str, dict[str, str] | None]:
        """How it ended, and why, if it has not stored itself."""
        try:
            reply = await application.ask(
                "POST", "/v1/responses", content, headers, address, {"response_id": turn.id}
            )
            message = "" if reply.status == 200 else json.loads(reply.body)["error"]["message"]
        except asyncio.CancelledError:
            return "cancelled", None
        except Exception:
            _log.exception("response %s failed in the background", turn.id)
            message = "internal error"
        return ("failed", {"code": "server_error", "message": message}) if message else ("", None)

    async def work() -> None:
        try:
            status, error = await write()
            if status:
                await turn.save(queued | {"status": status, "error": error})
        except UnavailableError as lost:
            _log.warning("how response %s ended is not stored: %s", turn.id, lost.message)
        finally:
            store.running.pop(turn.id, None)

    store.running[turn.id] = asyncio.create_task(work())
    return json_reply(queued)


async def retrieve_response(request: Request) -> Response:
    """`GET /v1/responses/{id}`: a stored response, or the events of one."""
    found = await _find(request)
    return _missing(request) if found is None else json_reply(found.response)


async def delete_response(request: Request) -> Response:
    """Deletes a stored response; one in the background is cancelled first."""
    store, response_id = server_context(request).responses, request.path_params["id"]
    if store is None or await _find(request) is None:
        return _missing(request)
    await _cancel(store, response_id)
    await store.delete(response_id, owner_of(request))
    return json_reply({"id": response_id, "object": "response", "deleted": True})


class CancelBody(Wire):
    """Nothing: the path says which response."""


async def cancel_response(request: Request) -> Response:
    """Cancels a response in the background; one that has ended stays as it is."""
    content = await request.body()
    if content:
        await read_body(CancelBody, content)
    store = server_context(request).responses
    found = await _find(request)
    if store is None or found is None:
        return _missing(request)
    if not found.response["background"] and found.status in _FINISHED:
        message = "only a response in the background can be cancelled"
        return FORM.routing_reply(400, message, {})
    await _cancel(store, request.path_params["id"])
    return json_reply((await _find(request) or found).response)


async def _cancel(store: ResponseStore, response_id: str) -> None:
    task = store.running.get(response_id)
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _find(request: Request) -> StoredResponse | None:
    context: ServerContext = server_context(request)
    if context.responses is None:
        return None
    return await context.responses.find(request.path_params["id"], owner_of(request))


def _missing(request: Request) -> Response:
    if server_context(request).responses is None:
        return FORM.routing_reply(404, "responses are not stored; there is none to retrieve", {})
    name = repr(shortened(request.path_params["id"]))
    return FORM.routing_reply(404, _NOT_HERE.format(name=name), {})


ROUTES = (
    *(
        Route(
            "/v1/responses/{id}",
            endpoint,
            methods=[method],
            reply=reply,
            error=OpenAIError,
            statuses=(404,),
            tags=["openai"],
        )
        for method, endpoint, reply in (
            ("GET", retrieve_response, ResponseReply),
            ("DELETE", delete_response, DeletedResponse),
        )
    ),
    TaskRoute(
        "/v1/responses/{id}/cancel",
        cancel_response,
        body=CancelBody,
        body_is_optional=True,
        reply=ResponseReply,
        error=OpenAIError,
        error_reply=FORM.reply,
        invalid_status=400,
        tags=["openai"],
    ),
)
