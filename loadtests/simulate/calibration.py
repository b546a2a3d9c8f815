"""Calibration: the step times of a model on this machine, without HTTP and with it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import numpy as np

from loadtests.closed_loop import Generation, Throughput, drive, http_clients
from loadtests.engine import steps
from loadtests.engines import LoadedCausal
from loadtests.measurement import take_turns
from loadtests.simulate.step_times import Curve, StepTimes

_CLIENTS = (1, 2, 4, 8)
_FEW_TOKENS, _MANY_TOKENS = 16, 48
_ROUNDS = 3

Loops = Mapping[tuple[int, int], float]
"""The mean seconds of a request in closed loops, by clients and tokens per request."""


async def measure_steps(model: LoadedCausal, seconds: float, rng: np.random.Generator) -> StepTimes:
    """What the section ``steps`` of ``loadtests engine`` measures."""
    section = await steps.measure(model, seconds, rng)
    rows = [row for row in section.rows if isinstance(row, steps.Row)]
    return StepTimes.from_rows(rows, model.layout.query_block)


async def measure_loops(texts: Sequence[str], port: int, seconds: float) -> Loops:
    """Drives a server in closed loops of several sizes, in turns."""
    each = seconds / (_ROUNDS * len(_CLIENTS) * 2)

    async def loop(num_clients: int, num_tokens: int) -> Throughput:
        work = Generation(num_tokens)
        async with http_clients(work, texts, port, num_clients) as clients:
            return await drive(clients, texts, each)

    sizes = [(clients, tokens) for clients in _CLIENTS for tokens in (_FEW_TOKENS, _MANY_TOKENS)]
    samples = await take_turns({size: partial(loop, *size) for size in sizes}, seconds)
    return {
        size: size[0] * sum(s.seconds for s in rounds) / sum(s.requests for s in rounds)
        for size, rounds in samples.items()
    }


def in_server(times: StepTimes, loops: Loops, prompts: Sequence[int]) -> StepTimes:
    """The step times of the same engine in a server, with all that HTTP adds.

    Among n clients, a request takes n readings of a prompt, its own and the others', and a decode
    step of n rows for each further token. So requests of two lengths tell both times.

    Args:
        times: of the engine alone, for what loops do not tell: how reading follows the length of a
            prompt, and decoding its context.
        loops: from `measure_loops`.
        prompts: tokens of each prompt in them.
    """
    num_prompt = fmean(prompts)
    context = num_prompt + (_FEW_TOKENS + _MANY_TOKENS) / 4
    steps_of = {
        clients: (loops[clients, _MANY_TOKENS] - loops[clients, _FEW_TOKENS])
        / (_MANY_TOKENS - _FEW_TOKENS)
        for clients in _CLIENTS
    }
    reading = fmean(
        (loops[clients, _FEW_TOKENS] - (_FEW_TOKENS - 1) * steps_of[clients]) / clients
        for clients in _CLIENTS
    )
    slower = max(reading, 0.0) / fmean(map(times.prefill_seconds, prompts))
    return replace(
        times,
        decode=tuple(
            (clients, max(step - times.decode_per_token * clients * context, 0.0))
            for clients, step in steps_of.items()
        ),
        prefill=tuple((tokens, slower * seconds) for tokens, seconds in times.prefill),
        prefill_per_pair=slower * times.prefill_per_pair,
    )


def mean_times(before: StepTimes, after: StepTimes) -> StepTimes:
    """The step times between two calibrations, which differ in their curves only."""

    def between(first: Curve, second: Curve) -> Curve:
        return tuple((n, (x + y) / 2) for (n, x), (_, y) in zip(first, second, strict=True))

    return replace(
        before,
        decode=between(before.decode, after.decode),
        prefill=between(before.prefill, after.prefill),
        prefill_per_pair=(before.prefill_per_pair + after.prefill_per_pair) / 2,
    )
