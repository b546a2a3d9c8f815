"""Calibration: the step times of a model on this machine, without HTTP and as clients see them."""

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean

import numpy as np
import simpy

from loadtests.closed_loop import Generation, drive
from loadtests.engine import steps
from loadtests.engines import LoadedCausal
from loadtests.measurement import median, take_turns
from loadtests.scaling.load import Sender
from loadtests.server import Connection, Reply, count_tokens
from loadtests.simulate.replica import Limits, Replica
from loadtests.simulate.request import Request
from loadtests.simulate.step_times import Curve, StepTimes
from loadtests.texts import draw_jobs

_ROWS = (1, 2, 4, 8)
_MIXED_ROWS = (1, 4, 7)
_PROMPTS = (16, 64, 240)
_NEW_TOKENS = 32
# Twice the slots, so that these are always full, as behind a queue. With as many as slots, what
# clients and HTTP take to follow one request with the next would look like work of the engine.
_CLIENTS = 16
LOOP_SECONDS = 2.0
_LOOP_TEXTS = 256
_LOOP_TOKENS = (16, 48, 24, 40, 32)  # if all were alike, the texts would begin and end together
_LOOPS = 3
_FITS = 4
_NUM_QUANTILES = 200


async def measure_steps(model: LoadedCausal, seconds: float, rng: np.random.Generator) -> StepTimes:
    """What the section ``steps`` of ``loadtests engine`` measures."""
    section = await steps.measure(model, seconds, rng)
    rows = [row for row in section.rows if isinstance(row, steps.Row)]
    return StepTimes.from_rows(rows, model.layout.query_block, model.packs)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and its number of tokens."""

    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt that came while other texts went on; times in seconds.

    Attributes:
        rows: how many those were.
        tokens: of the prompt.
        first_token: from sending it to its first token.
        gap: the longest one in the other texts meanwhile, so the step that read it; 0 without them.
    """

    rows: int
    tokens: int
    first_token: float
    gap: float


@dataclass(slots=True)
class Seen:
    """What the clients of a server saw.

    Attributes:
        context: tokens of a text in the middle of its decode steps.
        gaps: between the tokens of texts that were decoded together, in seconds, by their number.
        arrivals: of prompts.
        texts: tokens of the prompts that the clients of closed loops take in turn, and of the
            replies.
        loops: seconds per request in closed loops of 16 clients, `LOOP_SECONDS` each.
    """

    context: float
    texts: Sequence[tuple[int, int]]
    gaps: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in _ROWS})
    arrivals: list[Arrival] = field(default_factory=list)
    loops: list[float] = field(default_factory=list)


class _Reader:
    """One streamed text: when it was sent, and when its tokens came."""

    def __init__(self, connection: Connection, text: str, num_tokens: int) -> None:
        self.times: list[float] = []
        self._more = asyncio.Event()
        self.sent = time.perf_counter()
        request = Generation(num_tokens).request(text)
        self._reply = asyncio.create_task(connection.send(request, self._note))

    def _note(self, data: bytes) -> None:
        self.times += [time.perf_counter()] * count_tokens(data)
        self._more.set()

    async def until(self, num_tokens: int) -> None:
        while len(self.times) < num_tokens and not self._reply.done():
            self._more.clear()
            await self._more.wait()

    async def end(self) -> Reply:
        return await self._reply


