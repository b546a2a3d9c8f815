"""The page at ``/``, and ``/docs``: files that ship with the server, so that nothing comes from
another host.

The page uses the public routes only. Its files lie in ``maskdial/page``; those of Swagger UI come
from the distribution fastapi-offline.
"""

import mimetypes
import os

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

# Python's own table does not have it in all versions.
mimetypes.add_type("font/woff2", ".woff2")

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'"
)
_PAGE_POLICY = f"{_POLICY}; require-trusted-types-for 'script'"
# Swagger UI writes style elements of its own.
_DOCS_POLICY = _POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")


class _Files(StaticFiles):
    """Static files that browsers ask for again each time, and get only if they have changed."""

    def __init__(self, package: str, folder: str) -> None:
        super().__init__(packages=[(package, folder)])

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["cache-control"] = "no-cache"
        response.headers["x-content-type-options"] = "nosniff"
        response.headers["referrer-policy"] = "no-referrer"
        return response


_PAGE = _Files("maskdial", "page")
_SWAGGER = _Files("fastapi_offline", "static")


async def index(request: Request) -> Response:
    """`GET /`: the page on which a browser tries the models."""
    return await _html("index.html", _PAGE_POLICY, request)


async def docs(request: Request) -> Response:
    """`GET /docs`: the API's documentation, drawn from its OpenAPI description."""
    return await _html("docs.html", _DOCS_POLICY, request)


async def _html(name: str, policy: str, request: Request) -> Response:
    response = await _PAGE.get_response(name, request.scope)
    response.headers["content-security-policy"] = policy
    return response


ROUTES: tuple[BaseRoute, ...] = (
    *(
        APIRoute(path, endpoint, methods=["GET", "HEAD"], include_in_schema=False)
        for path, endpoint in (("/", index), ("/docs", docs))
    ),
    Mount("/page/swagger", _SWAGGER),
    Mount("/page", _PAGE),
)
