"""``python -m loadtests batching``: the masked engine's batches against first-come ones."""

import argparse
import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from loadtests import LoadTestError, count, positive
from loadtests.engines import LoadedMasked, started
from loadtests.measurement import Section, load_averages, machine, median, median_ratio, take_turns
from loadtests.texts import mix, read_lines
from maskdial.config import load_config
from maskdial.masked.request import MaskedInput, MaskedResult
from maskdial.metrics import Metrics

DESCRIPTION = (
    "Run the same texts through a masked bundle in the server's batches, which group texts of "
    "similar length, and in batches in order of arrival, under the same token budget. No HTTP. "
    "MASKDIAL_* variables configure what no flag here does."
)
_QUESTION = "batches of similar length against batches in order of arrival"
_MOST_PADDING = 1.10
_LEAST_GAIN = 1.8
_KINDS = {"like length": False, "first come": True}
_OURS, _BASELINE = _KINDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--bundle", type=Path, required=True, metavar="PATH", help="masked bundle to measure"
    )
    parser.add_argument(
        "--texts", type=Path, required=True, metavar="FILE", help="texts in UTF-8, one per line"
    )
    parser.add_argument(
        "--long-share",
        type=_share,
        default=0.2,
        metavar="X",
        help="share of the lines to join into texts of 200 to 500 words (default: %(default)s)",
    )
    parser.add_argument(
        "--num-texts",
        type=count,
        default=2000,
        metavar="N",
        help="texts per measurement (default: %(default)s)",
    )
    parser.add_argument(
        "--clients",
        type=count,
        default=64,
        metavar="N",
        help="concurrent requests (default: %(default)s)",
    )
    parser.add_argument(
        "--request-texts",
        type=count,
        default=8,
        metavar="N",
        help="texts per request (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=60.0,
        metavar="S",
        help="measuring time; each kind of batch is measured at least once, however long that "
        "takes (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the joined lines (default: %(default)s)"
    )
    parser.add_argument(
        "--max-batch-tokens",
        type=count,
        metavar="N",
        help="padded tokens per pass (default: the server's)",
    )
    parser.add_argument(
        "--threads", type=count, metavar="N", help="threads per pass (default: the server's)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be between 0 and 1")
    return value


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 0."""
    flags = {"threads": args.threads, "max_batch_tokens": args.max_batch_tokens}
    config = load_config({name: flag for name, flag in flags.items() if flag is not None})
    if args.clients * args.request_texts > config.max_queue:
        raise LoadTestError(
            f"{args.clients} requests of {args.request_texts} texts exceed the queue of "
            f"{config.max_queue} texts; raise MASKDIAL_MAX_QUEUE or lower --clients"
        )
    texts = mix(read_lines(args.texts), args.long_share, args.seed)[: args.num_texts]
    report = asyncio.run(_measure(LoadedMasked.load(args.bundle, config), texts, args))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


async def _measure(
    model: LoadedMasked, texts: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Prints the report and returns it as JSON values."""
    console = Console()
    inputs, num_cut = model.inputs(texts)
    lengths = sorted(len(each.input_ids) for each in inputs)
    report = describe(model, lengths, num_cut) | {
        "clients": args.clients,
        "request_texts": args.request_texts,
        "long_share": args.long_share,
        "seed": args.seed,
    }
    console.print(
        f"{report['model']}: {report['architecture']}, {report['precision']}; "
        f"{len(lengths):,} texts of {lengths[0]} to {lengths[-1]} tokens, {num_cut:,} of them "
        f"truncated; {args.clients} clients, {args.request_texts} texts per request; "
        f"passes of at most {report['max_batch_tokens']:,} tokens; {report['machine']}, "
        f"load {report['load']}"
    )
    with Console(stderr=True).status("measuring"):
        section = await measure(
            model,
            inputs,
            args.seconds,
            num_clients=args.clients,
            request_texts=args.request_texts,
        )
    section.show(console)
    return report | {"load_at_end": load_averages(), "batching": section.as_json()}


