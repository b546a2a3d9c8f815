"""The Markdown report: a table for each shape, and what was wanted."""

from collections.abc import Iterable, Mapping, Sequence

from loadtests.compare.entrants import ENGINE, MEMORY, Entrant
from loadtests.compare.results import Case, Result, Spread, findings, ratio_text
from loadtests.compare.work import Work

_COLD = "Work that was measured in its first round alone was measured cold: do not quote it."
_MET = {True: "yes", False: "no", None: ""}


def shape_table(
    heading: str,
    case: Case,
    results: Sequence[Result],
    entrants: Iterable[Entrant],
    shares: Mapping[Work, Spread],
) -> str:
    """One shape as Markdown.

    Each cell has the median, and how many times as long as our engine's the work took.
    """
    present = {result.entrant for result in results}
    columns = [each for each in entrants if each.name in present and each.name != MEMORY]
    cells = {(result.work, result.entrant): _cell(result) for result in results}
    work = dict.fromkeys(result.work for result in results if result.work.kind != "read")
    rounds = sorted({result.rounds for result in results})
    lines = [
        f"## {heading}",
        "",
        f"Medians of {_count(rounds[0], rounds[-1])}; in "
        "brackets how many times as long as our engine it took in the same round: median, least to "
        "most.",
        "",
        *([_COLD, ""] * any(result.cold for result in results)),
        _row(("", *(each.name for each in columns))),
        _row(["---"] * (1 + len(columns))),
        *(_row((w.name, *(cells.get((w, each.name), "") for each in columns))) for w in work),
        "",
        *(f"- {each.name}: {each.about}." for each in columns),
        "",
    ]
    wanted = findings(case, results, shares)
    if wanted:
        lines += [_row(("wanted", "measured", "target", "met")), _row(["---"] * 4)]
        lines += [_row((*row, _MET[met])) for *row, met in wanted]
        lines.append("")
    return "\n".join(lines)


def _count(least: int, most: int) -> str:
    number = str(most) if least == most else f"{least} to {most}"
    return f"{number} round{'' if most == 1 else 's'}"


def _cell(result: Result) -> str:
    value = f"{_number(result.value.median)} {result.work.unit}"
    if result.entrant == ENGINE:
        return f"{value} ({_number(result.value.low)} to {_number(result.value.high)})"
    return value if result.faster is None else f"{value}, {ratio_text(result.faster)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
