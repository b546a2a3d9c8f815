"""How a decode step of eight streams divides between the model and the engine."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtests.engine.rig import Rig, Step, running
from loadtests.engines import NUM_STREAMS, LoadedCausal
from loadtests.measurement import Section, median, take_turns

_QUESTION = "where the time of a decode step of 8 streams goes"
_TARGET_PERCENT = 5.0
_PROMPT_TOKENS = 16
_NEW_TOKENS = 32
_PERPLEXITY = 20.0  # typical of small models on prose

_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 8, "maxLength": 40},
            "kind": {"enum": ["river", "mountain", "town", "island"]},
            "visits": {"type": "integer", "minimum": 0, "maximum": 9999},
            "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 4},
            "open": {"type": "boolean"},
        },
        "required": ["name", "kind", "visits", "tags", "open"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    """One set of sampling parameters; times in milliseconds, medians over all steps.

    Attributes:
        sampling: which parameters.
        step_ms: the whole step.
        schedule_ms, run_ms, sample_ms, publish_ms: its parts.
        beside_pass_ms: the part of ``run`` outside the model's pass.
        own_percent: the share of everything but ``run``, median of the steps' shares.
        rows: mean sequences per step; one whose grammar mask is late sits the step out.
        steps: how many were measured.
    """

    sampling: str
    step_ms: float
    schedule_ms: float
    run_ms: float
    sample_ms: float
    publish_ms: float
    beside_pass_ms: float
    own_percent: float
    rows: float
    steps: int


async def measure(model: LoadedCausal, seconds: float, rng: np.random.Generator) -> Section:
    """Runs eight streams with the same parameters, one set of parameters after another."""
    prompt = model.random_prompt(rng, _PROMPT_TOKENS)
    temperature = temperature_for(model.prefill(model.runner(), prompt), _PERPLEXITY)
    compiler = model.grammar_compiler()
    async with AsyncExitStack() as stack:
        stack.callback(compiler.close)
        grammar = await asyncio.wrap_future(compiler.submit("json_schema", json.dumps(_SCHEMA)))
        variants: dict[str, Callable[[], Any]] = {}
        for name, sampling in _sampling(temperature).items():
            rig = await stack.enter_async_context(running(model))
            new_matcher = grammar.matcher if name == "json schema" else None
            variants[name] = partial(_run_streams, model, rig, rng, sampling, new_matcher)
        samples = await take_turns(variants, seconds)
    rows = tuple(
        summarize(name, [step for steps in rounds for step in steps])
        for name, rounds in samples.items()
    )
    worst = max(rows, key=lambda row: row.own_percent)
    typical = max(
        (row for row in rows if row.sampling != "mixed, flat"), key=lambda row: row.own_percent
    )
    return Section(
        "split",
        _QUESTION,
        len(samples["greedy"]),
        rows,
        (
            f"the engine's own share is {rows[0].own_percent:.1f}% (greedy) to "
            f"{typical.own_percent:.1f}% ({typical.sampling}), at worst {worst.own_percent:.1f}% "
            f"({worst.sampling}); target: below {_TARGET_PERCENT:g}% at a "
            f"vocabulary of 50,000 (here: {model.vocab_size:,})",
        ),
        (
            f"a temperature of {temperature:.3g} gives this model a perplexity of "
            f"{_PERPLEXITY:g}; 'flat' is a temperature of 100, at which no token is unlikely: the "
            "worst case",
        ),
    )


def _sampling(temperature: float) -> dict[str, dict[str, Any]]:
    """Fields of `SamplingParams`, by the name of their row."""
    mixed: dict[str, Any] = {
        "top_k": 200,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.95,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "logit_bias": tuple((token_id, -100.0) for token_id in range(10)),
        "top_n_tokens": 5,
        "stop": ("\n\n\n\n", "The end"),
        "do_sample": True,
    }
    drawn: dict[str, Any] = {"do_sample": True, "temperature": temperature}
    return {
        "greedy": {},
        "sampling": drawn,
        "top-k, top-p": {**drawn, "top_k": 50, "top_p": 0.9},
        "top-p": {**drawn, "top_p": 0.9},
        "mixed": {**mixed, "temperature": temperature},
        "mixed, flat": {**mixed, "temperature": 100.0, "top_k": 0},
        "json schema": drawn,
    }


async def _run_streams(
    model: LoadedCausal,
    rig: Rig,
    rng: np.random.Generator,
    sampling: dict[str, Any],
    new_matcher: Callable[[], Any] | None,
) -> list[Step]:
    """The steps that decoded and read no prompt."""
    readers = [
        rig.read(
            model.random_prompt(rng, _PROMPT_TOKENS),
            _NEW_TOKENS,
            grammar=None if new_matcher is None else new_matcher(),
            **sampling,
        )
        for _ in range(NUM_STREAMS)
    ]
    await asyncio.gather(*(reader.end() for reader in readers))
    await rig.close(readers)
    return [step for step in rig.recorder.take_steps() if step.num_decoded]


def summarize(name: str, steps: list[Step]) -> Row:
    """Summarizes the steps of one set of parameters."""
    return Row(
        sampling=name,
        step_ms=1000 * median(step.total for step in steps),
        schedule_ms=1000 * median(step.schedule for step in steps),
        run_ms=1000 * median(step.run for step in steps),
        sample_ms=1000 * median(step.sample for step in steps),
        publish_ms=1000 * median(step.publish for step in steps),
        beside_pass_ms=1000 * median(step.around_passes for step in steps),
        own_percent=median(100 * step.own / step.total for step in steps),
        rows=sum(step.num_decoded for step in steps) / max(len(steps), 1),
        steps=len(steps),
    )


def temperature_for(logits: NDArray[np.float32], perplexity: float) -> float:
    """The temperature that gives a distribution a perplexity (e to the power of its entropy).

    The cost of sampling depends on how many tokens are likely. Random weights give almost uniform
    logits and trained ones do not, so both are brought to the same perplexity.

    Args:
        logits: float32 (vocab_size,), finite.
        perplexity: above the number of tokens that share the maximum, below vocab_size.
    """
    scores = logits.astype(np.float64) - logits.max()
    low, high = -30.0, 30.0  # logarithms of the temperature
    for _ in range(64):
        middle = (low + high) / 2
        log = scores / np.exp(middle)
        weights = np.exp(log)
        total = weights.sum()
        entropy = np.log(total) - (weights * log).sum() / total
        low, high = (middle, high) if entropy < np.log(perplexity) else (low, middle)
    return float(np.exp((low + high) / 2))
