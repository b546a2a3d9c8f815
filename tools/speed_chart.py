"""Draws docs/speed.svg, the README's chart, from the table of speeds in docs/performance.md.

    python -m tools.speed_chart

The table has a row for each runtime: bits, loss, and processor time in milliseconds of a prompt
and of steps. The chart shows, for the rows of eight bits, how many tokens each computes in the time
that maskdial takes for one. Colors follow the reader's scheme.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "speed.svg"

_HEAD = "| | bits | KL | prompt of 512 tokens | step at batch 1 | batch 4 | batch 16 |"
_OURS = "maskdial int8"
_COLUMNS = {"Prompt of 512 tokens": 3, "One text": 4, "16 texts at once": 6}
_WIDTH, _LEFT, _BAR, _ROW, _GAP = 640, 140, 430, 22, 30  # pixels
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1d1b18 }
.head { font-weight: 600 } .ours { fill: #b4441c } .theirs { fill: #b9b2a6 } .note { fill: #68635a }
@media (prefers-color-scheme: dark) {
  text { fill: #ece8e0 } .ours { fill: #ff8f5c } .theirs { fill: #5c5850 } .note { fill: #a19b90 }
}
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A runtime and its processor times in milliseconds, by column of the table."""

    name: str
    bits: str
    times: dict[str, float]


def rows(page: str) -> list[Row]:
    """Ours in eight bits and those that it is compared with.

    Raises:
        ValueError: the page has no such table.
    """
    _, found, table = page.partition(_HEAD)
    if not found:
        raise ValueError(f"{SOURCE.name} has no table with the columns {_HEAD}")
    result: list[Row] = []
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        name = cells[0].strip("*")
        # A block begins with a row of ours.
        if len(cells) < len(_HEAD.split("|")) - 2 or name.startswith("maskdial") != (not result):
            break
        times = {title: _number(cells[column]) for title, column in _COLUMNS.items()}
        result.append(Row(name, cells[1], times))
    return result


def draw(found: list[Row]) -> str:
    """The chart as SVG: a group for each column, in it a bar for each row."""
    ours = found[0]
    parts: list[str] = []
    top = 26
    for title in _COLUMNS:
        parts.append(f'<text class="head" x="0" y="{top}">{title}</text>')
        for row in found:
            top += _ROW
            share = ours.times[title] / row.times[title]
            kind = "ours" if row is ours else "theirs"
            name = escape(row.name.partition(",")[0])
            parts.append(f'<text x="{_LEFT - 8}" y="{top}" text-anchor="end">{name}</text>')
            parts.append(
                f'<rect class="{kind}" x="{_LEFT}" y="{top - 12}" width="{_BAR * share:.0f}" '
                'height="15" rx="2"/>'
            )
            parts.append(f'<text x="{_LEFT + _BAR * share + 8:.0f}" y="{top}">{share:.2f}</text>')
        top += _GAP
    bits = sorted({row.bits.partition(" ")[0] for row in found})
    for note in (
        "Tokens in the same processor time, maskdial's as 1. SmolLM2-135M-Instruct, one thread",
        f"of a Xeon with AVX-512 VNNI, {bits[0]} to {bits[-1]} bits a weight.",
    ):
        parts.append(f'<text class="note" x="0" y="{top}">{note}</text>')
        top += 18
    size = f'width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}"'
    label = "Speed of maskdial beside other runtimes"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label}">'
        f"<style>{_STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def chart() -> str:
    """The chart of the table as it is."""
    return draw(rows(SOURCE.read_text()))


def _number(cell: str) -> float:
    """The first number of a cell such as ``2,572 (3.59)``."""
    match = re.match(r"[\d,.]+", cell)
    if match is None:
        raise ValueError(f"{cell!r} has no time")
    return float(match.group().replace(",", ""))


if __name__ == "__main__":
    CHART.write_text(chart())
