"""TokenStream: the events of a sequence, on their way to the coroutine that reads them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Generic, Protocol, TypeVar, cast

from maskdial.causal.events import BlockEvent, Event, Finish, Reply, TokenEvent
from maskdial.errors import DeadlineError, MaskdialError
from maskdial.metrics import CancelReason

EventT = TypeVar("EventT", TokenEvent, BlockEvent)


class ReplyChannel:
    """One reader's inbox, in the event loop that it was made in."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[Reply] = asyncio.Queue()

    def put(self, reply: Reply) -> None:
        """Takes a reply; called in ``loop`` only."""
        self._inbox.put_nowait(reply)

    async def get(self) -> Event:
        """The next event.

        Raises:
            MaskdialError: what ended the sequence, if it did not finish.
        """
        reply = await self._inbox.get()
        if isinstance(reply, MaskdialError):
            raise reply
        return reply


class EventStream(Generic[EventT]):
    """The events of one sequence, as an asynchronous iterator; the last one has ``finish``.

    Leaving early abandons the sequence: by `aclose`, by the end of an ``async with`` block, or by
    cancelling the task that waits for the next event.

    Args:
        channel: where the events come from.
        abandon: drops the sequence for a reason; False when it had ended already.
        timeout: seconds after which it is dropped and the reader gets a `DeadlineError`.
    """

    def __init__(
        self,
        channel: ReplyChannel,
        abandon: Callable[[CancelReason], bool],
        timeout: float | None = None,
    ) -> None:
        self._channel = channel
        self._abandon = abandon
        self._ended = False
        self._timer = None if timeout is None else channel.loop.call_later(timeout, self._expire)

    def __aiter__(self) -> "EventStream[EventT]":
        return self

    async def __anext__(self) -> EventT:
        if self._ended:
            raise StopAsyncIteration
        try:
            event = await self._channel.get()
        except MaskdialError:
            self._end()
            raise
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if event.finish is not None:
            self._end()
        return cast(EventT, event)

    async def aclose(self) -> None:
        """Stops reading; a sequence that has not ended is withdrawn from the engine."""
        self._leave("disconnect")

    def _leave(self, reason: CancelReason) -> None:
        if not self._ended:
            self._end()
            self._abandon(reason)

    def _end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        if self._abandon("timeout"):
            self._channel.put(DeadlineError("the text was not finished within its timeout"))

    async def __aenter__(self) -> "EventStream[EventT]":
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Where one timeout covers several streams, the first to expire closes the others.
        self._leave("timeout" if isinstance(exc, DeadlineError) else "disconnect")


TokenStream = EventStream[TokenEvent]
BlockStream = EventStream[BlockEvent]

NumberedEvent = tuple[int, TokenEvent]
"""The index of a stream, and its next event."""


class Ending(Protocol):
    """An event that may be the last of its stream, and has a ``finish`` then."""

    @property
    def finish(self) -> Finish | None: ...


EndingT = TypeVar("EndingT", bound=Ending)


class MergedStreams(Generic[EndingT]):
    """Reads streams side by side and yields their events in the order in which they come."""

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[tuple[int, EndingT] | Exception] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []

    async def read(
        self, streams: Sequence[AsyncIterator[EndingT]]
    ) -> AsyncGenerator[tuple[int, EndingT]]:
        """The events of all streams until the last one ends; to be called once.

        Raises:
            MaskdialError: what ended one of them.
        """
        if len(streams) == 1:  # the usual case, without a task in between
            async for event in streams[0]:
                yield 0, event
            return
        self._readers = [
            asyncio.ensure_future(self._forward(index, stream))
            for index, stream in enumerate(streams)
        ]
        num_running = len(streams)
        while num_running:
            item = await self._inbox.get()
            if isinstance(item, Exception):
                raise item
            yield item
            num_running -= item[1].finish is not None

    async def aclose(self) -> None:
        """Stops reading."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _forward(self, index: int, stream: AsyncIterator[EndingT]) -> None:
        try:
            async for event in stream:
                self._inbox.put_nowait((index, event))
        except Exception as error:
            self._inbox.put_nowait(error)
