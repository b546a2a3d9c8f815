"""Windows over streams of texts: some chunks are under way at a time, results come in order."""

import asyncio
import contextlib
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from maskdial.errors import ValidationError

X = TypeVar("X")
T = TypeVar("T")

CHUNK = 64
"""Items that are asked together: their tokenizing takes a few milliseconds."""

WIDTH = 8
"""Chunks under way: the engine chooses texts of similar length among so many, and the next ones are
tokenized while it runs."""


def chunks(items: Iterable[X]) -> Iterator[list[X]]:
    """The items, `CHUNK` at a time."""
    iterator = iter(items)
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def in_order(answer: Callable[[Sequence[X]], Iterable[T]], items: Iterable[X]) -> Iterator[T]:
    """The answers for items, in order; `WIDTH` chunks at a time are answered in threads.

    Raises:
        ValidationError: one is refused; the message says which, counted from the first.
    """
    running: deque[tuple[int, Future[Iterable[T]]]] = deque()
    with ThreadPoolExecutor(WIDTH, thread_name_prefix="maskdial-map") as pool:
        try:
            begun = 0
            for chunk in chunks(items):
                if len(running) == WIDTH:
                    yield from _result(*running.popleft())
                running.append((begun, pool.submit(answer, chunk)))
                begun += len(chunk)
            while running:
                yield from _result(*running.popleft())
        finally:
            for _, future in running:
                future.cancel()


async def in_order_async(
    answer: Callable[[Sequence[X]], Awaitable[Iterable[T]]],
    items: Iterable[X] | AsyncIterable[X],
) -> AsyncIterator[T]:
    """As `in_order`, in the running event loop."""
    running: deque[tuple[int, asyncio.Future[Iterable[T]]]] = deque()
    try:
        begun = 0
        async for chunk in _chunks_async(items):
            if len(running) == WIDTH:
                for each in await _awaited(*running.popleft()):
                    yield each
            running.append((begun, asyncio.ensure_future(answer(chunk))))
            begun += len(chunk)
        while running:
            for each in await _awaited(*running.popleft()):
                yield each
    finally:
        for _, future in running:
            future.cancel()
        await asyncio.gather(*(future for _, future in running), return_exceptions=True)


async def _chunks_async(items: Iterable[X] | AsyncIterable[X]) -> AsyncIterator[list[X]]:
    if not isinstance(items, AsyncIterable):
        for chunk in chunks(items):
            yield chunk
        return
    chunk = []
    async for item in items:
        chunk.append(item)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _result(begun: int, future: Future[Iterable[T]]) -> Iterable[T]:
    with _counted_from(begun):
        return future.result()


async def _awaited(begun: int, future: "asyncio.Future[Iterable[T]]") -> Iterable[T]:
    with _counted_from(begun):
        return await future


@contextlib.contextmanager
def _counted_from(begun: int) -> Iterator[None]:
    """Has an error about an item of a chunk count from the first item of all."""
    try:
        yield
    except ValidationError as error:
        if error.index is None:
            raise
        raise ValidationError(
            error.message, field=error.field, index=begun + error.index
        ) from error
