"""The server's engine in real time, with passes of known duration: is the simulation right?

`one_machine` has errors of two kinds: of the step times, which other processes on the machine
change, and of the simulation. Here the step times are known, so what remains is the second kind.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np
from numpy.typing import NDArray

from loadtests.engine.rig import Reader, Rig, running
from loadtests.engines import LoadedCausal
from loadtests.measurement import Section, load_averages
from loadtests.open_loop import poisson_schedule
from loadtests.scaling.load import SHARES
from loadtests.simulate.cluster import Cluster, Shape
from loadtests.simulate.fleets import capacity
from loadtests.simulate.replica import Limits
from loadtests.simulate.results import Comparison, Observed
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Conversation, Length, Turn, Workload
from maskdial.causal.executor import Cache, ModelRunner

_QUESTION = "the server's engine with passes of the given duration, simulated and in real time"
_PROMPT_TOKENS = (8, 120)
_LATE_SECONDS = 0.02
_NOTES = (
    "arrivals and prompts are the same; a pass waits instead of computing, and the time that the "
    "engine takes between two passes counts as part of the second",
)


class TimedRunner:
    """A model runner whose passes take the time that `StepTimes` says, and compute nothing.

    A pass that follows another one ends as long after that one's end as it should, however late
    the engine was; otherwise a busy machine would make all passes longer.

    Args:
        runner: whose cache is used.
        times: how long passes take.
        vocab_size: of the logits, which are all alike.
    """

    def __init__(self, runner: ModelRunner, times: StepTimes, vocab_size: int) -> None:
        self._runner = runner
        self._times = times
        self.decode_and_prefill = self._decode_and_prefill if times.packs else None
        self._logits = np.zeros((64, vocab_size), np.float32)
        self._end = 0.0

    @property
    def cache(self) -> Cache:
        return self._runner.cache

    def prefill(
        self, slot: int, token_ids: NDArray[np.int64], start: int, num_logits: int = 1
    ) -> NDArray[np.float32]:
        self._take(self._times.prefill_seconds(len(token_ids), start))
        return self._logits[:num_logits].copy()

    def prefill_together(self, slot: int, prompts: list[NDArray[np.int64]]) -> NDArray[np.float32]:
        tokens = self._times.read_tokens([len(prompt) for prompt in prompts])
        self._take(self._times.prefill_seconds(tokens))
        return self._logits[: len(prompts)].copy()

    def _decode_and_prefill(
        self,
        token_ids: NDArray[np.int64],
        lengths: NDArray[np.int64],
        rows: NDArray[np.int64],
        prompts: list[tuple[int, NDArray[np.int64], int, int]],
    ) -> NDArray[np.float32]:
        context = int(sum(lengths[row] for row in rows))
        tokens = self._times.read_tokens([len(piece) for _, piece, _, _ in prompts])
        self._take(self._times.mixed_seconds(len(rows), context, tokens, prompts[0][2]))
        return self._logits[: len(rows) + len(prompts)].copy()

    def decode(
        self, token_ids: NDArray[np.int64], lengths: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        context = int(sum(lengths[row] for row in rows))
        self._take(self._times.decode_seconds(len(rows), context))
        return self._logits[: len(rows)].copy()

    def warm_up(self) -> None:
        self._runner.warm_up()

    def _take(self, seconds: float) -> None:
        now = time.perf_counter()
        self._end = (self._end if now - self._end < _LATE_SECONDS else now) + seconds
        time.sleep(max(self._end - now, 0.0))


async def measure(
    model: LoadedCausal, times: StepTimes, seconds: float, num_tokens: int, seed: int
) -> Section:
    """Offers rising rates to the engine, and simulates them.

    Args:
        model: whose engine runs; its own speed plays no part.
        times: how long passes take.
        seconds: of load per rate.
        num_tokens: tokens per request.
        seed: draws arrivals and prompts.
    """
    shape = Shape(limits=Limits(chunk_tokens=model.chunk_tokens))
    mean_prompt = Length(sum(_PROMPT_TOKENS) / 2)
    most = capacity(times, shape, Workload(prompt=mean_prompt, generated=Length(num_tokens)))
    rows = []
    for number, share in enumerate(SHARES):
        rng = np.random.default_rng((seed, number))
        starts = poisson_schedule(share * most, seconds, seed + number)
        prompts = [int(size) for size in rng.integers(*_PROMPT_TOKENS, len(starts))]
        async with AsyncExitStack() as stack:
            runner = TimedRunner(model.runner(), times, model.vocab_size)
            rig = await stack.enter_async_context(running(model, runner))
            readers = await _offer(model, rig, starts, prompts, num_tokens, rng)
        sent = [
            Conversation(index, start, index, 0, (Turn(0.0, size, num_tokens),))
            for index, (start, size) in enumerate(zip(starts, prompts, strict=True))
        ]
        began = readers[0].submitted - starts[0]
        measured, simulated = Observed(), Observed()
        for start, reader in zip(starts, readers, strict=True):
            measured.add(began + start, reader.times)
        measured.seconds = max(reader.times[-1] for reader in readers) - began
        simulated.add_history(Cluster(shape, times).run(sent))
        row = Comparison.of(
            share,
            len(starts) / seconds,
            len(starts),
            measured=measured.figures(),
            simulated=simulated.figures(),
            machine_load=next(iter(load_averages()), 0.0),
        )
        rows.append(row)
    return Section("timed-engine", _QUESTION, 1, tuple(rows), (_finding(rows),), _NOTES)


async def _offer(
    model: LoadedCausal,
    rig: Rig,
    starts: Sequence[float],
    prompts: Sequence[int],
    num_tokens: int,
    rng: np.random.Generator,
) -> list[Reader]:
    """Submits the prompts at their times, and waits for all replies."""
    began = time.perf_counter()
    readers: list[Reader] = []
    for start, size in zip(starts, prompts, strict=True):
        prompt = model.random_prompt(rng, size)
        await asyncio.sleep(began + start - time.perf_counter())
        readers.append(rig.read(prompt, num_tokens))
    await asyncio.gather(*(reader.end() for reader in readers))
    await rig.close(readers)
    return readers


def _finding(rows: Sequence[Comparison]) -> str:
    ratios = [ratio for row in rows for ratio in row.ratios.values()]
    return f"simulated values are {min(ratios):.2f} to {max(ratios):.2f} of the engine's"
