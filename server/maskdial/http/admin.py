"""The dependency of routes that change the server: the admin key."""

from fastapi import Depends, Request

from maskdial.http.context import server_context


async def _require_admin(request: Request) -> None:
    server_context(request).keys.check_admin(request.scope)


ADMIN = Depends(_require_admin)
