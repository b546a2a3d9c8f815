"""The command line: ``python -m loadtests COMMAND``."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from loadtests import LoadTestError, UsageError
from maskdial.errors import MaskdialError
from maskdial_client.errors import MaskdialClientError

_COMMANDS = {
    "run": "load a running server and report latencies",
    "engine": "measure the text engine of a causal bundle in this process",
    "scaling": "measure how a server's costs grow with load, memory settings and model size",
    "kernels": "compare passes with our kernels and with ONNX Runtime's",
    "decisions": "compare questions about a text with transformers' pipeline",
    "encoders": "compare vectors and classes of texts with transformers in torch",
    "answers": "measure requests whose answers are kept",
    "policies": "measure streams that a policy reads",
    "adapters": "compare decode steps of texts with adapters and without",
    "faults": "break, kill, flood and soak a server, and look for what is lost or kept",
    "fairness": "measure polite clients beside one that sends as much as it can",
    "prefix": "measure what is read again of conversations, from memory and from disk",
    "compare": "compare our speed with other runtimes'",
}


class _Command(Protocol):
    """What the module of a command has; it is imported only to run or describe that command."""

    DESCRIPTION: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def main(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Returns 0; 1 if it failed, or if requests failed or texts disagree; 130 after Ctrl-C. Wrong
    arguments exit with 2.
    """
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m loadtests",
        description="Load tests and benchmarks.",
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen: _Command | None = None
    for name, summary in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name in argv[:1]:
            chosen = cast(_Command, importlib.import_module(f"loadtests.{name}"))
            subparser.description = chosen.DESCRIPTION
            chosen.add_arguments(subparser)
    args = parser.parse_args(argv)
    assert chosen is not None, "the parser accepts no arguments without a command"
    try:
        return chosen.main(args)
    except UsageError as error:
        parser.error(str(error))
    except (LoadTestError, MaskdialError, MaskdialClientError, OSError) as error:
        print(f"loadtests: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loadtests: interrupted, no report", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
