"""Several token streams, read as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from maskdial.causal.events import TokenEvent
from maskdial.causal.stream import TokenStream

NumberedEvent = tuple[int, TokenEvent]
"""The index of a stream, and its next event."""


class MergedStreams:
    """Reads token streams side by side and yields their events in the order in which they come."""

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[NumberedEvent | Exception] = asyncio.Queue()
        self._readers: list[asyncio.Task[None]] = []

    async def read(self, streams: Sequence[TokenStream]) -> AsyncGenerator[NumberedEvent]:
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

    async def _forward(self, index: int, stream: TokenStream) -> None:
        try:
            async for event in stream:
                self._inbox.put_nowait((index, event))
        except Exception as error:
            self._inbox.put_nowait(error)
