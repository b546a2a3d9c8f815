"""Our engine, in this process."""

import asyncio
import random

from loadtests.checkpoints import causal_ids
from loadtests.compare.runners import ours
from loadtests.compare.runners.streams import Times, decode_seconds, num_lead
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work
from maskdial.causal.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.config import load_config
from maskdial.metrics import Metrics
from maskdial.served import CausalModel, load_model

prepare = ours.prepare


def open_runner(setup: Setup) -> Runner:
    """Starts the engine as the server does, without its prefix cache."""
    config = load_config(ours.settings(setup) | {"prefix_cache_bytes": 0})
    model = load_model(ours.MODEL, setup.bundle, config, Metrics(()))
    assert isinstance(model, CausalModel), "the bundle of a causal checkpoint"
    return _Engine(model, setup.seed)


class _Engine:
    def __init__(self, model: CausalModel, seed: int) -> None:
        self._model = model
        self._rng = random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(model.engine.warm_up())

    def run(self, work: Work) -> float:
        num_tokens = 1 if work.kind == "prefill" else work.repeats + num_lead(work)
        prompts = [causal_ids(self._rng, work.length) for _ in range(work.batch)]
        times = self._loop.run_until_complete(self._generate(prompts, num_tokens))
        if work.kind == "prefill":
            return times[0][1] - times[0][0]
        return decode_seconds(times, work.repeats)

    def close(self) -> None:
        self._model.stop()
        self._loop.close()

    async def _generate(self, prompts: list[list[int]], num_tokens: int) -> list[Times]:
        return await asyncio.gather(*(self._read(prompt, num_tokens) for prompt in prompts))

    async def _read(self, prompt: list[int], num_tokens: int) -> Times:
        """When the prompt was submitted, and when each token came."""
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        times = [self._loop.time()]
        async with self._model.engine.stream(Sequence(prompt, params)) as stream:
            async for _ in stream:
                times.append(self._loop.time())
        return times