class Watch:
    """Drives a server with streams, and remembers what its clients saw.

    Args:
        model: that it serves.
        port: of the server.
        seed: draws the prompts.
    """

    def __init__(self, model: LoadedCausal, port: int, seed: int) -> None:
        self._port = port
        jobs = draw_jobs("generate", _LOOP_TEXTS, seed)
        self._texts = [job.text for job in jobs]
        words = " ".join(self._texts).split()
        self._prompts = [
            _prompt(model, words, size) for size in _PROMPTS if size <= model.max_length // 2
        ]
        self._connections: list[Connection] = []
        self.seen = Seen(
            self._prompts[0].tokens + _NEW_TOKENS / 2,
            [(_num_tokens(model, text), _loop_tokens(text)) for text in self._texts],
        )

    async def measure(self, seconds: float) -> None:
        """Measures everything in turns, at least once."""
        variants: dict[object, Callable[[], Awaitable[object]]] = {
            **{rows: partial(self._decode, rows) for rows in _ROWS},
            **{
                (rows, prompt): partial(self._arrive, rows, prompt)
                for rows in (0, *_MIXED_ROWS)
                for prompt in self._prompts
            },
            **{f"loop {number}": self._keep_loop for number in range(_LOOPS)},
        }
        try:
            await take_turns(variants, seconds)
        finally:
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    async def loop(self) -> float:
        """Seconds per request in a closed loop, which tell how fast the machine is now."""
        senders = {size: Sender(Generation(size), self._port) for size in _LOOP_TOKENS}

        async def send(text: str) -> int:
            times: list[float] = []
            await senders[_loop_tokens(text)](text, lambda: times.append(time.perf_counter()))
            return len(times)

        try:
            found = await drive([send] * _CLIENTS, self._texts, LOOP_SECONDS)
        finally:
            for sender in senders.values():
                await sender.aclose()
        return found.seconds / found.requests

    async def _keep_loop(self) -> None:
        self.seen.loops.append(await self.loop())

    async def connections(self, num_texts: int) -> list[Connection]:
        """So many open ones, which are used again."""
        # The server closes those that were idle while loops ran.
        self._connections = [each for each in self._connections if not each.closed]
        while len(self._connections) < num_texts:
            self._connections.append(await Connection.open(self._port))
        return self._connections[:num_texts]

    async def _decode(self, rows: int) -> None:
        """Gaps in texts while all of them are decoded."""
        text = self._prompts[0].text
        readers = [_Reader(each, text, _NEW_TOKENS + rows) for each in await self.connections(rows)]
        for reader in readers:
            await reader.end()
        start = max(reader.times[0] for reader in readers)
        end = min(reader.times[-1] for reader in readers)
        times = [at for at in readers[0].times if start <= at <= end]
        self.seen.gaps[rows] += np.diff(times).tolist()

    async def _arrive(self, rows: int, prompt: Prompt) -> None:
        """A prompt that comes while ``rows`` texts go on."""
        text = self._prompts[0].text
        *others, last = await self.connections(rows + 1)
        readers = [_Reader(each, text, _NEW_TOKENS + rows) for each in others]
        for reader in readers:
            await reader.until(3)
        arriving = _Reader(last, prompt.text, 1)
        await arriving.end()
        for reader in readers:
            await reader.end()
        sent, came = arriving.sent, arriving.times[0]
        gaps = [
            after - before
            for reader in readers[:1]
            for before, after in zip(reader.times, reader.times[1:], strict=False)
            if after > sent and before < came
        ]
        self.seen.arrivals.append(Arrival(rows, prompt.tokens, came - sent, max(gaps, default=0.0)))


def _prompt(model: LoadedCausal, words: Sequence[str], num_tokens: int) -> Prompt:
    """The shortest beginning of the words that has so many tokens."""
    number = next(
        (
            number
            for number in range(1, len(words))
            if _num_tokens(model, " ".join(words[:number])) >= num_tokens
        ),
        len(words),
    )
    text = " ".join(words[:number])
    return Prompt(text, _num_tokens(model, text))


def _num_tokens(model: LoadedCausal, text: str) -> int:
    return len(model.tokenizer.encode(text).ids)


def _loop_tokens(text: str) -> int:
    return _LOOP_TOKENS[len(text) % len(_LOOP_TOKENS)]


