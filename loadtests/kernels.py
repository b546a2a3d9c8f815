"""``python -m loadtests kernels``: a model's passes with our kernels and with ONNX Runtime's."""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from loadtests import LoadTestError, add_bundles, add_number, count
from loadtests.kernel_threads import measure
from loadtests.measurement import (
    Section,
    add_report_options,
    load_averages,
    machine,
    median,
    median_ratio,
    take_turns,
    write_reports,
)
from maskdial.bundle.bundle import Bundle, load_bundle
from maskdial.bundle.manifest import KVLayout
from maskdial.config import load_config
from maskdial.errors import ConfigError
from maskdial.kernels.installed import find_kernels
from maskdial.runtime.providers.cpu import CpuProvider
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

DESCRIPTION = (
    "Measure passes of bundles on the CPU with the kernels (python -m maskdial.kernels build) "
    "and without them, in turns; or with the kernels and several numbers of threads, whose tasks "
    "and barriers are counted. MASKDIAL_* variables configure what no flag here does: with "
    "MASKDIAL_KV_CACHE_DTYPE=int8, the kernels have a KV cache of int8 instead of int16."
)

_DECODES = ((1, 96), (4, 96), (8, 96), (16, 96), (1, 1000), (4, 1000), (8, 1000))
"""Texts, and the tokens before each one's next."""
_PROMPTS = (512, 1000)
_MAX_LENGTH = 1024
_TEXTS = ((1, 16), (1, 128), (8, 32), (8, 128))
_MIXED = (16, 5, 128)
"""Texts of different lengths: their number, and the shortest and the longest length."""
_SCALED = (
    *("decode, batch 1, context 96", "decode, batch 16, context 96"),
    *("decode, batch 1, context 1000", "prefill, 512 tokens"),
    *("1 x 16 tokens", "1 x 128 tokens", "8 x 128 tokens"),
)
"""What is compared with several numbers of threads."""
_PASSES = 8
"""Decode steps per turn; a prompt or a batch of texts is a turn of its own."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of pass; times in milliseconds, medians over the rounds.

    Attributes:
        work: what the pass computes.
        without_ms: with ONNX Runtime's kernels.
        kernels_ms: with ours.
        ratio: the first over the second, median of the rounds' ratios.
        least, most: the smallest and the largest of these ratios.
        rounds: how many there were.
    """

    work: str
    without_ms: float
    kernels_ms: float
    ratio: float
    least: float
    most: float
    rounds: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_bundles(parser, "bundle to measure, of any precision with kernels")
    add_number(
        parser, "--seconds", 120.0, "S", "measuring time; each bundle is measured at least once"
    )
    parser.add_argument(
        "--threads",
        type=_counts,
        metavar="N,M",
        help="threads per pass; several are compared with each other",
    )
    add_report_options(parser)


