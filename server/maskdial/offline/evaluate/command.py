"""The command ``maskdial eval``."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from maskdial.bundle.card import Difference, Figure, Measured, add_to_card
from maskdial.errors import ConfigError, io_reason
from maskdial.local.model import AsyncModel
from maskdial.offline.evaluate.answers import Asker, Outcome
from maskdial.offline.evaluate.compare import difference, figure
from maskdial.offline.evaluate.reading import READING, Reader
from maskdial.offline.evaluate.task import EvalTask, read_task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maskdial eval``."""
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE", help="a bundle's folder")
    parser.add_argument(
        "--task",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="a task of lm-evaluation-harness in YAML, over local files",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="ask the first N questions only")
    parser.add_argument(
        "--card",
        action="store_true",
        help="write the figures into each bundle's quality card (card.json), which 'maskdial "
        "inspect' and /models show",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures there")


def run(options: argparse.Namespace) -> int:
    """Asks all models all tasks, prints a table, and returns 0.

    Raises:
        ConfigError: a task or a bundle cannot be used.
    """
    if options.limit is not None and options.limit < 1:
        raise ConfigError("--limit takes a number from 1 on")
    tasks = [read_task(path, options.limit) for path in options.task]
    models = [asyncio.run(_ask(bundle, tasks)) for bundle in options.bundles]
    report = []
    measured: dict[Path, list[Measured]] = {bundle: [] for bundle in options.bundles}
    for task, *answers in zip(tasks, *models, strict=True):
        print(f"{task.name}: {len(task.items):,} questions")
        first = answers[0]
        for bundle, ours in zip(options.bundles, answers, strict=True):
            figures = [figure(metric, ours.outcomes) for metric in task.metrics]
            compared = ours is not first
            apart = [
                difference(metric, ours.outcomes, first.outcomes)
                for metric in task.metrics
                if compared
            ]
            print("\n".join(_lines(bundle, figures, apart)))
            report.append(_entry(task, bundle, figures, apart))
            reference = {"reference": first.sha256, "reference_name": options.bundles[0].name}
            measured[bundle].append(
                Measured(
                    task=task.name,
                    task_sha256=task.sha256,
                    questions=len(task.items),
                    date=datetime.now(UTC).date().isoformat(),
                    numerics=ours.numerics,
                    bundle=ours.sha256,
                    figures=tuple(figures),
                    differences=tuple(apart),
                    **(reference if compared else {}),
                )
            )
    if options.card:
        for bundle, found in measured.items():
            add_to_card(bundle, found)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{options.json} cannot be written: {io_reason(error)}") from error
    return 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a bundle has answered to a task, and which of its models."""

    sha256: str
    numerics: str
    outcomes: list[Outcome]


async def _ask(bundle: Path, tasks: Sequence[EvalTask]) -> list[_Asked]:
    found = []
    async with await AsyncModel.load(bundle) as model:
        for task in tasks:
            asker = Reader(model, task.kind) if task.kind in READING else Asker(model)
            outcomes, served = await asker.outcomes(task), asker.served
            found.append(_Asked(served.bundle.sha256, served.numerics, outcomes))
    return found


def _lines(bundle: Path, figures: Sequence[Figure], apart: Sequence[Difference]) -> list[str]:
    lines = []
    for each in figures:
        error = "" if each.error is None else f" ± {each.error:.4f}"
        lines.append(f"  {bundle.name:24} {each.metric:16} {each.value:.4f}{error}")
    for each_apart in apart:
        line = (
            f"  {'':24} {each_apart.metric:16} {each_apart.value:+.4f} to the first, 95% of "
            f"resamples {each_apart.low:+.4f} to {each_apart.high:+.4f}"
        )
        if each_apart.lost is not None:
            line += (
                f"; {each_apart.lost} lost, {each_apart.won} won (p = {each_apart.probability:.3f})"
            )
        lines.append(line)
    return lines


def _entry(
    task: EvalTask, bundle: Path, figures: Sequence[Figure], apart: Sequence[Difference]
) -> dict[str, Any]:
    return {
        "task": task.name,
        "questions": len(task.items),
        "bundle": str(bundle),
        "figures": [each.model_dump() for each in figures],
        "differences_from_the_first": [each.model_dump() for each in apart],
    }
