"""The run of ``python -m loadtests engine``: every section, then the report."""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from rich.console import Console

from loadtests.engine import memory, prefix, speculation, split, stall, together
from loadtests.engine.arguments import seconds_of
from loadtests.engine.model import Model
from loadtests.engine.section import Section
from loadtests.errors import LoadTestError
from maskdial.config import Config, load_config
from maskdial.errors import MaskdialError

_MEASURES: dict[str, Callable[[Model, float, np.random.Generator], Awaitable[Section]]] = {
    "stall": stall.measure,
    "split": split.measure,
    "prefix": prefix.measure,
    "together": together.measure,
    "speculation": speculation.measure,
    "memory": memory.measure,
}


def run_engine(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; see `add_engine_parser` for the arguments.

    Returns 0; 1 if it could not be made, 130 after Ctrl-C.
    """
    flags = {"threads": args.threads, "prefill_chunk_tokens": args.prefill_chunk_tokens}
    try:
        config = load_config({name: flag for name, flag in flags.items() if flag is not None})
        model = Model.load(args.bundle, config)
        report = asyncio.run(_measure(model, args))
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except (LoadTestError, MaskdialError, OSError) as error:
        print(f"loadtests: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loadtests: interrupted, no report", file=sys.stderr)
        return 130
    return 0


async def _measure(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Prints each section as soon as it is there; returns the report as JSON values."""
    console, progress = Console(), Console(stderr=True)
    report = describe(model, model.config)
    console.print(
        f"{report['model']}: {report['architecture']}, {report['precision']}, "
        f"{report['vocab_size']:,} words, context {report['max_length']}; {report['machine']}, "
        f"load {report['load']}"
    )
    started = time.perf_counter()
    sections: dict[str, Any] = {}
    for number, (name, seconds) in enumerate(seconds_of(args.sections, args.seconds).items()):
        with progress.status(f"measuring: {name}"):
            rng = np.random.default_rng((args.seed, number))
            section = await _MEASURES[name](model, seconds, rng)
        section.show(console)
        sections[name] = section.as_json()
    report["elapsed_seconds"] = time.perf_counter() - started
    report["load_at_end"] = _load()
    report["sections"] = sections
    return report


def describe(model: Model, config: Config) -> dict[str, Any]:
    """What was measured, and on what, as JSON values."""
    manifest = model.bundle.manifest
    return {
        "model": model.bundle.name,
        "architecture": manifest.architecture,
        "precision": manifest.precision,
        "vocab_size": manifest.vocab_size,
        "max_length": model.max_length,
        "query_block": model.layout.query_block,
        "prefill_chunk_tokens": model.chunk_tokens,
        "prefix_cache_bytes": config.prefix_cache_bytes,
        "threads": config.threads,
        "spinning": config.spins(alone=True),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}",
        "load": _load(),
    }


def _load() -> list[float]:
    """The machine's load averages over 1, 5 and 15 minutes; empty where it has none."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else []
