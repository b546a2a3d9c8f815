"""Rig: a running engine, the steps it reports, and readers of its streams."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, get_args

from loadtests.engines import NUM_STREAMS, LoadedCausal, open_stream, started
from maskdial.causal.drafts.model import DraftRunner
from maskdial.causal.engine import CausalEngine
from maskdial.causal.executor import ModelRunner
from maskdial.causal.stream import TokenStream
from maskdial.metrics import DraftKind, Metrics, ModelMetrics

_MODEL = "measured"
_POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the model: seconds, rows, and tokens without padding."""

    seconds: float
    num_rows: int
    num_tokens: int

    @property
    def reads_prompt(self) -> bool:
        """Whether it is a prefill of more than one token per row, and not a decode step."""
        return self.num_tokens > self.num_rows


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of the engine; times in seconds."""

    schedule: float
    run: float
    sample: float
    publish: float
    passes: tuple[Pass, ...]

    @property
    def total(self) -> float:
        return self.schedule + self.run + self.sample + self.publish

    @property
    def own(self) -> float:
        """The engine's own time: everything but `run`."""
        return self.schedule + self.sample + self.publish

    @property
    def around_passes(self) -> float:
        """The part of `run` outside the model's passes: copies, and grammar work."""
        return self.run - sum(each.seconds for each in self.passes)

    @property
    def num_decoded(self) -> int:
        """The rows of the decode step; 0 if anything else ran."""
        if len(self.passes) != 1 or self.passes[0].reads_prompt:
            return 0
        return self.passes[0].num_rows


class Recorder:
    """Collects the engine's steps and reads its other metrics. The engine's thread writes to it.

    A step is recorded just after its tokens are published, so the last step of a text may arrive
    after the reader has the whole text.
    """

    def __init__(self) -> None:
        registry = Metrics()
        bound = registry.declare(_MODEL)
        values = {each.name: getattr(bound, each.name) for each in fields(bound)}
        self.metrics = RecordedMetrics(**values, recorder=self)
        """What an engine reports to."""
        self._registry = registry.registry
        self._steps: list[Step] = []
        self._passes: list[Pass] = []

    @property
    def num_open(self) -> int:
        """Sequences that wait or run."""
        return self._value("queue_size") + self._value("requests_running")

    @property
    def num_drafts(self) -> int:
        """Draft tokens so far."""
        return self._drafted("speculative_draft_tokens_total")

    @property
    def num_accepted(self) -> int:
        """Draft tokens that were accepted so far."""
        return self._drafted("speculative_accepted_tokens_total")

    @property
    def num_hit(self) -> int:
        """Prompt tokens that the prefix cache had so far."""
        return self._value("prefix_cache_hits_total")

    def take_steps(self) -> list[Step]:
        """The steps since the last call."""
        steps, self._steps = self._steps, []
        return steps

    def record_pass(self, each: Pass) -> None:
        """Keeps a pass of the step under way."""
        self._passes.append(each)

    def record_step(self, schedule: float, run: float, sample: float, publish: float) -> None:
        """Ends the step under way."""
        passes, self._passes = tuple(self._passes), []
        self._steps.append(Step(schedule, run, sample, publish, passes))

    def _drafted(self, name: str) -> int:
        return sum(self._value(name, kind=kind) for kind in get_args(DraftKind))

    def _value(self, name: str, **labels: str) -> int:
        labels["model"] = _MODEL
        value = self._registry.get_sample_value(f"maskdial_{name}", labels)
        assert value is not None, name
        return int(value)


@dataclass(frozen=True, slots=True)
class RecordedMetrics(ModelMetrics):
    """A model's metrics, whose passes and steps are kept one by one."""

    recorder: Recorder

    def observe_pass(
        self, seconds: float, num_rows: int, num_tokens: int, padded_tokens: int
    ) -> None:
        self.recorder.record_pass(Pass(seconds, num_rows, num_tokens))

    def observe_step(self, schedule: float, run: float, sample: float, publish: float) -> None:
        self.recorder.record_step(schedule, run, sample, publish)


class Reader:
    """Reads a stream in a task of its own and records when each token arrived.

    Attributes:
        submitted: when the prompt was submitted, in `time.perf_counter` seconds.
        times: when each token arrived, on the same clock.
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
        """In seconds; defined once there is a token."""
        return self.times[0] - self.submitted

    async def until(self, num_tokens: int) -> None:
        """Waits for that many tokens or the end of the text. For one caller at a time.

        Raises:
            MaskdialError: what ended the sequence early.
        """
        while len(self.times) < num_tokens and not self._task.done():
            self._more.clear()
            await self._more.wait()
        if self._task.done():
            self._task.result()

    async def end(self) -> None:
        """Waits for the end of the text.

        Raises:
            MaskdialError: what ended the sequence early.
        """
        await self._task

    async def close(self) -> None:
        """Closes the stream."""
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
    """A running engine and its recorder."""

    engine: CausalEngine
    recorder: Recorder

    def read(self, prompt: Sequence[int], num_tokens: int, **options: Any) -> Reader:
        """Submits a prompt; see `open_stream` for the arguments."""
        submitted = time.perf_counter()
        return Reader(submitted, open_stream(self.engine, prompt, num_tokens, **options))

    async def close(self, readers: Iterable[Reader]) -> None:
        """Closes streams and waits until the engine is idle."""
        for reader in readers:
            await reader.close()
        while True:
            if not self.recorder.num_open:
                return
            await asyncio.sleep(_POLL_SECONDS)


@asynccontextmanager
async def running(
    model: LoadedCausal,
    runner: ModelRunner | None = None,
    *,
    chunk_tokens: int | None = None,
    block_tokens: int | None = None,
    prefix_cache: bool = False,
    slots: int = NUM_STREAMS,
    max_drafts: int = 0,
    draft: DraftRunner | None = None,
) -> AsyncIterator[Rig]:
    """Runs an engine for the duration of the block; see `LoadedCausal.engine`."""
    recorder = Recorder()
    engine = model.engine(
        model.runner() if runner is None else runner,
        recorder.metrics,
        chunk_tokens=chunk_tokens,
        block_tokens=block_tokens,
        prefix_cache=prefix_cache,
        slots=slots,
        max_drafts=max_drafts,
        draft=draft,
    )
    async with started(engine):
        recorder.take_steps()
        yield Rig(engine, recorder)
