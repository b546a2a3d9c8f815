"""Our engine, in this process."""

import asyncio
import random

from loadtests.checkpoints import causal_ids
from loadtests.compare.runners import ours
from loadtests.compare.runners.streams import Times, decode_seconds, num_lead
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.config import load_config
from maskdial.metrics import Metrics
from maskdial.models.loading import load_model
from maskdial.models.registry import CausalModel

prepare = ours.prepare


def open_runner(setup: Setup) -> Runner:
    """Starts the engine as the server does, without its prefix cache."""
    config = load_config(ours.settings(setup) | {"prefix_cache_bytes": 0})
    model = load_model(ours.MODEL, setup.bundle, config, Metrics(()))
    assert isinstance(model, CausalModel), "the bundle of a causal checkpoint"
    return _Engine(model, setup)


class _Engine:
    def __init__(self, model: CausalModel, setup: Setup) -> None:
        self._model = model
        self._num_words = setup.model.num_words
        self._rng = random.Random(setup.seed)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(model.engine.warm_up())

    def run(self, work: Work) -> float:
        decoded = 1 if work.kind == "prefill" else work.repeats + num_lead(work)
        texts = [
            (causal_ids(self._rng, length, self._num_words), new or decoded)
            for length, new in work.texts
        ]
        times = self._loop.run_until_complete(self._generate(texts))
        if work.kind == "decode":
            return decode_seconds(times, work.repeats)
        return max(each[-1] for each in times) - min(each[0] for each in times)

    def close(self) -> None:
        self._model.stop()
        self._loop.close()

    async def _generate(self, texts: list[tuple[list[int], int]]) -> list[Times]:
        return await asyncio.gather(*(self._read(*text) for text in texts))

    async def _read(self, prompt: list[int], num_tokens: int) -> Times:
        """When the prompt was submitted, and when each token came."""
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        times = [self._loop.time()]
        async with self._model.engine.stream(Sequence(prompt, params)) as stream:
            async for _ in stream:
                times.append(self._loop.time())
        return times
