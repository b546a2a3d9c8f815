"""The run of ``python -m loadtests scaling``."""

import argparse
import asyncio
import sys

from rich.console import Console

from loadtests.engine.section import Section
from loadtests.errors import LoadTestError
from loadtests.reports import load_averages, write_json, write_markdown
from loadtests.scaling import load, memory, start
from maskdial.errors import MaskdialError
from maskdial.models.bundle import Bundle, load_bundle


def run_scaling(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; see `add_scaling_parser` for the arguments.

    Returns 0; 1 if it could not be made, 130 after Ctrl-C.
    """
    facts = {"load": load_averages(), "seed": args.seed}
    try:
        bundles = [load_bundle(path.resolve().name, path) for path in args.bundles]
        if len({bundle.name for bundle in bundles}) < len(bundles):
            raise LoadTestError("two bundles have folders of one name, which is what they go by")
        sections = asyncio.run(_measure(bundles, args))
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


async def _measure(bundles: list[Bundle], args: argparse.Namespace) -> list[Section]:
    """Prints each section as soon as it is there."""
    measures = {
        "load": lambda: load.measure(bundles, args.seconds, args.max_new_tokens, args.seed),
        "memory": lambda: memory.measure(bundles, args.prompt_tokens, args.seed),
        "start": lambda: start.measure(bundles, args.starts),
    }
    sections: list[Section] = []
    for name in args.sections:
        sections.append(await measures[name]())
        sections[-1].show(Console())
    return sections
