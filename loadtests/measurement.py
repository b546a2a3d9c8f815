"""Measurements: variants in turns, statistics over the rounds, and the section of the report.

In turns, other load on the machine affects all variants alike, so medians over the rounds can
be compared.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

K = TypeVar("K")
S = TypeVar("S")


async def take_turns(
    variants: Mapping[K, Callable[[], Awaitable[S]]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, list[S]]:
    """Measures every variant once per round, for as many rounds as fit into the time.

    The first round is a warm-up: it is dropped if at least two more follow. Each round begins with
    another variant, so that none always follows the same one.

    Args:
        variants: what to call for one measurement, by name; at least one.
        seconds: no round begins that would end later, judged by the longest one so far.
        clock: seconds from any origin.

    Returns:
        The measurements of each variant, one per round.
    """
    deadline = clock() + seconds
    names = list(variants)
    rounds: list[dict[K, S]] = []
    longest = 0.0
    while not rounds or clock() + longest <= deadline:
        started = clock()
        first = len(rounds) % len(names)
        samples = {name: await variants[name]() for name in names[first:] + names[:first]}
        rounds.append(samples)
        longest = max(longest, clock() - started)
    counted = rounds[1:] if len(rounds) > 2 else rounds
    return {name: [samples[name] for samples in counted] for name in names}


def median(values: Iterable[float]) -> float:
    """The median; 0 without values."""
    ordered = list(values)
    return statistics.median(ordered) if ordered else 0.0


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """The median of the ratios within each round, where a slow round cancels out."""
    pairs = zip(above, below, strict=True)
    return median(a / b for a, b in pairs if b > 0)


@dataclass(frozen=True, slots=True)
class Section:
    """One question's answer: rows of one dataclass, whose fields are the columns and name the unit.

    ``findings`` answer the question in a sentence each; ``notes`` state the limits of the answer.
    """

    name: str
    question: str
    rounds: int
    rows: tuple["DataclassInstance", ...]
    findings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The section as JSON values."""
        return {
            "question": self.question,
            "rounds": self.rounds,
            "rows": [asdict(row) for row in self.rows],
            "findings": list(self.findings),
            "notes": list(self.notes),
        }

    def as_markdown(self) -> str:
        """A heading, the table, and the findings and notes as a list."""
        names = [field.name.replace("_", " ") for field in fields(self.rows[0])]
        lines = [f"### {self.name}", "", f"{self.question[0].upper()}{self.question[1:]}.", ""]
        lines += [_markdown_row(names), _markdown_row("---" for _ in names)]
        lines += [_markdown_row(_text(v) for v in asdict(row).values()) for row in self.rows]
        lines += ["", *(f"- {line}" for line in (*self.findings, *self.notes)), ""]
        return "\n".join(lines)

    def show(self, console: Console) -> None:
        """Prints the table, then the findings and notes."""
        rounds = f"{self.rounds} round" + ("s" if self.rounds > 1 else "")
        console.print(f"[bold]{self.name}[/bold]: {escape(self.question)} ({rounds})")
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for field in fields(self.rows[0]):
            justify = "left" if field.type in (str, "str") else "right"
            # One word per line, so that many columns fit.
            table.add_column(field.name.replace("_", "\n"), justify=justify)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(escape(_text(value)) for value in asdict(row).values()))
        console.print(table)
        for line in self.findings:
            console.print(f"  {escape(line)}")
        for line in self.notes:
            console.print(f"  note: {escape(line)}")
        console.print()


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine() -> str:
    """The system, its number of cores and the Python version in one line."""
    system = f"{platform.system()} {platform.machine()}"
    return f"{system}, {os.cpu_count()} cores, Python {platform.python_version()}"


def load_averages() -> list[float]:
    """The load averages over 1, 5 and 15 minutes; empty where the system has none."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else []


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `write_reports` reads."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables as Markdown"
    )


def write_reports(
    args: argparse.Namespace, sections: Sequence[Section], facts: dict[str, Any]
) -> None:
    """Writes the files that were asked for."""
    if args.output is not None:
        write_json(args.output, sections, facts)
    if args.markdown is not None:
        _write_markdown(args.markdown, sections)


def write_json(path: Path, sections: Sequence[Section], facts: dict[str, Any]) -> None:
    """Writes the sections with the facts about the run."""
    document = facts | {
        "machine": machine(),
        "load_at_end": load_averages(),
        "sections": {section.name: section.as_json() for section in sections},
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _write_markdown(path: Path, sections: Sequence[Section]) -> None:
    """Writes the sections as Markdown tables."""
    tables = "\n".join(section.as_markdown() for section in sections)
    path.write_text(f"{tables}\n{machine()}, load {load_averages()}\n", encoding="utf-8")
