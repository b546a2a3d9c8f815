"""Our engine, in this process, with the LM head on one row a text."""

import asyncio
import random
import time

from loadtests.checkpoints import masked_ids
from loadtests.compare.runners import ours
from loadtests.compare.setup import Runner, Setup
from loadtests.compare.work import Work
from maskdial.config import load_config
from maskdial.masked.request import MaskedInput
from maskdial.metrics import Metrics
from maskdial.models.loading import load_model
from maskdial.models.registry import MaskedModel

prepare = ours.prepare


def open_runner(setup: Setup) -> Runner:
    """Starts the engine as the server does."""
    model = load_model(
        ours.MODEL, setup.bundle, load_config(dict(ours.settings(setup))), Metrics(())
    )
    assert isinstance(model, MaskedModel), "the bundle of a masked checkpoint"
    return _Engine(model, setup.seed)


class _Engine:
    def __init__(self, model: MaskedModel, seed: int) -> None:
        self._model = model
        self._rng = random.Random(seed)

    def run(self, work: Work) -> float:
        return asyncio.run(self._submit(work))

    def close(self) -> None:
        self._model.stop()

    async def _submit(self, work: Work) -> float:
        inputs = [
            MaskedInput(tuple(masked_ids(self._rng, length)), (length // 2,))
            for length, _ in work.texts
        ]
        await self._model.engine.submit_many(inputs)
        started = time.perf_counter()
        for _ in range(work.repeats):
            await self._model.engine.submit_many(inputs)
        return (time.perf_counter() - started) / work.repeats