def in_server(alone: StepTimes, seen: Seen, limits: Limits) -> StepTimes:
    """The step times of an engine in a server, with all that HTTP and the clients add.

    Args:
        alone: of the engine alone, for what clients cannot see: how reading follows the length of a
            prompt and the rows beside it, and decoding its context.
        seen: by the clients.
        limits: the server's settings.
    """
    steps_of = {rows: fmean(gaps) for rows, gaps in seen.gaps.items()}
    busy = [arrival for arrival in seen.arrivals if arrival.rows]
    ratios_of: dict[int, list[float]] = {}
    for arrival in busy:
        context = round(arrival.rows * seen.context)
        step = alone.mixed_seconds(arrival.rows, context, arrival.tokens)
        ratios_of.setdefault(arrival.tokens, []).append(arrival.gap / step)
    # The longest gap may be a pause of a busy machine. Pauses are in the other steps' means, and in
    # the loops that `per_request` is fitted to.
    slower_by = {tokens: median(found) for tokens, found in sorted(ratios_of.items())}
    slower = fmean(slower_by.values())
    ratios = [gap / steps_of[rows] for rows, gaps in seen.gaps.items() for gap in gaps]
    times = replace(
        alone,
        decode=tuple(
            (rows, max(step - alone.decode_per_token * rows * seen.context, 0.0))
            for rows, step in sorted(steps_of.items())
        ),
        prefill=tuple(
            (tokens, each * alone.prefill_seconds(tokens)) for tokens, each in slower_by.items()
        ),
        prefill_per_pair=slower * alone.prefill_per_pair,
        beside=_scaled(alone.beside, slower),
        spread=_quantiles(ratios),
    )
    outside: dict[int, list[float]] = {}
    for arrival in seen.arrivals:
        rows = arrival.rows
        # It comes at any time within a step, so it waits for half of it.
        inside = arrival.gap + times.decode_seconds(rows, round(rows * seen.context)) / 2
        if not rows:
            inside = alone.prefill_seconds(arrival.tokens)
        outside.setdefault(rows, []).append(arrival.first_token - inside)
    times = replace(
        times,
        outside=tuple((rows, max(fmean(each), 0.0)) for rows, each in sorted(outside.items())),
    )
    wanted = fmean(seen.loops)
    for _ in range(_FITS):
        missing = wanted - loop_seconds(times, limits, seen.texts)
        times = replace(times, per_request=max(times.per_request + missing, 0.0))
    return times


def loop_seconds(times: StepTimes, limits: Limits, texts: Sequence[tuple[int, int]]) -> float:
    """Seconds per request in a closed loop, by simulation; requests count as in `drive`."""
    env = simpy.Environment()
    answered: dict[Request, simpy.Event] = {}

    def note(request: Request) -> None:
        answered.pop(request).succeed()

    replica = Replica(env, 0, times, limits, note)
    supply, numbers = itertools.cycle(texts), itertools.count()
    spans: list[tuple[float, float]] = []
    window = math.inf
    num_open = _CLIENTS

    def ask() -> simpy.Event:
        number = next(numbers)
        request = Request(number, number, 0, *next(supply), env.now)
        reply = answered[request] = env.event()
        replica.submit(request)
        return reply

    def send_on() -> Generator[simpy.Event, object, None]:
        nonlocal window, num_open
        while window == math.inf:
            began = env.now
            yield ask()
            spans.append((began, env.now))
            if window == math.inf and env.now >= LOOP_SECONDS:
                window = env.now
        num_open -= 1
        while num_open:
            yield ask()

    env.run(env.all_of([env.process(send_on()) for _ in range(_CLIENTS)]))
    shares = [min((window - began) / (ended - began), 1.0) for began, ended in spans]
    return window / sum(shares)


def slowed(times: StepTimes, factor: float) -> StepTimes:
    """The step times of a machine that takes ``factor`` times as long for everything."""
    return replace(
        times,
        decode=_scaled(times.decode, factor),
        decode_per_token=factor * times.decode_per_token,
        prefill=_scaled(times.prefill, factor),
        prefill_per_pair=factor * times.prefill_per_pair,
        beside=_scaled(times.beside, factor),
        outside=_scaled(times.outside, factor),
        per_request=factor * times.per_request,
    )


def _scaled(curve: Curve, factor: float) -> Curve:
    return tuple((number, factor * seconds) for number, seconds in curve)


def _quantiles(ratios: Sequence[float]) -> tuple[float, ...]:
    """Positive ones, in the middles of as many equal parts."""
    positive = [ratio for ratio in ratios if ratio > 0]
    middles = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    return tuple(np.quantile(positive, middles).tolist())
