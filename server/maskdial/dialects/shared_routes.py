"""Routes that two dialects have at one path: the keys of the body say which one is meant."""

from collections.abc import Collection

from fastapi import Request, Response

from maskdial.dialects.schema import read_object
from maskdial.http.guard import Endpoint, TaskRoute


def share(route: TaskRoute, other: Endpoint, keys: Collection[str]) -> TaskRoute:
    """A route as it is, but for bodies with one of the keys, which another endpoint answers."""
    spellings = [f'"{key}"'.encode() for key in keys]

    async def endpoint(request: Request) -> Response:
        content = await request.body()
        # The search spares the route's own bodies from being parsed twice.
        if any(spelling in content for spelling in spellings):
            body = read_object(content)
            if any(key in body for key in keys):
                return await other(request)
        return await native(request)

    native: Endpoint = route.endpoint
    return TaskRoute(
        route.path,
        endpoint,
        body=route.body,
        error_reply=route.error_reply,
        tags=route.tags,
        name=route.name,
        description=route.description,
    )
