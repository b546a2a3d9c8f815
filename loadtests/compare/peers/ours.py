"""Our engine in this process, and the bundles that our engine and server run."""

import asyncio
import math
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtests.checkpoints import build_checkpoint, causal_ids, masked_ids
from loadtests.compare.peers import Runner, Times, decode_seconds, num_lead
from loadtests.compare.setup import HALF, TINY, Setup
from loadtests.compare.work import Work
from loadtests.engines import load_served, open_stream
from maskdial.bundle.bundle import read_manifests
from maskdial.causal.model import CausalModel
from maskdial.masked.model import MaskedModel
from maskdial.masked.request import MaskedInput

_NAME = "model"


def prepare(setup: Setup) -> None:
    """Builds the checkpoint and its bundle, and removes bundles of other exporters."""
    if setup.precision in HALF or setup.model.is_large:
        from loadtests.compare.bundles import write_unchecked

        build_checkpoint(
            setup.checkpoint, setup.model.config, setup.seed, weights=setup.provider == "cpu"
        )
        checked = replace(
            setup, shape=TINY[setup.model.family].name, precision="fp32", provider="cpu"
        )
        if not checked.bundle.exists():
            _export(checked)
        (tiny,) = read_manifests(checked.shape, checked.bundle)
        write_unchecked(setup, tiny)
    else:
        _export(setup)
    for bundle in setup.bundles():
        if bundle != setup.bundle:
            shutil.rmtree(bundle)


def _export(setup: Setup) -> None:
    from maskdial_export.export import export
    from maskdial_export.quantize.gate import Gate

    build_checkpoint(setup.checkpoint, setup.model.config, setup.seed)
    # Random weights have no quality to lose, so the gate lets everything pass.
    gate = None if setup.precision == "fp32" else Gate(max_loss=math.inf, keep_worst=0)
    export(str(setup.checkpoint), setup.bundle, precision=setup.precision, gate=gate)


def settings(setup: Setup) -> dict[str, Any]:
    """The server settings that differ from its defaults. A variant is a provider."""
    return {
        "provider": setup.variant or setup.provider,
        "threads": setup.threads,
        "slots": setup.room.batch,
        "max_context": setup.room.context,
    }


def models(setup: Setup) -> dict[str, Path]:
    """What the server serves."""
    return {_NAME: setup.bundle}


def open_runner(setup: Setup) -> Runner:
    """Starts the engine as the server does, but without a prefix cache."""
    model = load_served(_NAME, setup.bundle, settings(setup) | {"prefix_cache_bytes": 0})
    if isinstance(model, CausalModel):
        return _Causal(model, setup)
    assert isinstance(model, MaskedModel), "the bundle of a masked checkpoint"
    return _Masked(model, setup.seed)


class _Causal:
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
        times = [self._loop.time()]
        async with open_stream(self._model.engine, prompt, num_tokens) as stream:
            async for _ in stream:
                times.append(self._loop.time())
        return times


class _Masked:
    """Passes with the LM head on one row per text."""

    def __init__(self, model: MaskedModel, seed: int) -> None:
        self._model = model
        self._rng = random.Random(seed)

    def run(self, work: Work) -> float:
        return asyncio.run(self._submit(work))

    def close(self) -> None:
        self._model.stop()

    async def _submit(self, work: Work) -> float:
        """The mean time of a pass, after one that is not counted."""
        inputs = [
            MaskedInput(tuple(masked_ids(self._rng, length)), (length // 2,))
            for length, _ in work.texts
        ]
        await self._model.engine.submit_many(inputs)
        started = time.perf_counter()
        for _ in range(work.repeats):
            await self._model.engine.submit_many(inputs)
        return (time.perf_counter() - started) / work.repeats
