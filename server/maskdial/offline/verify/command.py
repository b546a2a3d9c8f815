"""The command ``maskdial verify``."""

import argparse
import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Self

from maskdial import logs
from maskdial.batches.batch import Batch
from maskdial.batches.lines import Input, open_input
from maskdial.batches.output import Pipe
from maskdial.errors import ConfigError, io_reason, printable
from maskdial.offline.application import Application
from maskdial.offline.command import config_of, parameters_of, shown_progress
from maskdial.offline.verify.entries import AnswerFile
from maskdial.offline.verify.verdict import Finding, Judge
from maskdial.offline.verify.verifier import Verifier, judged, verdict
from maskdial.receipts.signing import read_public_key


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial verify``."""
    parser.add_argument(
        "log",
        metavar="LOG",
        help='lines of {"url", "body", "response": {"body", "receipt"}}, a receipt where there is '
        "one; or the file of requests of a batch; - reads standard input",
    )
    parser.add_argument(
        "answers", metavar="ANSWERS", nargs="?", type=Path, help="the answers of that batch"
    )
    parser.add_argument(
        "--bundle", type=Path, metavar="DIR", help="the model (default: the starter models)"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="name by which requests call it (default: the folder's)"
    )
    parser.add_argument(
        "--public-key",
        type=Path,
        metavar="FILE",
        help="PEM file of the Ed25519 key that has to have signed every receipt",
    )
    parser.add_argument(
        "--no-run",
        action="store_true",
        help="ask no model: check what receipts say of request and reply, and their signatures",
    )
    parser.add_argument("--task", metavar="NAME", help="as it was given to 'maskdial batch'")
    parser.add_argument("--parameters", metavar="JSON", help="likewise")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file with the settings of the server that made the log; MASKDIAL_* variables "
        "apply, too",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write a line of JSON for each line there"
    )


def run(options: argparse.Namespace) -> int:
    """Checks a log; returns 1 if a reply is not the model's."""
    config = config_of(options)
    logs.configure("warning", config.log_format)
    parameters = parameters_of(options.parameters)
    key = None if options.public_key is None else read_public_key(options.public_key)
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(
            contextlib.closing(open_input(options.log, "jsonl", config.max_body_bytes, None, None))
        )
        answers = None
        if options.answers is not None:
            answers = stack.enter_context(contextlib.closing(AnswerFile(options.answers)))
        verdicts = stack.enter_context(Verdicts.to(options.json))
        if options.no_run:
            asyncio.run(_check_receipts(lines, answers, Judge(None, key), verdicts))
        else:
            progress = stack.enter_context(shown_progress(lines, 0))

            async def check() -> None:
                async with Application.start(config) as application:
                    judge = Judge(application, key)
                    verifier = Verifier(application, options.task, parameters, answers, judge)
                    await Batch(lines, options.log, verifier, verdicts, progress).run()

            asyncio.run(check())
    print(verdicts.summary)
    return 1 if verdicts.journal.num_failed else 0


async def _check_receipts(
    lines: Input, answers: AnswerFile | None, judge: Judge, verdicts: "Verdicts"
) -> None:
    for line in lines:
        if line.fault:
            found = [Finding("line", line.fault)]
        else:
            found = await judged(line, answers, judge)
        answer = verdict(line, found)
        verdicts.write(answer.content, failed=answer.failed)


class Verdicts(Pipe):
    """Prints what is wrong with each line, and counts.

    Args:
        file: gets each verdict as JSON; None for none.
    """

    def __init__(self, file: IO[bytes] | None) -> None:
        super().__init__()
        self._file = file
        self._num_lines = 0
        self._faults: Counter[str] = Counter()

    @classmethod
    @contextlib.contextmanager
    def to(cls, path: Path | None) -> Iterator[Self]:
        """Those of a run, with their file."""
        if path is None:
            yield cls(None)
            return
        try:
            with path.open("wb") as file:
                yield cls(file)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {io_reason(error)}") from error

    def write(self, result: bytes, *, failed: bool) -> None:
        content = json.loads(result)
        self._num_lines += 1
        if self._file is not None:
            self._file.write(result)
        if not failed:
            return
        self.journal = replace(self.journal, num_failed=self.journal.num_failed + 1)
        place = content.get("custom_id", content.get("id"))
        name = f"line {content['line']}" + ("" if place is None else f" ({place})")
        for each in content["faults"]:
            self._faults[each["fault"]] += 1
            print(printable(f"{name}: {each['fault']}: {each['why']}"))

    @property
    def summary(self) -> str:
        """How many lines there were, and how many had which fault."""
        faulty = self.journal.num_failed
        told = ", ".join(f"{number:,} {name}" for name, number in self._faults.most_common())
        return f"{self._num_lines:,} lines, {faulty:,} at fault" + (f": {told}" if told else "")
