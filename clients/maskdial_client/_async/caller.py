"""AsyncCaller: sends calls over HTTP, and retries the ones that the server turned away."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self

import httpx

from maskdial_client.call import Call, Request, T
from maskdial_client.replies import error_from
from maskdial_client.retry import RetryPolicy
from maskdial_client.transport import (
    DEFAULT_URL,
    http_body_headers,
    http_options,
    http_timeout,
    transport_errors,
)


class AsyncCaller:
    """The connections to one server; the base of the classes with the methods."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        policy: str | None = None,
        timeout: float | None = 60.0,
        retry: RetryPolicy | None = None,
        max_connections: int | None = 100,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        with transport_errors(base_url):
            self._http = httpx.AsyncClient(
                **http_options(base_url, api_key, timeout, max_connections, policy),
                transport=transport,
            )

    async def aclose(self) -> None:
        """Closes the connections. The client cannot be used afterwards."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _send(self, call: Call[T], timeout: float | None = None) -> T:
        response = await self._exchange(call.request, timeout)
        return call.read(response.content)

    async def _exchange(
        self, request: Request, timeout: float | None, *, stream: bool = False
    ) -> httpx.Response:
        """A response with an accepted status. With ``stream``, its body is still to be read."""
        content = request.content
        http_request = self._http.build_request(
            request.method,
            request.path,
            content=content,
            headers=http_body_headers(content),
            timeout=http_timeout(self._timeout if timeout is None else timeout),
        )
        for attempt in itertools.count():
            with transport_errors(self.base_url):
                response = await self._http.send(http_request, stream=stream)
                if response.status_code in request.accepts:
                    break
                async with aclosing(response):
                    await response.aread()
            error = error_from(response)
            delay = self._retry.delay(attempt, error)
            if delay is None:
                raise error
            await self._sleep(delay)
        return response
