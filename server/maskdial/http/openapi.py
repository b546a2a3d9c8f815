"""The OpenAPI document: FastAPI's paths, with the routes' bodies, replies and errors."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from pydantic.json_schema import JsonSchemaMode

from maskdial.http.route import Route
from maskdial.http.sse import EVENTS
from maskdial.registry.choice import WrittenMask

_REFERENCE = "#/components/schemas/{model}"
_MEANINGS = {
    400: "The body cannot be served as it is.",
    401: "The server asks for a key, and the request's is missing or wrong.",
    403: "The server does not do that for anyone, or not for web pages of elsewhere.",
    404: "There is no such model, or none for the task.",
    408: "The body did not arrive in time.",
    413: "The body is larger than the server accepts.",
    422: "The body cannot be served as it is.",
    429: "The server or the client has too many requests; `Retry-After` says when to retry.",
    500: "The model or the server failed.",
    503: "The server starts or shuts down, or the model is not there or down.",
    504: "The request did not finish within its timeout.",
}
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

_EVENT = {
    "type": "object",
    "description": "One server-sent event; `data` is JSON, or `[DONE]` at the end of OpenAI's.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
_BYTES = {"type": "string", "format": "binary"}
_LINES = {"type": "string", "description": "A JSON object in each line."}
_MODEL_NAME = rf"^[\w.-]+(/[\w.-]+)?(:({'|'.join(get_args(WrittenMask))}))?$"

_Type = tuple[Any, JsonSchemaMode]


def document(app: FastAPI) -> dict[str, Any]:
    """The document of an application, whose schemas are all in its components."""
    routes = [route for route in app.routes if isinstance(route, Route) and route.include_in_schema]
    schemas, definitions = _schemas(routes)
    content = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=routes)
    for route in routes:
        for method in route.methods or ():
            operation = content["paths"][route.path_format][method.lower()]
            operation.pop("requestBody", None)
            operation |= _operation(route, schemas)
    content["components"] = {"schemas": definitions, "securitySchemes": _KEYS}
    content["security"] = [{}, *({name: []} for name in _KEYS)]
    return content


def _operation(route: Route, schemas: Mapping[_Type, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    in_path = re.findall(r"{(\w+)}", route.path_format)
    content["parameters"] = [
        {"name": name, "in": place, "required": place == "path", "schema": _parameter(name)}
        for place, names in (("path", in_path), ("query", route.queries))
        for name in names
    ]
    if route.body is not None:
        body = {route.body_type: {"schema": schemas[route.body, "validation"]}}
        content["requestBody"] = {"required": not route.body_is_optional, "content": body}
    reply: dict[str, Any] = {route.media_type: {"schema": _reply_schema(route, schemas)}}
    if route.streams:
        is_events = route.stream_type == EVENTS.media_type
        reply[route.stream_type] = {"schema": _EVENT if is_events else _LINES}
    if route.binary:
        reply["application/octet-stream"] = {"schema": _BYTES}
    content["responses"] = {"200": {"description": "The reply.", "content": reply}}
    error = {"application/json": {"schema": schemas[route.error, "serialization"]}}
    for status in sorted(route.statuses):
        of_reply = status in route.reply_statuses
        content["responses"][str(status)] = {
            "description": _MEANINGS[status],
            "content": reply if of_reply else error,
        }
    return content


def _parameter(name: str) -> dict[str, str]:
    return {"type": "string"} | ({"pattern": _MODEL_NAME} if name in ("name", "model") else {})


def _reply_schema(route: Route, schemas: Mapping[_Type, Any]) -> Any:
    if route.media_type != "application/json":
        return {"type": "string"}
    return schemas[route.reply, "serialization"]


def _schemas(routes: Iterable[Route]) -> tuple[dict[_Type, Any], dict[str, Any]]:
    """The schemas of all bodies, replies and errors, and what they refer to."""
    types: dict[_Type, TypeAdapter[Any]] = {}
    for route in routes:
        if route.body is not None:
            types.setdefault((route.body, "validation"), TypeAdapter(route.body))
        for each in (route.reply, route.error):
            types.setdefault((each, "serialization"), TypeAdapter(each))
    numbered = dict(enumerate(types))
    schemas, shared = TypeAdapter.json_schemas(
        ((number, mode, types[kind, mode]) for number, (kind, mode) in numbered.items()),
        ref_template=_REFERENCE,
    )
    by_type = {numbered[number]: schema for (number, _), schema in schemas.items()}
    return by_type, shared.get("$defs", {})
