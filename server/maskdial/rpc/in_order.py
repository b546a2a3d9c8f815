"""Messages of a stream that are answered side by side, in the order in which they came."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from maskdial.rpc.call import Call
from maskdial.rpc.calls import CallError

_MAX_AT_WORK = 32  # of a call: enough to fill batches


async def answer_in_order(
    call: Call, answer: Callable[[bytes], Awaitable[Any]], max_bytes: int
) -> None:
    """Answers each message of a call with one, until the client ends it.

    Raises:
        CallError: of the first message that cannot be answered; the call ends there.
    """
    async with aclosing(in_order(call, answer, max_bytes)) as responses:
        async for response in responses:
            await call.write(response.SerializeToString())


async def in_order(
    call: Call, answer: Callable[[bytes], Awaitable[Any]], max_bytes: int
) -> AsyncGenerator[Any]:
    """The answers to the messages of a call.

    Args:
        call: whose messages are read.
        answer: to one message.
        max_bytes: of the messages that are at work, beyond which no more are taken.

    Raises:
        CallError: of the first message that cannot be answered.
    """
    at_work: deque[tuple[asyncio.Future[Any], int]] = deque()
    try:
        while True:
            while len(at_work) < _MAX_AT_WORK and sum(size for _, size in at_work) < max_bytes:
                # While work is under way, the client may well be waiting for its answer.
                try:
                    content = call.take() if at_work else await call.read()
                except CallError as error:  # its turn is after what is at work
                    failed = asyncio.get_running_loop().create_future()
                    failed.set_exception(error)
                    at_work.append((failed, max_bytes))
                    break
                if content is None:
                    break
                at_work.append((asyncio.ensure_future(answer(content)), len(content)))
            if not at_work:
                return
            first, _ = at_work[0]
            if not first.done():
                await call.until(first)
            else:
                at_work.popleft()
                yield first.result()
    finally:
        for future, _ in at_work:
            future.cancel()
        await asyncio.gather(*(future for future, _ in at_work), return_exceptions=True)
