"""The run of ``python -m loadtests batching``."""

import argparse
import asyncio
import json
import os
import platform
import sys
from typing import Any

from rich.console import Console

from loadtests.batching.compare import measure
from loadtests.batching.mix import mix, read_lines
from loadtests.batching.model import Model
from loadtests.errors import LoadTestError
from maskdial.config import load_config
from maskdial.errors import MaskdialError


def run_batching(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; see `add_batching_parser` for the arguments.

    Returns 0; 1 if it could not be made, 130 after Ctrl-C.
    """
    flags = {"threads": args.threads, "max_batch_tokens": args.max_batch_tokens}
    try:
        config = load_config({name: flag for name, flag in flags.items() if flag is not None})
        open_texts = args.clients * args.request_texts
        if open_texts > config.max_queue:
            raise LoadTestError(
                f"{args.clients} requests of {args.request_texts} texts do not fit into a queue of "
                f"{config.max_queue} (MASKDIAL_MAX_QUEUE)"
            )
        texts = mix(read_lines(args.texts), args.long_share, args.seed)[: args.num_texts]
        report = asyncio.run(_measure(Model.load(args.bundle, config), texts, args))
        if args.output is not None:
            args.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except (LoadTestError, MaskdialError, OSError) as error:
        print(f"loadtests: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loadtests: interrupted, no report", file=sys.stderr)
        return 130
    return 0


async def _measure(model: Model, texts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Prints the report; returns it as JSON values."""
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
        f"{len(lengths):,} texts of {lengths[0]} to {lengths[-1]} tokens, {num_cut:,} of them cut "
        f"to the model's length; {args.clients} clients with {args.request_texts} texts a request; "
        f"passes of {report['max_batch_tokens']:,} tokens; {report['machine']}, "
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
    return report | {"load_at_end": _load(), "batching": section.as_json()}


def describe(model: Model, lengths: list[int], num_cut: int) -> dict[str, Any]:
    """What was measured, and on what, as JSON values. ``lengths`` are in tokens, ascending."""
    manifest = model.bundle.manifest
    return {
        "model": model.bundle.name,
        "architecture": manifest.architecture,
        "task": manifest.task,
        "precision": manifest.precision,
        "max_length": manifest.max_length,
        "max_batch_tokens": model.config.max_batch_tokens,
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
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}",
        "load": _load(),
    }


def _load() -> list[float]:
    """The machine's load averages over 1, 5 and 15 minutes; empty where it has none."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else []
