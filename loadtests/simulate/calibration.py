"""Calibration: the step times of a model on this machine, and what HTTP adds to them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from loadtests.closed_loop import Generation, Throughput, drive, http_clients
from loadtests.engine import steps
from loadtests.engines import NUM_STREAMS, LoadedCausal
from loadtests.measurement import take_turns
from loadtests.simulate.step_times import Curve, StepTimes
from loadtests.texts import draw_jobs
from maskdial.models.served import ServedModel

_FEW_TOKENS, _MANY_TOKENS = 4, 32
_NUM_TEXTS = 256


@dataclass(frozen=True, slots=True)
class HttpCosts:
    """What the server takes for a request and for a token of its stream, in seconds."""

    per_request: float
    per_token: float


async def measure_steps(
    model: LoadedCausal, seconds: float, rng: np.random.Generator
) -> tuple[steps.Row, ...]:
    """The rows of the section ``steps`` of ``loadtests engine``."""
    section = await steps.measure(model, seconds, rng)
    return tuple(row for row in section.rows if isinstance(row, steps.Row))


async def measure_http(bare: ServedModel, port: int, seconds: float, seed: int) -> HttpCosts:
    """Compares closed loops over HTTP with the same ones on a bare engine, in turns.

    Args:
        bare: the model in this process, its engine started.
        port: of a server of the same model.
        seconds: for all of it.
        seed: draws the texts.
    """
    texts = [job.text for job in draw_jobs("classify", _NUM_TEXTS, seed)]
    each = seconds / 12  # four variants, three rounds

    async def over_http(num_tokens: int) -> Throughput:
        work = Generation(num_tokens)
        async with http_clients(work, texts, port, NUM_STREAMS) as clients:
            return await drive(clients, texts, each)

    async def on_engine(num_tokens: int) -> Throughput:
        client = partial(Generation(num_tokens).run, bare)
        return await drive([client] * NUM_STREAMS, texts, each)

    await bare.engine.warm_up()
    samples = await take_turns(
        {
            (name, number): partial(run, number)
            for number in (_FEW_TOKENS, _MANY_TOKENS)
            for name, run in (("http", over_http), ("bare", on_engine))
        },
        seconds,
    )
    added = {
        number: _seconds_per_request(samples["http", number])
        - _seconds_per_request(samples["bare", number])
        for number in (_FEW_TOKENS, _MANY_TOKENS)
    }
    return http_costs(added[_FEW_TOKENS], added[_MANY_TOKENS])


def _seconds_per_request(samples: Sequence[Throughput]) -> float:
    return sum(s.seconds for s in samples) / sum(s.requests for s in samples)


def http_costs(few: float, many: float) -> HttpCosts:
    """Divides the seconds that HTTP adds to a request of 4 and to one of 32 tokens."""
    per_token = max((many - few) / (_MANY_TOKENS - _FEW_TOKENS), 0.0)
    return HttpCosts(max(few - _FEW_TOKENS * per_token, 0.0), per_token)


def mean_times(before: StepTimes, after: StepTimes) -> StepTimes:
    """The step times between two measurements of the same steps."""

    def between(first: Curve, second: Curve) -> Curve:
        return tuple((n, (x + y) / 2) for (n, x), (_, y) in zip(first, second, strict=True))

    return replace(
        before,
        decode=between(before.decode, after.decode),
        decode_per_token=(before.decode_per_token + after.decode_per_token) / 2,
        prefill=between(before.prefill, after.prefill),
        prefill_per_pair=(before.prefill_per_pair + after.prefill_per_pair) / 2,
        per_request=(before.per_request + after.per_request) / 2,
    )
