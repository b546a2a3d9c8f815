"""The child process: makes what one entrant needs, or does the work it is told through a pipe.

Started as ``python -m loadtests.compare.worker MODULE SETUP prepare|serve``. It reads and writes
one JSON object a line; whatever libraries print goes to standard error.
"""

import importlib
import json
import os
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from loadtests.compare.setup import Setup
from loadtests.compare.work import Work

_HOME = "loadtests.compare.runners"


def main(module_name: str, setup_json: str, mode: str) -> None:
    """Prepares and ends, or serves until its input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        setup = Setup(**json.loads(setup_json))
        name = module_name if "." in module_name else f"{_HOME}.{module_name}"
        module = importlib.import_module(name)
        if mode == "prepare":
            module.prepare(setup)
            _say(replies, {"ready": True})
        else:
            _serve(module, setup, sys.stdin, replies)
    except Exception as error:
        _say(replies, {"error": _sentence(error)})
        raise


def _serve(module: Any, setup: Setup, requests: Iterable[str], replies: TextIO) -> None:
    runner = module.open_runner(setup)
    try:
        _say(replies, {"ready": True})
        for line in requests:
            work = Work(**json.loads(line))
            _say(replies, {"seconds": runner.run(work)})
    finally:
        runner.close()


def _say(replies: TextIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


if __name__ == "__main__":
    main(*sys.argv[1:])
