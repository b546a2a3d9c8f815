"""The plot: throughput of generation against the number of streams."""

from collections.abc import Iterable
from pathlib import Path

from loadtests.compare.results import Result
from loadtests.compare.work import SHORT_CONTEXT


def curves(results: Iterable[Result]) -> dict[str, list[tuple[int, float]]]:
    """Streams and tokens per second, by entrant; of those with more than one point."""
    points: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        work = result.work
        if work.kind == "decode" and work.length == SHORT_CONTEXT:
            speed = work.tokens_per_second(result.value.median)
            points.setdefault(result.entrant, []).append((work.batch, speed))
    return {name: sorted(each) for name, each in points.items() if len(each) > 1}


def draw(results: Iterable[Result], path: Path, title: str) -> None:
    """Writes a PNG. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, points in curves(results).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks := [batch for batch, _ in max(curves(results).values(), key=len)], ticks)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("streams at once")
    axes.set_ylabel("tokens per second, all streams together")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
