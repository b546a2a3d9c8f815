"""``maskdial ray batch``: a file of requests, answered by actors on a Ray cluster.

The lines are read, and their results written, by the command itself, as ``maskdial batch`` does:
the same files with the same columns and the same journal. In between, they pass through Ray Data,
some at a time, to a pool of actors that each hold the models.
"""

import argparse
import contextlib
import itertools
import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import ray.data
from numpy.typing import NDArray
from ray.exceptions import RayError

from maskdial import logs
from maskdial.batches.answers import DUPLICATE, Answers
from maskdial.batches.batch import Batch, skip_done
from maskdial.batches.lines import CustomIds, Input, Line, Position
from maskdial.batches.output import Journal
from maskdial.config import Config
from maskdial.errors import ConfigError
from maskdial.local.loop import LoopThread
from maskdial.offline import command
from maskdial.offline.application import Application
from maskdial.ray.application import may_use_gpu, num_threads

_CHUNK = 1024
"""Lines that an actor gets at a time, and that one checkpoint of the journal covers."""

_WINDOW = 256
"""Chunks that are in the cluster at a time; then the actors start anew."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial ray batch``."""
    command.add_arguments(parser)
    group = parser.add_argument_group(
        "actors", "Each reserves --threads processors (1 if auto), and a GPU with --provider cuda."
    )
    group.add_argument(
        "--actors", type=int, default=2, metavar="N", help="how many (default: %(default)s)"
    )
    group.add_argument(
        "--address",
        default="auto",
        help="of the cluster; local: one of this machine, for this run (default: the cluster that "
        "runs on this machine)",
    )


def run(options: argparse.Namespace) -> int:
    """Answers a file; returns 1 if some of its lines failed."""
    if options.actors < 1:
        raise ConfigError("--actors must be at least 1")
    config = command.config_of(options)
    config = config.model_copy(
        update={
            "threads": num_threads(config),
            "models": {name: path.resolve() for name, path in config.models.items()},
        }
    )
    logs.configure("warning", config.log_format)
    parameters = command.parameters_of(options.parameters)
    lines, kind = command.opened_input(options, config)
    with (
        contextlib.closing(lines),
        command.opened_output(options, config, kind) as output,
        _cluster(options.address),
        command.shown_progress(lines, output.journal.number) as progress,
    ):
        ids = CustomIds()
        source = iter(lines)
        last = skip_done(source, output.journal, options.input, lambda line: _note(line, ids))
        for chunk, answers in _answered(source, ids, options, config, parameters):
            for content, failed in answers:
                output.write(content, failed=failed)
            last = chunk[-1].end
            output.checkpoint(last.number, last.fingerprint)
            progress(len(answers), last.done)
        number, fingerprint = (0, "") if last is None else (last.number, last.fingerprint)
        output.checkpoint(number, fingerprint, complete=True)
        return command.status_of(options, output)


class Answerer:
    """An actor: the models, and what answers chunks of lines."""

    def __init__(
        self,
        config: Config,
        task: str | None,
        parameters: Mapping[str, Any] | None,
        receipts: bool,
    ) -> None:
        self._task = task
        self._receipts = receipts
        self._parameters = parameters
        self._loop = LoopThread()
        self._running = Application.start(config)
        self._application = self._loop.run(self._running.__aenter__())

    def __call__(self, rows: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Answers the ``lines`` of each row."""
        answers = np.empty(len(rows["lines"]), object)
        for index, lines in enumerate(rows["lines"]):
            answers[index] = pickle.dumps(self._loop.run(self._answer(pickle.loads(lines))))
        return {"answers": answers}

    async def _answer(self, lines: list[tuple[int, dict[str, Any], str, int]]) -> Any:
        answers = Answers(self._application, self._task, self._parameters, receipts=self._receipts)
        results = _Results()
        await Batch(_Chunk(lines), "the chunk", answers, results, lambda *_: None).run()
        return results.found


class _Chunk(Input):
    """Lines that another process has read."""

    def __init__(self, lines: list[tuple[int, dict[str, Any], str, int]]) -> None:
        super().__init__()
        self._lines = lines

    def __iter__(self) -> Iterator[Line]:
        for number, content, fault, size in self._lines:
            yield Line(number, content, fault, Position(number, self._digest, 0), size)

    def close(self) -> None:
        pass


class _Results:
    """What an actor has answered, in order; whether it counts is known to the command only."""

    is_due = False

    def __init__(self) -> None:
        self.journal = Journal({})
        self.found: list[tuple[bytes, bool]] = []

    def write(self, result: bytes, *, failed: bool) -> None:
        self.found.append((result, failed))

    def checkpoint(self, number: int, fingerprint: str, *, complete: bool = False) -> None:
        pass


def _answered(
    source: Iterator[Line],
    ids: CustomIds,
    options: argparse.Namespace,
    config: Config,
    parameters: Mapping[str, Any] | None,
) -> Iterator[tuple[Sequence[Line], Sequence[tuple[bytes, bool]]]]:
    """The chunks of lines, in order, each with its answers.

    Raises:
        ConfigError: an actor cannot answer.
    """
    chunks = iter(lambda: list(itertools.islice(source, _CHUNK)), [])
    while window := list(itertools.islice(chunks, _WINDOW)):
        items = [
            {"lines": pickle.dumps([_packed(line, ids) for line in chunk])} for chunk in window
        ]
        rows = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
            Answerer,
            fn_constructor_args=(config, options.task, parameters, options.receipts),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(options.actors, len(items))),
            num_cpus=num_threads(config),
            num_gpus=int(may_use_gpu(config)),
        )
        try:
            for chunk, row in zip(window, rows.iter_rows(), strict=True):
                yield chunk, pickle.loads(row["answers"])
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise ConfigError(f"an actor cannot answer: {reason}; go on with --resume") from error


def _packed(line: Line, ids: CustomIds) -> tuple[int, dict[str, Any], str, int]:
    return line.number, line.content, _note(line, ids), line.size


def _note(line: Line, ids: CustomIds) -> str:
    """Why a line cannot be answered, as far as that is known without the models."""
    custom_id = line.content.get("custom_id")
    if not line.fault and isinstance(custom_id, str) and not ids.add(custom_id):
        return DUPLICATE
    return line.fault


@contextlib.contextmanager
def _cluster(address: str) -> Iterator[None]:
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        raise ConfigError(
            f"no Ray cluster answers at {address}; `ray start --head` starts one, and --address "
            "local one for this run"
        ) from error
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()
