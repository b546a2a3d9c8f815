"""Several token streams read as one: order, errors, and clean-up."""

import asyncio
from functools import partial
from typing import Any

import pytest

from maskdial.causal.events import Finish, TokenEvent
from maskdial.causal.stream import MergedStreams, ReplyChannel, TokenStream
from maskdial.errors import GenerationError

FINISH = Finish("length", "", 1, None, 1, 0.0, 0.0)


def event(index: int, *, last: bool = False) -> TokenEvent:
    return TokenEvent(index, index, "", 0.0, False, finish=FINISH if last else None)


class Scripted:
    """Streams whose events the test sends."""

    def __init__(self, num_streams: int) -> None:
        self.abandoned: list[int] = []
        self.channels = [ReplyChannel() for _ in range(num_streams)]
        self.streams = [
            TokenStream(channel, partial(self._abandon, index))
            for index, channel in enumerate(self.channels)
        ]

    def _abandon(self, index: int, _: object) -> bool:
        self.abandoned.append(index)
        return True


@pytest.mark.parametrize("num_streams", [1, 3])
def test_events_come_in_the_order_in_which_they_are_sent(num_streams: int) -> None:
    async def read() -> tuple[list[Any], list[Any]]:
        scripted, merged = Scripted(num_streams), MergedStreams[TokenEvent]()
        sent = [
            (stream, event(index, last=index == 2))
            for index in range(3)
            for stream in reversed(range(num_streams))
        ]
        received = []

        async def consume() -> None:
            async for each in merged.read(scripted.streams):
                received.append(each)

        consumer = asyncio.ensure_future(consume())
        for stream, each in sent:
            scripted.channels[stream].put(each)
            for _ in range(5):
                await asyncio.sleep(0)
        await asyncio.wait_for(consumer, 60)
        await merged.aclose()
        assert scripted.abandoned == []
        return sent, received

    sent, received = asyncio.run(read())
    assert received == sent


@pytest.mark.parametrize("num_streams", [1, 3])
def test_the_first_error_ends_it(num_streams: int) -> None:
    async def read() -> None:
        scripted, merged = Scripted(num_streams), MergedStreams[TokenEvent]()
        scripted.channels[-1].put(GenerationError("broken"))
        with pytest.raises(GenerationError, match="broken"):
            async for _ in merged.read(scripted.streams):
                pass
        await merged.aclose()
        assert sorted(scripted.abandoned) == list(range(num_streams - 1))

    asyncio.run(read())


def test_closing_stops_every_reader() -> None:
    async def read() -> None:
        scripted, merged = Scripted(2), MergedStreams[TokenEvent]()
        scripted.channels[0].put(event(0))
        assert await anext(merged.read(scripted.streams)) == (0, event(0))
        await merged.aclose()
        assert sorted(scripted.abandoned) == [0, 1]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(read())
