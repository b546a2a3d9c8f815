"""Asker: the requests to the application that calls become.

So keys, limits, deadlines, drain, metrics, policies and errors are those of HTTP.
"""

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from maskdial.http.in_process import InProcess, Reply, headers_of
from maskdial.rpc.call import Call
from maskdial.rpc.calls import CallError

_PASSED_ON = frozenset(
    {"authorization", "x-api-key", "x-policy", "x-request-id", "traceparent", "tracestate"}
)
_LONGEST_TIMEOUT = 86_400.0  # seconds
_SHORTEST_TIMEOUT = 0.001


class Asker:
    """Asks an application in the name of calls.

    Args:
        application: answers the requests.
    """

    def __init__(self, application: InProcess) -> None:
        self._application = application

    async def get(self, path: str, call: Call) -> Reply:
        """The reply to a request without a body, whatever its status."""
        return await self._application.ask("GET", path, b"", headers(call), call.client)

    async def get_json(self, path: str, call: Call) -> dict[str, Any]:
        """The content of such a reply.

        Raises:
            CallError: it is an error.
        """
        reply = await self.get(path, call)
        if reply.status != 200:
            raise error_of(reply)
        content: dict[str, Any] = json.loads(reply.body)
        return content

    async def post(
        self, path: str, body: bytes, call: Call, further: Sequence[tuple[str, str]] = ()
    ) -> Reply:
        """The reply to a body; its headers become the call's last metadata.

        Args:
            path: of the route.
            body: of the request.
            call: on whose behalf.
            further: headers.

        Raises:
            CallError: it is an error.
        """
        given = [*headers(call), *further]
        reply = await self._application.ask("POST", path, body, given, call.client)
        if reply.status != 200:
            raise error_of(reply)
        call.trailing = trailing_of(reply.headers)
        return reply

    async def events(self, path: str, body: bytes, call: Call) -> AsyncGenerator[dict[str, Any]]:
        """The events of a reply as they come.

        Raises:
            CallError: it is an error, or ends with one.
        """
        status, pending = 0, b""
        messages = self._application.stream("POST", path, body, headers(call), call.client)
        try:
            async for each in messages:
                if each["type"] == "http.response.start":
                    status = each["status"]
                    call.trailing = trailing_of(headers_of(each))
                    continue
                pending += each.get("body", b"")
                if status != 200:
                    continue
                *frames, pending = pending.split(b"\n\n")
                for frame in frames:
                    if frame.startswith(b"data: "):
                        event = json.loads(frame.removeprefix(b"data: "))
                        if "error" in event:
                            raise CallError(500, event["error"])
                        yield event
            if status != 200:
                raise error_of(Reply(status, body=pending))
        finally:
            await messages.aclose()


def headers(call: Call) -> list[tuple[str, str]]:
    """What a call's metadata says to HTTP."""
    return [(name, value) for name, value in call.headers if name in _PASSED_ON]


def timeout(call: Call) -> float | None:
    """Seconds until the call's deadline; None: it has none."""
    remaining = call.time_remaining()
    if remaining is None:
        return None
    return min(max(remaining, _SHORTEST_TIMEOUT), _LONGEST_TIMEOUT)


def trailing_of(found: Mapping[str, str]) -> list[tuple[str, str]]:
    """The headers with a request's id and times, as metadata."""
    return [(name, value) for name, value in found.items() if name.startswith("x-")]


def error_of(reply: Reply) -> CallError:
    """The error that a reply tells."""
    try:
        return CallError(reply.status, str(json.loads(reply.body)["error"]))
    except (ValueError, KeyError, TypeError):
        return CallError(reply.status, f"the server answered with the status {reply.status}")
