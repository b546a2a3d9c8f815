"""The watch for clients that leave, without a connection."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from maskdial.errors import ValidationError
from maskdial.http.disconnect import ClientGoneError, unless_gone


class Client:
    """Sends nothing but, when it ``leaves``, a disconnect."""

    def __init__(self) -> None:
        self.leaves = asyncio.Event()
        self.is_watched = asyncio.Event()
        self.request: Any = SimpleNamespace(receive=self._receive)

    async def _receive(self) -> dict[str, str]:
        self.is_watched.set()
        await self.leaves.wait()
        return {"type": "http.disconnect"}


def test_the_work_of_a_client_that_leaves_is_cancelled() -> None:
    async def main() -> None:
        client, ended = Client(), asyncio.Event()

        async def work() -> None:
            client.leaves.set()
            try:
                await asyncio.sleep(1000)
            finally:
                ended.set()

        with pytest.raises(ClientGoneError):
            await unless_gone(client.request, work())
        assert ended.is_set()
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # nothing is left to be cancelled

    asyncio.run(main())


def test_work_that_is_soon_done_is_not_watched() -> None:
    async def main() -> None:
        client = Client()

        async def work() -> str:
            await asyncio.sleep(0)
            return "done"

        assert await unless_gone(client.request, work()) == "done"
        await asyncio.sleep(0.2)
        assert not client.is_watched.is_set()

    asyncio.run(main())


def test_a_watch_ends_with_the_work() -> None:
    async def main() -> None:
        client = Client()

        async def fail() -> None:
            await client.is_watched.wait()
            raise ValidationError("no")

        with pytest.raises(ValidationError, match="no"):
            await unless_gone(client.request, fail())
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        client.leaves.set()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_another_cancellation_says_nothing_of_the_client() -> None:
    async def main() -> None:
        client = Client()
        waiting = asyncio.create_task(unless_gone(client.request, asyncio.sleep(1000)))
        await client.is_watched.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_work_that_ends_although_it_is_cancelled() -> None:
    """The client is gone all the same; nothing of the cancellation is left."""

    async def main() -> None:
        client = Client()

        async def work() -> str:
            client.leaves.set()
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                return "late"
            return "never"

        assert await unless_gone(client.request, work()) == "late"
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    asyncio.run(main())


def test_a_client_that_leaves_as_the_work_ends_cancels_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watch ends first, and its callback comes when the task does something else."""
    monkeypatch.setattr("maskdial.http.disconnect._UNWATCHED_SECONDS", 0)

    async def main() -> None:
        client, first_event = Client(), asyncio.Event()

        async def work() -> str:
            await first_event.wait()
            return "the first event"

        async def both() -> None:
            await client.is_watched.wait()
            client.leaves.set()
            first_event.set()

        ending = asyncio.create_task(both())
        assert await unless_gone(client.request, work()) == "the first event"
        for _ in range(5):
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        await ending

    asyncio.run(main())
