"""The same texts in the server's batches, and in batches in the order of arrival."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from loadtests.batching.first_come import FirstComeEngine
from loadtests.batching.model import Model
from loadtests.engine.section import Section
from loadtests.engine.turns import median, median_ratio, take_turns
from maskdial.masked.engine import MaskedEngine
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.metrics import Metrics

_QUESTION = "the same texts in batches of like length and in the order of arrival"
_MOST_PADDING = 1.10
_LEAST_GAIN = 1.8
_STOP_SECONDS = 10.0
_KINDS: dict[str, type[MaskedEngine]] = {
    "like length": MaskedEngine,
    "first come": FirstComeEngine,
}
_OURS, _BASELINE = _KINDS


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of batch; medians over the rounds.

    Attributes:
        batches: by what the texts of a batch are chosen.
        texts_per_s: throughput.
        tokens_per_s: throughput in tokens of the texts, padding not counted.
        passes: how many passes all texts took.
        padding_ratio: the metric `maskdial_padding_ratio`, its mean over the passes.
        padded_to_real: all tokens computed, over those that are no padding.
        median_wait_ms: a text's wait for its pass, median over the texts.
        longest_wait_ms: the longest one.
        times_faster: throughput, over the first-come batches' in the same round.
    """

    batches: str
    texts_per_s: float
    tokens_per_s: float
    passes: float
    padding_ratio: float
    padded_to_real: float
    median_wait_ms: float
    longest_wait_ms: float
    times_faster: float


@dataclass(frozen=True, slots=True)
class Sample:
    """All texts once; times in seconds. ``digest`` is of their logits, in the texts' order."""

    seconds: float
    passes: int
    padding_ratio: float
    padded_to_real: float
    median_wait: float
    longest_wait: float
    digest: str


async def measure(
    model: Model,
    inputs: Sequence[MaskedInput],
    seconds: float,
    *,
    num_clients: int,
    request_texts: int,
) -> Section:
    """Compares two engines that differ in their batches only."""
    requests = [
        inputs[start : start + request_texts] for start in range(0, len(inputs), request_texts)
    ]
    samples = await take_turns(
        {name: partial(_run, model, kind, requests, num_clients) for name, kind in _KINDS.items()},
        seconds,
    )
    return report(samples, len(inputs), sum(len(each.input_ids) for each in inputs))


async def _run(
    model: Model,
    kind: type[MaskedEngine],
    requests: Sequence[Sequence[MaskedInput]],
    num_clients: int,
) -> Sample:
    """Sends all requests through a new engine, each client its next when one is answered."""
    metrics = Metrics(())
    results: list[list[MaskedResult]] = [[] for _ in requests]
    waiting = iter(range(len(requests)))

    async def send() -> None:
        for index in waiting:
            results[index] = await engine.submit_many(requests[index])

    async with _running(model, kind, metrics) as engine:
        started = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(num_clients)))
        seconds = time.perf_counter() - started
    return _sample(seconds, metrics, model, [result for each in results for result in each])


@asynccontextmanager
async def _running(
    model: Model, kind: type[MaskedEngine], metrics: Metrics
) -> AsyncIterator[MaskedEngine]:
    engine = model.engine(kind, metrics.declare(model.bundle.name))
    async with AsyncExitStack() as stack:
        engine.start()
        stack.push_async_callback(asyncio.to_thread, engine.stop, _STOP_SECONDS)
        await engine.warm_up()
        yield engine


def _sample(
    seconds: float, metrics: Metrics, model: Model, results: Sequence[MaskedResult]
) -> Sample:
    def metric(name: str) -> float:
        value = metrics.registry.get_sample_value(name, {"model": model.bundle.name})
        assert value is not None, name
        return value

    digest = hashlib.sha256()
    for result in results:
        digest.update(result.logits.tobytes())
    waits = [result.queue_seconds for result in results]
    num_passes = metric("maskdial_padding_ratio_count")
    # Each text of a pass has an equal part of its padded tokens.
    padded_tokens = sum(result.batch_tokens / result.batch_size for result in results)
    return Sample(
        seconds=seconds,
        passes=int(num_passes),
        padding_ratio=metric("maskdial_padding_ratio_sum") / num_passes,
        padded_to_real=padded_tokens / metric("maskdial_prompt_tokens_total"),
        median_wait=median(waits),
        longest_wait=max(waits),
        digest=digest.hexdigest(),
    )


def report(samples: dict[str, list[Sample]], num_texts: int, num_tokens: int) -> Section:
    """Adds the rounds up. ``num_tokens`` are those of all texts, without padding."""
    ours, baseline = samples[_OURS], samples[_BASELINE]
    rows = tuple(
        summarize(name, each, baseline, num_texts, num_tokens) for name, each in samples.items()
    )
    padding, gain = rows[0].padding_ratio, rows[0].times_faster
    digests = {sample.digest for each in samples.values() for sample in each}
    findings = (
        f"batches of like length have a padding ratio of {padding:.3f}; "
        f"wanted: at most {_MOST_PADDING:.2f}",
        f"they answer {gain:.2f} times as many texts in the same time as first-come ones; "
        f"wanted: at least {_LEAST_GAIN:g}",
        "the logits of all texts are the same in both, to the last bit"
        if len(digests) == 1
        else "the logits of the texts are not the same bits in both",
    )
    return Section("batching", _QUESTION, len(ours), rows, findings)


def summarize(
    name: str, samples: list[Sample], baseline: list[Sample], num_texts: int, num_tokens: int
) -> Row:
    """One row of the report."""
    seconds = median(sample.seconds for sample in samples)
    return Row(
        batches=name,
        texts_per_s=num_texts / seconds,
        tokens_per_s=num_tokens / seconds,
        passes=median(sample.passes for sample in samples),
        padding_ratio=median(sample.padding_ratio for sample in samples),
        padded_to_real=median(sample.padded_to_real for sample in samples),
        median_wait_ms=1000 * median(sample.median_wait for sample in samples),
        longest_wait_ms=1000 * median(sample.longest_wait for sample in samples),
        times_faster=median_ratio(
            (sample.seconds for sample in baseline), (sample.seconds for sample in samples)
        ),
    )
