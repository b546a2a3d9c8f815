"""The admin key: who may change the server."""

import hmac
from hashlib import sha256

from fastapi import Depends, Request

from maskdial.errors import ForbiddenError, UnauthorizedError
from maskdial.http.context import server_context


async def _require_admin(request: Request) -> None:
    """Refuses a request without the admin key, as a bearer token or as ``x-api-key``.

    Raises:
        ForbiddenError: the server has no admin key, so nobody may.
        UnauthorizedError: the request's key is missing or another one.
    """
    key = server_context(request).config.admin_key
    if key is None:
        raise ForbiddenError(
            "this server was started without an admin key, so nobody may change it; start it with "
            "--admin-key or MASKDIAL_ADMIN_KEY"
        )
    given = _given_key(request)
    # Hashes have one length, so the time of the comparison says nothing about the key.
    if not hmac.compare_digest(_digest(given), _digest(key.get_secret_value())):
        missing = "is wrong" if given else "is missing"
        raise UnauthorizedError(
            f"the admin key {missing}; send it as 'Authorization: Bearer KEY' or as 'x-api-key'"
        )


ADMIN = Depends(_require_admin)
"""The dependency of routes that change the server."""


def _given_key(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()
