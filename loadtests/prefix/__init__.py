"""``python -m loadtests prefix``: what is read again of an agent's conversation.

An agent sends its tools and all that was said before with every request. Here the conversation is
written beforehand, so that all see the same tokens: what an assistant says in it is not what the
model would say, and nobody has it in a cache because it was generated.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console

from loadtests import LoadTestError, add_number, add_sections, add_seed, add_work
from loadtests.measurement import Section, add_report_options, load_averages, machine, write_reports
from loadtests.prefix import peer, shares, soak, streams, turns
from loadtests.prefix.conversation import Conversation, with_template

DESCRIPTION = (
    "Have a server read an agent's conversation cold, from memory, and from disk after a restart; "
    "count what it reads again when thinking is kept and dropped; measure what writing to disk "
    "costs running streams; and soak it with a disk limit that is reached."
)
SECTIONS = ("turns", "shares", "streams", "soak")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "--bundle", type=Path, required=True, metavar="PATH", help="causal bundle to serve"
    )
    add_sections(parser, SECTIONS)
    add_number(parser, "--tools", 4000, "N", "tokens of tools, about")
    add_number(parser, "--turns", 20, "N", "turns of the conversation")
    add_number(parser, "--rounds", 3, "N", "rounds of the sections turns and streams")
    add_number(parser, "--seconds", 20.0, "S", "of streams in a round")
    add_number(parser, "--minutes", 60.0, "M", "of the soak")
    add_number(parser, "--context", 8192, "N", "the server's --max-context")
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="FILE",
        help="the same model for llama.cpp (llama-cpp-python), to compare with",
    )
    add_seed(parser, "the words")
    add_work(parser, "runs/prefix", "where folders of prefixes are made")
    add_report_options(parser)


def main(args: argparse.Namespace) -> int:
    """Measures, prints and writes the report; returns 1 if an answer or a limit was wrong."""
    if not (args.bundle / "maskdial.json").is_file():
        raise LoadTestError(f"{args.bundle} is no bundle")
    console = Console()
    console.print(f"{args.bundle.name}; {machine()}, load {load_averages()}")
    args.work.mkdir(parents=True, exist_ok=True)
    bundles = {
        thinking: with_template(args.bundle, args.work / f"{args.bundle.name}-{thinking}", thinking)
        for thinking in ("kept", "dropped")
    }
    conversation = Conversation.draw(bundles["kept"], args.tools, args.turns, args.seed)
    sections: list[Section] = []
    failed = False

    def add(section: Section) -> None:
        sections.append(section)
        section.show(console)

    for name in args.sections:
        if name == "turns":
            section, agree = turns.measure(args, bundles["kept"], conversation)
            failed |= not agree
            add(section)
            if args.gguf is not None:
                add(peer.turns(args, bundles["kept"], conversation))
        elif name == "shares":
            add(shares.measure(args, bundles, conversation))
        elif name == "streams":
            add(streams.measure(args, bundles["kept"], conversation))
        else:
            section, held = soak.measure(args, bundles["kept"])
            failed |= not held
            add(section)
    settings = {"bundle": args.bundle.name, "tools": args.tools, "turns": args.turns}
    write_reports(args, sections, json.loads(json.dumps(settings)))
    return 1 if failed else 0
