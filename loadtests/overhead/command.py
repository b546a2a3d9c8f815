"""The run of ``python -m loadtests overhead``."""

import argparse
import asyncio
import sys
from pathlib import Path

from rich.console import Console
from uvicorn.loops.auto import auto_loop_factory

from loadtests.errors import LoadTestError
from loadtests.overhead.compare import Row, measure, section_of
from loadtests.reports import load_averages, write_json, write_markdown
from loadtests.server_process import running_server
from maskdial.config import load_config
from maskdial.errors import MaskdialError
from maskdial.metrics import Metrics
from maskdial.models.loading import load_model


def run_overhead(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; see `add_overhead_parser` for the arguments.

    Returns 0; 1 if it could not be made, 130 after Ctrl-C.
    """
    facts = {"load": load_averages(), "threads": args.threads, "seed": args.seed}
    try:
        sections = [section_of([_measure(path, args) for path in args.bundles])]
        sections[0].show(Console())
        if args.output is not None:
            write_json(args.output, sections, facts)
        if args.markdown is not None:
            write_markdown(args.markdown, sections)
    except (LoadTestError, MaskdialError, OSError) as error:
        print(f"loadtests: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loadtests: interrupted, no report", file=sys.stderr)
        return 130
    return 0


def _measure(path: Path, args: argparse.Namespace) -> Row:
    settings = {} if args.threads is None else {"threads": args.threads}
    name = path.resolve().name
    with running_server({name: path}, **settings) as server:
        model = load_model(name, path, load_config(settings), Metrics(()))
        causal = model.bundle.manifest.family == "causal"
        # The server's kind of loop, and no spinner, whose thread would slow the bare engine down.
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            try:
                return runner.run(
                    measure(
                        model,
                        server,
                        num_clients=args.streams if causal else args.clients,
                        num_tokens=args.max_new_tokens,
                        seconds=args.seconds,
                        round_seconds=args.round_seconds,
                        seed=args.seed,
                    )
                )
            finally:
                model.stop()
