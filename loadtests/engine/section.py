"""Section: what one question's measurement gave, as a table and as JSON."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Section:
    """Rows of one dataclass, whose field names say the unit and are the columns.

    ``findings`` answer the question in a sentence each; ``notes`` say what limits the answer.
    """

    name: str
    question: str
    rounds: int
    rows: tuple["DataclassInstance", ...]
    findings: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "question": self.question,
            "rounds": self.rounds,
            "rows": [asdict(row) for row in self.rows],
            "findings": list(self.findings),
            "notes": list(self.notes),
        }

    def as_markdown(self) -> str:
        """A heading, the table and the sentences."""
        names = [field.name.replace("_", " ") for field in fields(self.rows[0])]
        lines = [f"### {self.name}", "", f"{self.question[0].upper()}{self.question[1:]}.", ""]
        lines += [_markdown_row(names), _markdown_row("---" for _ in names)]
        lines += [_markdown_row(_text(v) for v in asdict(row).values()) for row in self.rows]
        lines += ["", *(f"- {line}" for line in (*self.findings, *self.notes)), ""]
        return "\n".join(lines)

    def show(self, console: Console) -> None:
        """Prints the table, then the sentences."""
        rounds = f"{self.rounds} round" + ("s" if self.rounds > 1 else "")
        console.print(f"[bold]{self.name}[/bold]: {escape(self.question)} ({rounds})")
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for field in fields(self.rows[0]):
            justify = "left" if field.type in (str, "str") else "right"
            # A word a line, so that many columns fit.
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
