"""One server, measured and simulated: does the simulation reproduce the table of ``scaling``?"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from statistics import fmean

from loadtests import LoadTestError
from loadtests.closed_loop import Generation
from loadtests.engines import LoadedCausal
from loadtests.measurement import Section, load_averages, median, take_turns
from loadtests.open_loop import Run
from loadtests.report import Settings
from loadtests.scaling.load import SHARES, arrivals, measure_capacity, offer, settings_of
from loadtests.server import running_server
from loadtests.simulate.calibration import Watch, in_server, slowed
from loadtests.simulate.cluster import Cluster, Shape
from loadtests.simulate.replica import Limits
from loadtests.simulate.results import Comparison, Observed
from loadtests.simulate.step_times import StepTimes
from loadtests.simulate.workload import Conversation, Turn

_QUESTION = "one server under rising load: simulated, as a share of what was measured"
_TARGET = 0.15
_NOTES = (
    "the step times are what clients saw of streams, prompts and closed loops before and after all "
    "rates; closed loops around each piece of a rate tell how fast the machine was then; nothing "
    "was fitted to the rates",
)
PIECE_SECONDS = 4.0
"""How long a rate is offered at a time: virtual machines change their speed within seconds."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A few seconds of a rate.

    Attributes:
        rate: requests offered per second.
        run: what was measured.
        sent: the same requests for the simulation.
        loop: seconds per request in closed loops right before and after, on average.
    """

    rate: float
    run: Run
    sent: Sequence[Conversation]
    loop: float


@dataclass(frozen=True, slots=True)
class Row(Comparison):
    """A rate of the server. ``step_1``, ``step_8`` and ``read_16`` are what the simulation took a
    decode step of one and of eight rows, and the reading of 16 tokens beside four rows, to take;
    ``outside`` is the time of a request outside of the engine, beside four rows, and
    ``per_request`` what it costs the engine besides its tokens.
    """

    step_1_ms: float
    step_8_ms: float
    read_16_ms: float
    outside_ms: float
    per_request_ms: float


async def measure(
    model: LoadedCausal,
    alone: StepTimes,
    seconds: float,
    num_tokens: int,
    seed: int,
    shares: Sequence[float] = SHARES,
) -> Section:
    """Measures step times and rates in turns, and simulates the rates.

    Args:
        model: a causal bundle that the server can load, too.
        alone: the step times of its engine.
        seconds: of load per rate, in pieces; half of it for the step times before all rates, and
            after them.
        num_tokens: tokens per request.
        seed: draws arrivals, texts and prompts.
        shares: of what a closed loop achieves, the rates.
    """
    bundle, work = model.bundle, Generation(num_tokens)
    limits = Limits(chunk_tokens=model.chunk_tokens)
    seeds = count(seed)
    pieces: dict[float, list[Piece]] = {share: [] for share in shares}
    # Texts recur, and the simulation knows no prefixes within texts.
    with running_server({bundle.name: bundle.path}, prefix_cache_bytes=0) as server:
        capacity = await measure_capacity(bundle, server, work, PIECE_SECONDS / 2, seed)
        watch = Watch(model, server.port, seed)
        await watch.measure(seconds / 2)
        before = await watch.loop()

        async def offer_piece(share: float) -> None:
            nonlocal before
            rate = share * capacity
            settings = settings_of(bundle, server.url, rate, PIECE_SECONDS, num_tokens, next(seeds))
            run = await offer(settings, work, server.port)
            after = await watch.loop()
            sent = conversations(model, settings, num_tokens)
            pieces[share].append(Piece(rate, run, sent, (before + after) / 2))
            before = after

        await take_turns(
            {share: partial(offer_piece, share) for share in shares}, seconds * len(shares)
        )
        await watch.measure(seconds / 2)
    times = in_server(alone, watch.seen, limits)
    usual = fmean(watch.seen.loops)
    return section_of(
        [compare(share, each, Shape(limits=limits), times, usual) for share, each in pieces.items()]
    )


def conversations(model: LoadedCausal, settings: Settings, num_tokens: int) -> list[Conversation]:
    """The same requests for the simulation: one turn each."""
    return [
        Conversation(
            number=number,
            start=start,
            instructions=number,
            num_instructions=0,
            turns=(Turn(0.0, len(model.tokenizer.encode(job.text).ids), num_tokens),),
        )
        for number, (job, start) in enumerate(arrivals(settings))
    ]


def compare(
    share: float, pieces: Sequence[Piece], shape: Shape, times: StepTimes, usual: float
) -> Row:
    """One rate as it was measured, and as it was simulated, all pieces together.

    Args:
        share: of the capacity.
        pieces: of the rate.
        shape: of the simulation.
        times: of the server's steps, on average.
        usual: seconds per request in closed loops then.

    Raises:
        LoadTestError: a request failed.
    """
    measured, simulated = Observed(), Observed()
    for piece in pieces:
        for sample in piece.run.samples:
            if sample.failure is not None:
                raise LoadTestError(f"a request failed at {piece.rate:.1f}/s: {sample.failure}")
            measured.add(sample.intended, sample.tokens)
        measured.seconds += max(sample.ended for sample in piece.run.samples)
        simulated.add_history(Cluster(shape, slowed(times, piece.loop / usual)).run(piece.sent))
    comparison = Comparison.of(
        share,
        fmean(piece.rate for piece in pieces),
        len(measured.first),
        measured=measured.figures(),
        simulated=simulated.figures(),
        machine_load=next(iter(load_averages()), 0.0),
    )
    rows, context = 4, 32
    return Row(
        **asdict(comparison),
        step_1_ms=1e3 * times.decode_seconds(1, context),
        step_8_ms=1e3 * times.decode_seconds(8, 8 * context),
        read_16_ms=1e3 * times.mixed_seconds(rows, rows * context, 16),
        outside_ms=1e3 * times.outside_seconds(rows),
        per_request_ms=1e3 * times.per_request,
    )


def section_of(rows: Sequence[Row]) -> Section:
    """The report."""
    names = rows[0].ratios
    columns = {name: [row.ratios[name] for row in rows] for name in names}
    findings = tuple(
        f"{name}: {sum(abs(value - 1) <= _TARGET for value in values)} of {len(values)} rates "
        f"within {_TARGET:.0%}; {min(values):.2f} to {max(values):.2f}, median {median(values):.2f}"
        for name, values in columns.items()
    )
    return Section("one-machine", _QUESTION, 1, tuple(rows), findings, _NOTES)
