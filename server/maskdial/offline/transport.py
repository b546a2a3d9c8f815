"""InProcessTransport: what httpx needs to ask the application in this process."""

from collections.abc import AsyncGenerator, Iterator

import httpx
from starlette.types import Message

from maskdial.config import Config
from maskdial.local.loop import LoopThread
from maskdial.offline.application import Application


class InProcessTransport(httpx.BaseTransport):
    """Requests to an application that runs in a thread of this process, until it is closed.

    Args:
        config: of the application, whose models are loaded before the constructor returns.

    Raises:
        BundleError, ConfigError: a model cannot be served.
    """

    def __init__(self, config: Config) -> None:
        self._loop = LoopThread()
        self._running = Application.start(config)
        try:
            self._application = self._loop.run(self._running.__aenter__())
        except BaseException:
            self._loop.close()
            raise

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        messages = self._application.stream(request.method, request.url.path, request.read())
        start = self._loop.run(_next(messages))
        assert start is not None, "a reply begins with its status"
        stream = _Body(self._loop, messages)
        return httpx.Response(start["status"], headers=start["headers"], stream=stream)

    def close(self) -> None:
        if not self._loop.closed:
            self._loop.run(self._running.__aexit__(None, None, None))
            self._loop.close()


class _Body(httpx.SyncByteStream):
    """The rest of a reply, as it comes."""

    def __init__(self, loop: LoopThread, messages: AsyncGenerator[Message]) -> None:
        self._loop = loop
        self._messages = messages

    def __iter__(self) -> Iterator[bytes]:
        while (message := self._loop.run(_next(self._messages))) is not None:
            if body := message.get("body", b""):
                yield body

    def close(self) -> None:
        self._loop.run(self._messages.aclose())


async def _next(messages: AsyncGenerator[Message]) -> Message | None:
    return await anext(messages, None)
