"""``python -m loadtests engine``: the causal engine, measured in this process."""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loadtests import add_number, add_sections, add_seed
from loadtests.engine import device, first_token, speculation, split, stall, steps
from loadtests.engines import LoadedCausal
from loadtests.measurement import Section, load_averages, machine
from maskdial.config import load_config

DESCRIPTION = (
    "Measure the text engine of a causal bundle in this process, without HTTP. MASKDIAL_* "
    "variables configure what no flag here does."
)

SHARES = {
    "stall": 0.18,
    "split": 0.20,
    "prefix": 0.07,
    "together": 0.07,
    "speculation": 0.37,
    "steps": 0.11,
}
"""The sections, and the share of the time that each gets if all run."""

_Measure = Callable[[LoadedCausal, float, np.random.Generator], Awaitable[Section]]
_MEASURES: dict[str, _Measure] = {
    "stall": stall.measure,
    "split": split.measure,
    "prefix": first_token.measure_prefix,
    "together": first_token.measure_together,
    "steps": steps.measure,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--bundle", type=Path, required=True, metavar="PATH", help="causal bundle to measure"
    )
    add_sections(parser, tuple(SHARES))
    parser.add_argument(
        "--provider",
        default="cpu",
        metavar="NAME",
        help="webgpu: count instead what passes do on the GPU and around it, a few seconds",
    )
    add_number(
        parser,
        "--seconds",
        300.0,
        "S",
        "measuring time of all sections, each of which has one round at least",
    )
    add_seed(parser, "the prompts")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads per pass (default: the server's)"
    )
    parser.add_argument(
        "--prefill-chunk-tokens",
        type=int,
        metavar="N",
        help="prompt tokens read between two decode steps (default: the server's)",
    )
    parser.add_argument(
        "--draft",
        type=Path,
        metavar="PATH",
        help="bundle of a draft model of the same vocabulary, whose draft tokens are right by "
        "script (section speculation)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")


def seconds_of(sections: tuple[str, ...], seconds: float) -> dict[str, float]:
    """Divides the seconds among the sections."""
    whole = sum(SHARES[name] for name in sections)
    return {name: seconds * SHARES[name] / whole for name in sections}


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 0."""
    flags = {"threads": args.threads, "prefill_chunk_tokens": args.prefill_chunk_tokens}
    config = load_config({name: flag for name, flag in flags.items() if flag is not None})
    if args.provider == "cpu":
        draft = None if args.draft is None else LoadedCausal.load(args.draft, config)
        report = asyncio.run(_measure(LoadedCausal.load(args.bundle, config), draft, args))
    else:
        section = device.measure(args.bundle, args.provider, np.random.default_rng(args.seed))
        section.show(Console())
        report = {"machine": machine(), "sections": {section.name: section.as_json()}}
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


async def _measure(
    model: LoadedCausal, draft: LoadedCausal | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Prints each section as soon as it is measured; returns the report as JSON values."""
    console, progress = Console(), Console(stderr=True)
    report = describe(model)
    console.print(
        f"{report['model']}: {report['architecture']}, {report['precision']}, "
        f"vocabulary {report['vocab_size']:,}, context {report['max_length']}; "
        f"{report['machine']}, load {report['load']}"
    )
    measures = _MEASURES | {"speculation": partial(speculation.measure, draft=draft)}
    started = time.perf_counter()
    sections: dict[str, Any] = {}
    for number, (name, seconds) in enumerate(seconds_of(args.sections, args.seconds).items()):
        with progress.status(f"measuring: {name}"):
            rng = np.random.default_rng((args.seed, number))
            section = await measures[name](model, seconds, rng)
        section.show(console)
        sections[name] = section.as_json()
    report["elapsed_seconds"] = time.perf_counter() - started
    report["load_at_end"] = load_averages()
    report["sections"] = sections
    return report


def describe(model: LoadedCausal) -> dict[str, Any]:
    """What was measured, and where, as JSON values."""
    manifest = model.bundle.manifest
    return {
        "model": model.bundle.name,
        "architecture": manifest.architecture,
        "precision": manifest.precision,
        "vocab_size": manifest.vocab_size,
        "max_length": model.max_length,
        "query_block": model.layout.query_block,
        "packs": model.packs,
        "prefill_chunk_tokens": model.chunk_tokens,
        "prefix_cache_bytes": model.prefix_cache_bytes,
        "threads": model.config.threads,
        "spinning": model.config.spins(alone=True),
        "machine": machine(),
        "load": load_averages(),
    }
