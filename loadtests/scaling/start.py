"""The time to readiness against the model's size."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from loadtests.engine.section import Section
from loadtests.server_process import running_server
from maskdial.models.bundle import Bundle

_QUESTION = "time from the start of the process to readiness, against the model's size"
_NOTES = (
    "listening: Python, its imports and the socket, the same for every model; loading: from there "
    "to readiness: hashes, graph, golden check and the first pass, the files in the page cache",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One model; medians over its starts, seconds. ``size_mb`` is that of all its files."""

    model: str
    size_mb: float
    starts: int
    listening_s: float
    loading_s: float
    ready_s: float
    cpu_s: float
    loaded_mb_per_s: float


@dataclass(frozen=True, slots=True)
class Start:
    """One start, in seconds."""

    listening: float
    ready: float
    cpu: float


async def measure(bundles: Sequence[Bundle], num_starts: int) -> Section:
    """Starts a server of each model, in turns.

    Args:
        bundles: the models.
        num_starts: how often; the first is dropped if there are two more.
    """
    samples: dict[str, list[Start]] = {bundle.name: [] for bundle in bundles}
    for _ in range(num_starts):
        for bundle in bundles:
            samples[bundle.name].append(await asyncio.to_thread(_start, bundle))
    rows = tuple(summarize(bundle, samples[bundle.name]) for bundle in bundles)
    findings = tuple(
        f"{row.model}: {row.size_mb:.0f} MB are loaded in {row.loading_s:.2f} s" for row in rows
    )
    return Section("start", _QUESTION, num_starts, rows, findings, _NOTES)


def _start(bundle: Bundle) -> Start:
    with running_server({bundle.name: bundle.path}) as server:
        return Start(server.start_seconds, server.ready_seconds, server.cpu_seconds())


def summarize(bundle: Bundle, starts: Sequence[Start]) -> Row:
    """All starts of a model as a row."""
    size = sum((bundle.path / name).stat().st_size for name in bundle.manifest.files) / 1e6
    counted = starts[1:] if len(starts) > 2 else starts
    loading = median(start.ready - start.listening for start in counted)
    return Row(
        model=bundle.name,
        size_mb=size,
        starts=len(counted),
        listening_s=median(start.listening for start in counted),
        loading_s=loading,
        ready_s=median(start.ready for start in counted),
        cpu_s=median(start.cpu for start in counted),
        loaded_mb_per_s=size / loading,
    )
