"""AsyncClient: the API for asyncio code."""

# The timeout is the time between two bytes, which asyncio.timeout cannot express.
# ruff: noqa: ASYNC109

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar, Unpack, overload

import httpx

from maskdial_client import calls
from maskdial_client.async_tasks import AsyncTasks
from maskdial_client.core import Call, Request
from maskdial_client.parameters import GenerateParameters, Messages, SamplingParameters
from maskdial_client.replies import Reply, error_from
from maskdial_client.results import Generation, Health, ModelInfo, ServerInfo
from maskdial_client.retry import RetryPolicy
from maskdial_client.streams import AsyncTokenStream
from maskdial_client.transport import (
    DEFAULT_URL,
    http_body_headers,
    http_options,
    http_timeout,
    transport_errors,
)

T = TypeVar("T")


class AsyncClient(AsyncTasks):
    """A maskdial server, to be called from one event loop.

    ``timeout`` is how many seconds the server may stay silent (None: for ever), at most five of
    them for connecting; every method takes its own. Requests refused with 429 or 503 are tried
    again as ``retry`` says. ``model`` may be left out where one served model fits the task.
    Parameters that are not listed are passed on, and the server refuses those it does not know.

    Every method raises ApiError (one subclass per error type) for what the server refuses,
    TransportError when no whole reply came, and ProtocolError for a reply that is not the API's.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        retry: RetryPolicy | None = None,
        max_connections: int | None = 100,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.base_url = base_url
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        with transport_errors(base_url):
            self._http = httpx.AsyncClient(
                **http_options(base_url, api_key, timeout, max_connections)
            )

    @overload
    async def generate(
        self,
        prompt: str,
        *,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> Generation: ...
    @overload
    async def generate(
        self,
        prompt: list[str],
        *,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> list[Generation]: ...
    @overload
    async def generate(
        self,
        *,
        messages: Messages,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> Generation: ...
    async def generate(
        self,
        prompt: str | list[str] | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> Generation | list[Generation]:
        """The text that follows the prompt, or the next answer in a conversation.

        For a list, one result per prompt. With ``details`` each has every token's log-probability.
        """
        call = calls.generate_call(prompt, messages, model, parameters, details=details)
        results = await self._send(call, timeout)
        return results if isinstance(prompt, list) else results[0]

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[SamplingParameters],
    ) -> AsyncTokenStream:
        """The text that follows the prompt, or the next answer in a conversation, token by token.

        Sends nothing before it is read.
        """
        request = calls.stream_request(prompt, messages, model, parameters)
        return AsyncTokenStream(
            lambda: self._exchange(request, timeout, stream=True), self.base_url
        )

    async def models(self) -> list[ModelInfo]:
        """The models served."""
        return await self._send(calls.models_call())

    async def info(self) -> ServerInfo:
        """The server's version, phase, limits and models."""
        return await self._send(calls.info_call())

    async def health(self) -> Health:
        """Whether the server takes requests. Raises TransportError if there is none."""
        return await self._send(calls.health_call())

    async def aclose(self) -> None:
        """Closes the connections; the client cannot be used afterwards."""
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
        return call.read((await self._exchange(call.request, timeout)).content)

    async def _exchange(
        self, request: Request, timeout: float | None, *, stream: bool = False
    ) -> httpx.Response:
        """A response that is no error, its body still to be read when streaming."""
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
                    body = await response.aread()
            error = error_from(Reply(response.status_code, response.headers, body))
            delay = self._retry.delay(attempt, error)
            if delay is None:
                raise error
            await self._sleep(delay)
        return response
