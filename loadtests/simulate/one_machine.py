"""One server, measured and simulated: does the simulation reproduce the table of ``scaling``?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from loadtests import LoadTestError
from loadtests.closed_loop import Generation
from loadtests.engines import LoadedCausal
from loadtests.measurement import Section, load_averages, median
from loadtests.report import Settings
from loadtests.scaling.load import (
    SHARES,
    arrivals,
    measure_capacity,
    measure_rate,
    settings_of,
)
from loadtests.scaling.load import Row as Measured
from loadtests.server import running_server
from loadtests.simulate.calibration import in_server, mean_times, measure_loops, measure_steps
from loadtests.simulate.cluster import Cluster, History, Shape
from loadtests.simulate.replica import Limits
from loadtests.simulate.results import Comparison, Figures
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Conversation, Turn
from loadtests.texts import draw_jobs

_QUESTION = "one server under rising load: simulated, as a share of what was measured"
_TARGET = 0.15
_NUM_TEXTS = 256
_NOTES = (
    "the step times are those of closed loops before and after each rate; nothing was fitted to "
    "the rates",
)


@dataclass(frozen=True, slots=True)
class Row(Comparison):
    """A rate of the server; ``step_1``, ``step_8`` and ``read_64`` are what the simulation took a
    decode step of one and of eight rows, and the reading of 64 tokens, to take over HTTP.
    """

    step_1_ms: float
    step_8_ms: float
    read_64_ms: float


async def measure(model: LoadedCausal, seconds: float, num_tokens: int, seed: int) -> Section:
    """Measures step times and rates in turns, and simulates the rates.

    Args:
        model: a causal bundle that the server can load, too.
        seconds: of load per rate, and of each of the calibrations between them.
        num_tokens: tokens per request.
        seed: draws arrivals, texts and prompts.
    """
    bundle, work = model.bundle, Generation(num_tokens)
    alone = await measure_steps(model, seconds, np.random.default_rng(seed))
    texts = [job.text for job in draw_jobs("classify", _NUM_TEXTS, seed)]
    prompts = [_num_tokens(model, text) for text in texts]
    measured: list[tuple[Measured, float, list[Conversation]]] = []
    with running_server({bundle.name: bundle.path}) as server:

        async def calibrate() -> StepTimes:
            return in_server(alone, await measure_loops(texts, server.port, seconds), prompts)

        capacity = await measure_capacity(bundle, server, work, seconds / 2, seed)
        calibrations = [await calibrate()]
        for number, share in enumerate(SHARES):
            settings = settings_of(
                bundle, server.url, share * capacity, seconds, num_tokens, seed + number
            )
            row = await measure_rate(bundle.name, server, work, share, settings)
            load = next(iter(load_averages()), 0.0)
            measured.append((row, load, conversations(model, settings, num_tokens)))
            calibrations.append(await calibrate())
    shape = Shape(limits=Limits(chunk_tokens=model.chunk_tokens))
    rows = []
    for (row, load, sent), (before, after) in zip(measured, pairwise(calibrations), strict=True):
        times = mean_times(before, after)
        rows.append(compare(row, Cluster(shape, times).run(sent), times, load))
    return section_of(rows)


def _num_tokens(model: LoadedCausal, text: str) -> int:
    return len(model.tokenizer.encode(text).ids)


def conversations(model: LoadedCausal, settings: Settings, num_tokens: int) -> list[Conversation]:
    """The same requests for the simulation: one turn each."""
    return [
        Conversation(
            number=number,
            start=start,
            instructions=number,
            num_instructions=0,
            turns=(Turn(0.0, _num_tokens(model, job.text), num_tokens),),
        )
        for number, (job, start) in enumerate(arrivals(settings))
    ]


def compare(measured: Measured, history: History, times: StepTimes, load: float) -> Row:
    """One rate as it was measured, and as it was simulated.

    Raises:
        LoadTestError: no request succeeded.
    """
    if (
        measured.failed
        or measured.p50_ms is None
        or measured.p99_ms is None
        or measured.first_token_p99_ms is None
    ):
        raise LoadTestError(
            f"{measured.failed} requests failed at {measured.offered:.1f} per second"
        )
    comparison = Comparison.of(
        measured.share,
        measured.offered,
        measured.requests,
        measured=Figures(
            measured.achieved, measured.p50_ms, measured.p99_ms, measured.first_token_p99_ms
        ),
        simulated=Figures.of_history(history),
        machine_load=load,
    )
    return Row(
        **asdict(comparison),
        step_1_ms=1e3 * times.decode_seconds(1, 0),
        step_8_ms=1e3 * times.decode_seconds(8, 0),
        read_64_ms=1e3 * times.prefill_seconds(64),
    )


def section_of(rows: Sequence[Row]) -> Section:
    """The report."""
    columns = {
        "throughput": [row.x_achieved for row in rows],
        "p50": [row.x_p50 for row in rows],
        "p99": [row.x_p99 for row in rows],
        "p99 of the first token": [row.x_first_token_p99 for row in rows],
    }
    findings = tuple(
        f"{name}: {sum(abs(value - 1) <= _TARGET for value in values)} of {len(values)} rates "
        f"within {_TARGET:.0%}; {min(values):.2f} to {max(values):.2f}, median {median(values):.2f}"
        for name, values in columns.items()
    )
    return Section("one-machine", _QUESTION, 1, tuple(rows), findings, _NOTES)
