"""Ollama's routes that fetch and remove models, and those that make them, which are refused."""

import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from fastapi import Request, Response
from pydantic import ConfigDict, Field

from maskdial.dialects.body import Wire, read_body
from maskdial.dialects.call import Call
from maskdial.dialects.ollama.errors import FORM, LINES, error_content, line
from maskdial.dialects.ollama.models import NameBody
from maskdial.errors import ForbiddenError, MaskdialError
from maskdial.http.context import server_context
from maskdial.http.replies import json_reply
from maskdial.http.sse import StreamForm
from maskdial.model_cache import HubSource

_SERVER = "this server is maskdial, which speaks Ollama's API for the models that it serves"
_SUCCESS = {"status": "success"}
_LINES = StreamForm(LINES, line({"status": "working"}))


class PullBody(NameBody):
    """A model to fetch."""

    habits = frozenset({"insecure", "password", "username"})

    stream: bool | None = Field(None, description="Reply line by line. Default: true.")


class AnyBody(Wire):
    """A body whose fields are not read, because the route refuses every one."""

    model_config = ConfigDict(extra="allow")


async def pull(call: Call[PullBody]) -> Response:
    """Takes a model of the Hub in, if ``--allow-pull`` has it; success for one that is served."""
    models = call.server.models
    await models.refresh()
    source = models.to_pull(call.body.model or call.body.name or "")
    if source is not None:
        call.check_admin()
    lines = _lines(call, source)
    if call.body.stream is not False:
        return await call.stream(lines, lambda error: line(error_content(error)), {}, _LINES)
    async for _ in lines:
        pass
    return json_reply(_SUCCESS)


async def _lines(call: Call[PullBody], source: HubSource | None) -> AsyncGenerator[bytes, None]:
    # Ollama's command draws a bar for each digest; that of the files is not known yet.
    digest = f"sha256:{hashlib.sha256(str(source).encode()).hexdigest()}"
    async with aclosing(call.server.models.pull(source)) as steps:
        async for step in steps:
            sizes = {"digest": digest, "total": step.total, "completed": step.done}
            yield line({"status": step.phase.lower()} | (sizes if step.total else {}))
    yield line(_SUCCESS)


def refusing(instead: str) -> Callable[[Request], Awaitable[Response]]:
    """A route that refuses every request, and says what to do instead."""

    async def refuse(request: Request) -> Response:
        """Refused: models are files of the server's owner, made by an export."""
        raise ForbiddenError(f"{_SERVER}; {instead}")

    return refuse


async def delete(request: Request) -> Response:
    """Removes a model that was pulled, and no others: the owner has those unloaded."""
    server = server_context(request)
    try:
        server.models.pulls.check_allowed()
        server.keys.check_admin(request.scope)
        body = await read_body(NameBody, await request.body())
        await server.models.remove(body.model or body.name or "")
    except MaskdialError as error:
        return FORM.reply(error)
    return json_reply(_SUCCESS)
