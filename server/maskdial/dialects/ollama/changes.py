"""Ollama's routes that fetch, make and remove models: they tell what this server is, and what to do
instead.
"""

from fastapi import Request, Response
from pydantic import ConfigDict, Field

from maskdial.dialects.body import Wire
from maskdial.dialects.call import Call
from maskdial.dialects.ollama.errors import FORM, LINES, line
from maskdial.dialects.ollama.models import NameBody
from maskdial.errors import ForbiddenError, NotFoundError
from maskdial.http.replies import json_reply

_SERVER = "this server is maskdial, which speaks Ollama's API for the models that it serves"
_LOAD = "POST /models/load and /models/unload, with the admin key, change them"


class PullBody(NameBody):
    """A model to fetch."""

    habits = frozenset({"insecure", "password", "username"})

    stream: bool | None = Field(None, description="Reply line by line. Default: true.")


class AnyBody(Wire):
    """A body whose fields are not read, because the route refuses every one."""

    model_config = ConfigDict(extra="allow")


async def pull(call: Call[PullBody]) -> Response:
    """Success for a model that is served; others are exported, not fetched."""
    await call.server.models.refresh()
    try:
        call.body.entry(call)
    except NotFoundError as error:
        raise NotFoundError(
            f"{error.message}; it fetches none: export a checkpoint with 'maskdial export' and "
            "serve it with --model NAME=FOLDER"
        ) from error
    status = {"status": "success"}
    if call.body.stream is False:
        return json_reply(status)
    return Response(line(status), media_type=LINES)


async def push(request: Request) -> Response:
    """Refused: models are files of the server's owner."""
    raise ForbiddenError(f"{_SERVER}; copy a bundle's folder instead of pushing it")


async def create(request: Request) -> Response:
    """Refused: models are made by an export."""
    raise ForbiddenError(
        f"{_SERVER}; make one with 'maskdial export', and send system prompts and options with "
        "each request"
    )


async def copy(request: Request) -> Response:
    """Refused: a name is that of a bundle."""
    raise ForbiddenError(f"{_SERVER}; serve a bundle under another name with --model NAME=FOLDER")


async def upload(request: Request) -> Response:
    """Refused: a model is exported on the command line, not uploaded."""
    raise ForbiddenError(f"{_SERVER}; make one with 'maskdial export' instead of uploading files")


async def delete(request: Request) -> Response:
    """Refused: files stay, and the owner has models unloaded."""
    return FORM.reply(ForbiddenError(f"{_SERVER}, and removes no files; {_LOAD}"))
