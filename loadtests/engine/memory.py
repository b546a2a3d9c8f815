"""What the KV cache takes, and what the process returns to the system."""

import asyncio
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loadtests.engine.rig import Rig, running
from loadtests.engines import NUM_STREAMS, LoadedCausal
from loadtests.measurement import Section

_QUESTION = "resident memory while 8 streams run, and after they end"
_PROMPT_TOKENS = 512
_MB = 1e6
_RETURNED = 0.1
_RETURN_TIMEOUT = 20.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Row:
    """One reading; megabytes are 1e6 bytes, ``grown_mb`` is relative to the first reading."""

    state: str
    kv_used_mb: float
    resident_mb: float
    grown_mb: float
    after_seconds: float


async def measure(model: LoadedCausal, seconds: float, rng: np.random.Generator) -> Section:
    """Reads the process's memory before, during and after eight streams; not repeated."""
    size = min(_PROMPT_TOKENS, model.max_length // 2)
    runner = model.runner()
    # The session's own buffers grow in the first passes and stay: they are not the KV cache's.
    model.prefill(runner, model.random_prompt(rng, size))
    async with running(model, runner) as rig:
        gc.collect()
        readings = [("before", 0, resident_bytes(), 0.0)]
        started = time.perf_counter()
        readers = [
            rig.read(model.random_prompt(rng, size), model.max_length) for _ in range(NUM_STREAMS)
        ]
        for reader in readers:
            await reader.until(2)
        used = rig.recorder.peak_kv_bytes
        readings.append(("8 streams", used, resident_bytes(), time.perf_counter() - started))
        await rig.close(readers)
        ended = time.perf_counter()
        resident = await _wait_for_return(rig, readings[0][2], used)
        readings.append(("returned", 0, resident, time.perf_counter() - ended))
        per_token = runner.cache.bytes_per_token
    rows = tuple(
        Row(state, kv / _MB, now / _MB, (now - readings[0][2]) / _MB, after)
        for state, kv, now, after in readings
    )
    kept, grown = max(round(rows[2].grown_mb), 0), round(rows[1].grown_mb)
    findings = (
        f"{per_token:,} bytes per token; prompts of {size} tokens; after the streams ended, the "
        f"process kept {kept} of {grown} MB",
    )
    notes = (
        () if resident else ("resident memory is read from /proc, which this system does not have",)
    )
    return Section("memory", _QUESTION, 1, rows, findings, notes)


async def _wait_for_return(rig: Rig, before: int, used: int) -> int:
    """Waits until little more memory is used than before, or the time is up."""
    deadline = time.perf_counter() + _RETURN_TIMEOUT
    while True:
        resident = resident_bytes()
        if resident - before <= _RETURNED * used or time.perf_counter() > deadline:
            return resident
        await asyncio.sleep(_POLL_SECONDS)


def resident_bytes() -> int:
    """The process's resident memory; 0 where the system does not report it."""
    if sys.platform != "linux":
        return 0
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()
