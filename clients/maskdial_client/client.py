"""Client: the API for code that waits."""

import itertools
import time
from collections.abc import Callable
from contextlib import closing
from types import TracebackType
from typing import Self, TypeVar, Unpack, overload

import httpx

from maskdial_client import calls
from maskdial_client.core import Call, Request
from maskdial_client.parameters import GenerateParameters, Messages, SamplingParameters
from maskdial_client.replies import Reply, error_from
from maskdial_client.results import Generation, Health, ModelInfo, ServerInfo
from maskdial_client.retry import RetryPolicy
from maskdial_client.streams import TokenStream
from maskdial_client.tasks import Tasks
from maskdial_client.transport import (
    DEFAULT_URL,
    http_body_headers,
    http_options,
    http_timeout,
    transport_errors,
)

T = TypeVar("T")


class Client(Tasks):
    """A maskdial server, to be called from one thread or several.

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
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.base_url = base_url
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._sleep = sleep
        with transport_errors(base_url):
            self._http = httpx.Client(**http_options(base_url, api_key, timeout, max_connections))

    @overload
    def generate(
        self,
        prompt: str,
        *,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> Generation: ...
    @overload
    def generate(
        self,
        prompt: list[str],
        *,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> list[Generation]: ...
    @overload
    def generate(
        self,
        *,
        messages: Messages,
        model: str | None = None,
        details: bool = False,
        timeout: float | None = None,
        **parameters: Unpack[GenerateParameters],
    ) -> Generation: ...
    def generate(
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
        results = self._send(call, timeout)
        return results if isinstance(prompt, list) else results[0]

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        model: str | None = None,
        timeout: float | None = None,
        **parameters: Unpack[SamplingParameters],
    ) -> TokenStream:
        """The text that follows the prompt, or the next answer in a conversation, token by token.

        Sends nothing before it is read.
        """
        request = calls.stream_request(prompt, messages, model, parameters)
        return TokenStream(lambda: self._exchange(request, timeout, stream=True), self.base_url)

    def models(self) -> list[ModelInfo]:
        """The models served."""
        return self._send(calls.models_call())

    def info(self) -> ServerInfo:
        """The server's version, phase, limits and models."""
        return self._send(calls.info_call())

    def health(self) -> Health:
        """Whether the server takes requests. Raises TransportError if there is none."""
        return self._send(calls.health_call())

    def close(self) -> None:
        """Closes the connections; the client cannot be used afterwards."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _send(self, call: Call[T], timeout: float | None = None) -> T:
        return call.read(self._exchange(call.request, timeout).content)

    def _exchange(
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
                response = self._http.send(http_request, stream=stream)
                if response.status_code in request.accepts:
                    break
                with closing(response):
                    body = response.read()
            error = error_from(Reply(response.status_code, response.headers, body))
            delay = self._retry.delay(attempt, error)
            if delay is None:
                raise error
            self._sleep(delay)
        return response
