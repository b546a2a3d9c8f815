"""Routes that two dialects have at one path: the keys of the body say which one is meant."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from maskdial.dialects.body import SECONDS_PER_BYTE, read_object
from maskdial.engine.offload import offload
from maskdial.http.route import Endpoint, TaskRoute


@dataclass(frozen=True, slots=True)
class Sharer:
    """Another dialect's part of a route: the types of its body and reply, and the keys by which its
    bodies are known.
    """

    endpoint: Endpoint
    body: Any
    reply: Any
    keys: Collection[str]


def share(route: TaskRoute, other: Sharer) -> TaskRoute:
    """A route as it is, but for bodies with one of the keys, which another dialect answers."""
    spellings = [f'"{key}"'.encode() for key in other.keys]

    async def endpoint(request: Request) -> Response:
        content = await request.body()
        # The search spares the route's own bodies from being parsed twice.
        if any(spelling in content for spelling in spellings):
            body = await offload(lambda: read_object(content), len(content) * SECONDS_PER_BYTE)
            if any(key in body for key in other.keys):
                return await other.endpoint(request)
        return await native(request)

    native: Endpoint = route.endpoint
    return TaskRoute(
        route.path,
        endpoint,
        body=route.body | other.body,
        reply=route.reply | other.reply,
        error_reply=route.error_reply,
        tags=route.tags,
        name=route.name,
        description=route.description,
    )
