"""Rig: an engine that runs, what it reports, and readers of its streams."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from loadtests.engine.model import Model
from loadtests.engine.recorder import Recorder
from maskdial.causal.engine import CausalEngine
from maskdial.causal.executor import ModelRunner
from maskdial.causal.sequence import Sequence
from maskdial.causal.stream import TokenStream

_POLL_SECONDS = 0.001
_STOP_SECONDS = 10.0


class Reader:
    """Reads a stream in a task of its own, and keeps when each token came.

    Attributes:
        submitted: when the sequence was handed to the engine, `time.perf_counter` seconds.
        times: when each token came, likewise.
        token_ids: the tokens.
    """

    def __init__(self, submitted: float, stream: TokenStream) -> None:
        self.submitted = submitted
        self.times: list[float] = []
        self.token_ids: list[int] = []
        self._stream = stream
        self._more = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    @property
    def time_to_first_token(self) -> float:
        """In seconds, once there is one."""
        return self.times[0] - self.submitted

    async def until(self, num_tokens: int) -> None:
        """Waits until so many tokens came, or the text ended. For one caller at a time.

        Raises:
            MaskdialError: what ended the sequence early.
        """
        while len(self.times) < num_tokens and not self._task.done():
            self._more.clear()
            await self._more.wait()
        if self._task.done():
            self._task.result()

    async def end(self) -> None:
        """Waits for the text's end.

        Raises:
            MaskdialError: what ended the sequence early.
        """
        await self._task

    async def close(self) -> None:
        """Leaves the stream."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._stream.aclose()

    async def _read(self) -> None:
        try:
            async for event in self._stream:
                self.times.append(time.perf_counter())
                self.token_ids.append(event.token_id)
                self._more.set()
        finally:
            self._more.set()


@dataclass(frozen=True, slots=True)
class Rig:
    """A running engine and what it reports to."""

    engine: CausalEngine
    recorder: Recorder

    def read(self, sequence: Sequence) -> Reader:
        """Submits a sequence."""
        submitted = time.perf_counter()
        return Reader(submitted, self.engine.stream(sequence))

    async def close(self, readers: Iterable[Reader]) -> None:
        """Leaves streams, and waits until the engine has nothing to do."""
        for reader in readers:
            await reader.close()
        while True:
            if not self.recorder.num_open:
                return
            await asyncio.sleep(_POLL_SECONDS)


@asynccontextmanager
async def running(
    model: Model,
    runner: ModelRunner | None = None,
    *,
    chunk_tokens: int | None = None,
    block_tokens: int | None = None,
    prefix_cache: bool = False,
    max_drafts: int = 0,
) -> AsyncIterator[Rig]:
    """An engine for as long as the block lasts; see `Model.engine` for the arguments."""
    recorder = Recorder()
    engine = model.engine(
        model.runner() if runner is None else runner,
        recorder,
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        prefix_cache=prefix_cache,
        max_drafts=max_drafts,
    )
    async with AsyncExitStack() as stack:
        engine.start()
        stack.push_async_callback(asyncio.to_thread, engine.stop, _STOP_SECONDS)
        await engine.warm_up()
        recorder.take_steps()
        yield Rig(engine, recorder)