def _counts(text: str) -> tuple[int, ...]:
    """Argument type: numbers of 1 or more, separated by commas."""
    return tuple(count(each) for each in text.split(","))


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 0.

    Raises:
        LoadTestError: there are no kernels.
    """
    config = load_config({} if args.threads is None else {"threads": args.threads[0]})
    try:
        kernels = find_kernels("on")
    except ConfigError as error:
        raise LoadTestError(error.message) from error
    assert kernels is not None, "they were asked for"
    options = SessionOptions("cpu", config.threads, config.spins(alone=True))
    console = Console()
    sections = []
    for path in args.bundles:
        bundle = load_bundle(path.resolve().name, path)
        ours = replace(options, kernels=kernels)
        if bundle.manifest.kv is not None:
            ours = replace(ours, kv_cache=config.kv_cache_dtype)
        seconds = args.seconds / len(args.bundles)
        if args.threads is not None and len(args.threads) > 1:
            made = asyncio.run(_compare_threads(bundle, ours, args.threads, seconds))
        else:
            sides = [_Side.load(bundle, each) for each in (options, ours)]
            made = [asyncio.run(_measure(bundle, sides, seconds))]
        for section in made:
            section.show(console)
        sections += made
    facts = {"kernels": kernels.processor, "load": load_averages()}
    console.print(f"{machine()}, {kernels.processor} kernels, load {facts['load']}")
    write_reports(args, sections, facts)
    return 0


@dataclass(frozen=True, slots=True)
class _Side:
    """A session, and the layout of its KV cache if it has one."""

    session: Session
    layout: KVLayout | None

    @classmethod
    def load(cls, bundle: Bundle, options: SessionOptions) -> "_Side":
        session, layout = Session(bundle.graph, options), bundle.manifest.kv
        return cls(session, layout and layout.stored_as(session.kv_cache))

    def passes(self, bundle: Bundle) -> dict[str, Callable[[], object]]:
        if self.layout is None:
            return _texts(bundle, self.session)
        return _causal(bundle, self.session, self.layout)


async def _compare_threads(
    bundle: Bundle, options: SessionOptions, threads: Sequence[int], seconds: float
) -> list[Section]:
    """Measures one bundle with each number of threads; `options` are those of the sessions."""
    assert options.kernels is not None, "the side with kernels"
    passes = {}
    for each in threads:
        side = _Side.load(bundle, replace(options, intra_op_threads=each))
        passes[each] = {work: run for work, run in side.passes(bundle).items() if work in _SCALED}
    return await measure(
        bundle.name, options.kernels.path, passes, seconds, spinning=options.allow_spinning
    )


async def _measure(bundle: Bundle, sides: list[_Side], seconds: float) -> Section:
    """Measures one bundle; the sides are the one without the kernels and the one with them."""
    without, with_kernels = (side.passes(bundle) for side in sides)
    rows = []
    for work, run in without.items():
        repeats = _PASSES if work.startswith("decode") else 1
        turns = {"without": _timed(run, repeats), "kernels": _timed(with_kernels[work], repeats)}
        samples = await take_turns(turns, seconds / len(without))
        rows.append(summarize(work, samples["without"], samples["kernels"]))
    processor = sides[1].session.kernels or "no"
    return Section(
        bundle.name,
        f"passes of {bundle.name} with the kernels and without",
        min(row.rounds for row in rows),
        tuple(rows),
        (f"{processor} kernels; above 1, they are faster",),
    )


def summarize(work: str, without: list[float], kernels: list[float]) -> Row:
    """Summarizes one kind of pass; seconds per pass, one per round."""
    ratios = [a / b for a, b in zip(without, kernels, strict=True)]
    return Row(
        work,
        1000 * median(without),
        1000 * median(kernels),
        median_ratio(without, kernels),
        min(ratios),
        max(ratios),
        len(ratios),
    )


def _timed(run: Callable[[], object], repeats: int) -> Callable[[], Awaitable[float]]:
    async def turn() -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - started) / repeats

    return turn


def _causal(bundle: Bundle, session: Session, layout: KVLayout) -> dict[str, Callable[[], object]]:
    manifest = bundle.manifest
    rng = np.random.default_rng(0)
    max_length = min(manifest.max_length, _MAX_LENGTH)
    runner = Runner(
        session,
        layout,
        slots=max(batch for batch, _ in _DECODES),
        max_length=max_length,
        vocab_size=manifest.vocab_size,
    )

    # Memory that nobody has written is one page of zeros, which would be read faster.
    for start in range(0, max_length, CpuProvider.prefill_chunk_tokens):
        count = min(CpuProvider.prefill_chunk_tokens, max_length - start)
        runner.prefill(0, rng.integers(0, manifest.vocab_size, count), start)
    for slot in range(1, runner.slots):
        runner.cache.copy(0, slot, max_length)

    def decode(batch: int, context: int) -> None:
        token_ids = rng.integers(0, manifest.vocab_size, batch)
        runner.decode(token_ids, np.full(batch, context), np.arange(batch))

    def prefill(num_tokens: int) -> None:
        prompt = rng.integers(0, manifest.vocab_size, num_tokens)
        for start in range(0, num_tokens, CpuProvider.prefill_chunk_tokens):
            runner.prefill(0, prompt[start : start + CpuProvider.prefill_chunk_tokens], start)

    works: dict[str, Callable[[], object]] = {
        f"decode, batch {batch}, context {context}": partial(decode, batch, context)
        for batch, context in _DECODES
        if context < max_length
    }
    return works | {
        f"prefill, {num_tokens} tokens": partial(prefill, num_tokens)
        for num_tokens in _PROMPTS
        if num_tokens <= max_length
    }


def _texts(bundle: Bundle, session: Session) -> dict[str, Callable[[], object]]:
    manifest = bundle.manifest
    rng = np.random.default_rng(0)

    def run(lengths: Sequence[int]) -> None:
        longest = max(lengths)
        shape = len(lengths), longest
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": rng.integers(0, manifest.vocab_size, shape),
            "token_type_ids": np.zeros(shape, np.int64),
            "lengths": np.array(lengths, np.int32),
            "rows": np.arange(len(lengths)) * longest,
        }
        session.run(feeds)

    works = {f"{texts} x {tokens} tokens": [tokens] * texts for texts, tokens in _TEXTS}
    texts, shortest, longest = _MIXED
    drawn = np.random.default_rng(0).integers(shortest, longest + 1, texts)
    works[f"{texts} x {shortest} to {longest} tokens"] = drawn.tolist()
    return {
        work: partial(run, lengths)
        for work, lengths in works.items()
        if max(lengths) <= manifest.max_length
    }