def describe(model: LoadedMasked, lengths: list[int], num_cut: int) -> dict[str, Any]:
    """What was measured, and where, as JSON values. ``lengths`` are in tokens, ascending."""
    manifest = model.bundle.manifest
    return {
        "model": model.bundle.name,
        "architecture": manifest.architecture,
        "task": manifest.task,
        "precision": manifest.precision,
        "max_length": manifest.max_length,
        "max_batch_tokens": model.max_batch_tokens,
        "threads": model.config.threads,
        "spinning": model.config.spins(alone=True),
        "texts": len(lengths),
        "texts_cut": num_cut,
        "tokens": {
            "sum": sum(lengths),
            "shortest": lengths[0],
            "median": lengths[len(lengths) // 2],
            "longest": lengths[-1],
        },
        "machine": machine(),
        "load": load_averages(),
    }


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of batch; medians over the rounds.

    Attributes:
        batches: how texts are grouped.
        texts_per_s: throughput.
        tokens_per_s: throughput in tokens, without padding.
        passes: passes over the model for all texts.
        padding_ratio: mean of the metric `maskdial_padding_ratio` over the passes.
        padded_to_real: computed tokens per token that is not padding.
        median_wait_ms: time a text waits for its pass, median over the texts.
        longest_wait_ms: the longest of these.
        times_faster: throughput relative to first-come batches in the same round.
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
    """All texts once; times in seconds. ``digest`` hashes their logits in the texts' order."""

    seconds: float
    passes: int
    padding_ratio: float
    padded_to_real: float
    median_wait: float
    longest_wait: float
    digest: str


async def measure(
    model: LoadedMasked,
    inputs: Sequence[MaskedInput],
    seconds: float,
    *,
    num_clients: int,
    request_texts: int,
) -> Section:
    """Compares two engines that differ only in how they batch."""
    requests = [
        inputs[start : start + request_texts] for start in range(0, len(inputs), request_texts)
    ]
    samples = await take_turns(
        {
            name: partial(_run, model, first, requests, num_clients)
            for name, first in _KINDS.items()
        },
        seconds,
    )
    return report(samples, len(inputs), sum(len(each.input_ids) for each in inputs))


async def _run(
    model: LoadedMasked,
    first_come: bool,
    requests: Sequence[Sequence[MaskedInput]],
    num_clients: int,
) -> Sample:
    """Sends all requests to a new engine; each client sends its next when one is answered."""
    metrics = Metrics()
    results: list[list[MaskedResult]] = [[] for _ in requests]
    waiting = iter(range(len(requests)))

    async def send() -> None:
        for index in waiting:
            results[index] = await engine.submit_many(requests[index])

    declared = metrics.declare(model.bundle.name)
    async with started(model.engine(declared, first_come=first_come)) as engine:
        begun = time.perf_counter()
        await asyncio.gather(*(send() for _ in range(num_clients)))
        seconds = time.perf_counter() - begun
    return _sample(seconds, metrics, model, [result for each in results for result in each])


def _sample(
    seconds: float, metrics: Metrics, model: LoadedMasked, results: Sequence[MaskedResult]
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
    # Every text in a pass is padded to the same length.
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
    """Summarizes the rounds. ``num_tokens`` counts the tokens of all texts, without padding."""
    ours, baseline = samples[_OURS], samples[_BASELINE]
    rows = tuple(
        summarize(name, each, baseline, num_texts, num_tokens) for name, each in samples.items()
    )
    padding, gain = rows[0].padding_ratio, rows[0].times_faster
    digests = {sample.digest for each in samples.values() for sample in each}
    findings = (
        f"batches of similar length have a padding ratio of {padding:.3f}; "
        f"target: at most {_MOST_PADDING:.2f}",
        f"their throughput is {gain:.2f} times that of first-come batches; "
        f"target: at least {_LEAST_GAIN:g}",
        "the logits of all texts are bitwise equal in both"
        if len(digests) == 1
        else "the logits of the texts differ between the two",
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
