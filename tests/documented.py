"""Compares every reply of the tests' servers with the OpenAPI document."""

import json
from functools import cache
from typing import Any

import jsonschema_rs
from fastapi import FastAPI
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maskdial.app import create_app
from maskdial.config import Config
from maskdial.http.route import Route


def strict(document: Any) -> Any:
    """A copy of a document whose objects have no other fields than those that it names."""
    if isinstance(document, list):
        return [strict(each) for each in document]
    if not isinstance(document, dict):
        return document
    copy = {key: strict(value) for key, value in document.items()}
    if isinstance(copy.get("properties"), dict) and copy.get("type") == "object":
        copy.setdefault("additionalProperties", False)
    return copy


@cache
def _document() -> Any:
    """The document, which is the same for all servers."""
    return strict(create_app(Config()).openapi())


@cache
def _validator(path: str, method: str, status: int) -> Any:
    """Validates the JSON of a reply."""
    document = _document()
    content = document["paths"][path][method]["responses"][str(status)]["content"]
    schema = {"components": document["components"], **content["application/json"]["schema"]}
    return jsonschema_rs.Draft202012Validator(schema)


class DocumentCheck:
    """An application in the place of its server: notes replies that its document does not allow.

    Args:
        app: answers.
        main: has the routes.
        faults: gets a line for each such reply.
    """

    def __init__(self, app: ASGIApp, *, main: FastAPI, faults: list[str]) -> None:
        self._app = app
        self._faults = faults
        self._main = main
        self._document = _document()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._route(scope)
        if route is None:
            await self._app(scope, receive, send)
            return
        status, content_type, parts = 0, "", []

        async def watch(message: Message) -> None:
            nonlocal status, content_type
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = dict(message["headers"])
                content_type = headers.get(b"content-type", b"").decode()
            elif "json" in content_type:
                parts.append(message.get("body", b""))
            await send(message)

        method = "get" if scope["method"] == "HEAD" else scope["method"].lower()
        await self._app(scope, receive, watch)
        # Routing errors, such as 405, and connections that ended before the reply.
        if status not in (0, 405) and method in {each.lower() for each in route.methods or ()}:
            fault = self._fault(route, method, status, content_type, b"".join(parts))
            if fault is not None:
                self._faults.append(f"{method} {route.path} -> {status}: {fault}")

    def _route(self, scope: Scope) -> Route | None:
        if scope["type"] != "http":
            return None
        for route in self._main.routes:
            if isinstance(route, Route) and route.matches(dict(scope))[0] is Match.FULL:
                return route if route.include_in_schema else None
        return None

    def _fault(
        self, route: Route, method: str, status: int, content_type: str, body: bytes
    ) -> str | None:
        responses = self._document["paths"][route.path_format][method]["responses"]
        if str(status) not in responses:
            return "the status is not documented"
        content = responses[str(status)]["content"]
        if content_type.partition(";")[0] not in {each.partition(";")[0] for each in content}:
            return f"the content type {content_type} is not documented"
        if content_type != "application/json":
            return None
        try:
            _validator(route.path_format, method, status).validate(json.loads(body))
        except jsonschema_rs.ValidationError as error:
            return f"{error.message} at {error.instance_path}"[:600]
        return None
