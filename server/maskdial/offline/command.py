"""The command ``maskdial batch``."""

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from maskdial import logs
from maskdial.batches.answers import Answers
from maskdial.batches.batch import Batch
from maskdial.batches.lines import Format, Input, format_of, open_input
from maskdial.batches.output import Files, Output, Pipe
from maskdial.bundle.bundle import read_manifests
from maskdial.config import Config, load_config
from maskdial.errors import ConfigError
from maskdial.offline.application import Application, models_setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial batch``."""
    parser.add_argument("input", metavar="IN", help="file of requests; - reads standard input")
    parser.add_argument(
        "output",
        metavar="OUT",
        help="file of results, one JSON object a line, in the order of IN; failures are in "
        "OUT.errors.jsonl, and OUT.journal is what --resume needs; - writes to standard output",
    )
    parser.add_argument(
        "--bundle",
        type=Path,
        metavar="DIR",
        help="the model (default: the starter models)",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="name by which lines call it (default: the folder's)",
    )
    parser.add_argument(
        "--task",
        metavar="NAME",
        help="route of lines that name none, such as embed, classify or generate",
    )
    parser.add_argument(
        "--parameters",
        metavar="JSON",
        help="parameters of lines that have none, an object",
    )
    parser.add_argument(
        "--column", metavar="NAME", help="column of the texts in a CSV or Parquet file"
    )
    parser.add_argument(
        "--id-column", metavar="NAME", help="column whose values the results repeat as id"
    )
    parser.add_argument(
        "--format", choices=get_args(Format), help="of IN (default: by the end of its name)"
    )
    parser.add_argument(
        "--receipts",
        action="store_true",
        help="give the answers to lines with a custom_id receipts, which 'maskdial verify' checks",
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume", action="store_true", help="go on with an OUT that is there, if one is"
    )
    existing.add_argument("--overwrite", action="store_true", help="replace an OUT that is there")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file with settings of 'maskdial serve', such as threads; MASKDIAL_* variables "
        "apply, too",
    )


def run(options: argparse.Namespace) -> int:
    """Answers a file; returns 1 if some of its lines failed."""
    config = config_of(options)
    logs.configure("warning", config.log_format)
    parameters = parameters_of(options.parameters)
    lines, kind = opened_input(options, config)
    with contextlib.closing(lines), opened_output(options, config, kind) as output:
        try:
            with shown_progress(lines, output.journal.number) as progress:
                asyncio.run(_run(options, config, parameters, lines, output, progress))
        except BrokenPipeError:
            # The interpreter flushes standard output again at exit, which must not fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 141
        return status_of(options, output)


def status_of(options: argparse.Namespace, output: Output) -> int:
    """The exit status of a run: 1 if lines failed, which is said."""
    journal = output.journal
    if journal.num_failed:
        where = "" if options.output == "-" else f"; {options.output}.errors.jsonl says why"
        print(
            f"maskdial: {journal.num_failed:,} of {journal.number:,} lines failed{where}",
            file=sys.stderr,
        )
    return 1 if journal.num_failed else 0


def opened_input(options: argparse.Namespace, config: Config) -> tuple[Input, Format]:
    """The lines of a run, and their format."""
    kind = format_of(options.input, options.format)
    if kind != "jsonl" and options.task is None:
        raise ConfigError("say what to do with the texts: set --task, such as --task embed")
    limit = config.max_body_bytes
    if options.task is None and os.path.isfile(options.input):
        _check_envelope(options.input, limit)
    return open_input(options.input, kind, limit, options.column, options.id_column), kind


def _check_envelope(path: str, max_bytes: int) -> None:
    """Refuses a file whose first line does not say what it asks for: no other one will."""
    with contextlib.closing(open_input(path, "jsonl", max_bytes, None, None)) as lines:
        first = next(iter(lines), None)
    if first is not None and not first.fault and "custom_id" not in first.content:
        raise ConfigError(
            'the lines have no "custom_id", "method", "url" and "body": say what to do with them '
            "by --task, such as --task classify"
        )


async def _run(
    options: argparse.Namespace,
    config: Config,
    parameters: Mapping[str, Any] | None,
    lines: Input,
    output: Output,
    progress: Callable[[int, int], None],
) -> None:
    async with Application.start(config) as application:
        answers = Answers(application, options.task, parameters, receipts=options.receipts)
        await Batch(lines, options.input, answers, output, progress).run()


def config_of(options: argparse.Namespace) -> Config:
    """The settings of a run: files, variables, and the bundle of the command line."""
    flags: dict[str, Any] = {}
    if options.bundle is not None:
        flags["model"] = models_setting(options.bundle, options.model)
    elif options.model is not None:
        raise ConfigError("--model names the bundle of --bundle; give that as well")
    return load_config(flags, options.config)


def parameters_of(text: str | None) -> Mapping[str, Any] | None:
    """The value of ``--parameters``."""
    if text is None:
        return None
    try:
        parameters = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--parameters is not JSON: {error}") from error
    if not isinstance(parameters, dict):
        raise ConfigError("--parameters must be a JSON object")
    return parameters


@contextlib.contextmanager
def opened_output(options: argparse.Namespace, config: Config, kind: Format) -> Iterator[Output]:
    """Where the results of a run go."""
    if options.output == "-":
        if options.resume or options.overwrite:
            raise ConfigError("--resume and --overwrite need a file of results, not a pipe")
        yield Pipe()
        return
    path = Path(options.output)
    with contextlib.suppress(OSError):
        if options.input != "-" and os.path.samefile(options.input, path):
            raise ConfigError("IN and OUT are the same file")
    wanted = {
        "task": options.task,
        "parameters": options.parameters,
        "column": options.column,
        "id-column": options.id_column,
        "format": kind,
        "receipts": options.receipts or None,
        "bundle": _fingerprint(config),
    }
    files = Files(path, wanted, resume=options.resume, overwrite=options.overwrite)
    try:
        yield files
    finally:
        files.close()


def _fingerprint(config: Config) -> str:
    """What tells models from others: the hashes of their files."""
    found = [
        (name, [manifest.files for manifest in read_manifests(name, folder)])
        for name, folder in sorted(config.models.items())
    ]
    return hashlib.blake2b(json.dumps(found).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def shown_progress(lines: Input, num_done: int) -> Iterator[Callable[[int, int], None]]:
    """Shows how far it is, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda _, __: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.fields[written]:,} lines"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]:,.0f} lines/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=lines.size, written=num_done, rate=0.0)

        def advance(num_written: int, done: int) -> None:
            state = bar.tasks[0]
            written = state.fields["written"] + num_written
            elapsed = state.elapsed or 0.0
            rate = (written - num_done) / elapsed if elapsed else 0.0
            bar.update(task, completed=done, total=lines.size, written=written, rate=rate)

        yield advance
