"""`loadtests.scaling`: the statistics, and a whole run."""

import argparse
import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from loadtests import names_of
from loadtests.__main__ import main
from loadtests.closed_loop import Work
from loadtests.open_loop import Failure, Run, Sample
from loadtests.report import make_report
from loadtests.scaling import SECTIONS, Start
from loadtests.scaling import summarize as summarize_starts
from loadtests.scaling.load import Sender, summarize
from loadtests.server import running_server
from loadtests.texts import Job, Kind
from maskdial.bundle.bundle import load_bundle
from maskdial.registry.catalog import STARTER_FOLDER


def rows_of(report: dict[str, Any], section: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = report["sections"][section]["rows"]
    return rows


def test_sections_keep_the_order_of_the_report() -> None:
    parse_sections = names_of(SECTIONS)
    assert parse_sections("start, load") == ("load", "start")
    with pytest.raises(argparse.ArgumentTypeError, match="'stall' is not one of load, memory"):
        parse_sections("stall")


def test_a_rate_as_a_row() -> None:
    failure = Failure("LoadTestError", None, "gone")
    samples = (
        Sample(Kind.GENERATE, 0.0, 0.5, 2.0, (1.0, 2.0), None),
        Sample(Kind.GENERATE, 1.0, 1.0, 1.5, (), failure),
    )
    row = summarize("m", 0.5, make_report(2.0, Run(samples, 2)), 0.25, 5_000_000)
    assert (row.requests, row.failed, row.most_open) == (2, 1, 2)
    assert (row.offered, row.achieved) == (1.0, 0.5)
    assert (row.p50_ms, row.p99_ms, row.first_token_p99_ms) == (2000, 2000, 1000)
    assert row.tokens_per_second == 1.0
    assert (row.cpu_ms, row.resident_mb) == (125, 5)
    assert row.delay_p99_ms == pytest.approx(495)


def test_a_rate_at_which_everything_failed() -> None:
    sample = Sample(Kind.CLASSIFY, 0.0, None, 1.0, (), Failure("unfinished", None, "late"))
    row = summarize("m", 1.0, make_report(2.0, Run((sample,), 1)), 0.0, 0)
    assert (row.p50_ms, row.p99_ms, row.first_token_p99_ms, row.delay_p99_ms) == (None,) * 4


def test_the_first_start_is_dropped_where_there_are_more() -> None:
    bundle = load_bundle("m", STARTER_FOLDER / "hybrid")
    starts = [Start(9, 99, 9), Start(1, 2, 0.5), Start(2, 5, 1.5)]
    row = summarize_starts(bundle, starts)
    assert (row.starts, row.listening_s, row.loading_s, row.ready_s, row.cpu_s) == (
        2,
        1.5,
        2,
        3.5,
        1.0,
    )
    files = [path for path in bundle.path.iterdir() if path.name in bundle.manifest.files]
    assert row.size_mb == pytest.approx(sum(path.stat().st_size for path in files) / 1e6)
    assert summarize_starts(bundle, starts[:2]).starts == 2


def test_a_sender_keeps_connections_and_reports_tokens() -> None:
    async def send() -> tuple[list[int], int]:
        with running_server({"story": STARTER_FOLDER / "hybrid"}, threads=1) as server:
            sender = Sender(Work(3), server.port)
            tokens: list[int] = []
            for number in range(2):
                job = Job(Kind.GENERATE, "Once there was", 0)
                await sender(job, partial(tokens.append, number))
            idle = len(sender._idle)
            sender.close()
            return tokens, idle

    assert asyncio.run(send()) == ([0, 0, 0, 1, 1, 1], 1)


@pytest.mark.zoo
def test_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("loadtests.scaling.load.SHARES", (0.5, 1.0))
    monkeypatch.setattr("loadtests.scaling.memory._RETURN_SECONDS", 0.1)
    output, markdown = tmp_path / "report.json", tmp_path / "report.md"
    arguments = ["--bundle", str(STARTER_FOLDER / "hybrid"), "--seconds", "1", "--starts", "1"]
    arguments += ["--max-new-tokens", "4", "--output", str(output), "--markdown", str(markdown)]
    assert main(["scaling", *arguments]) == 0
    report = json.loads(output.read_text())
    assert list(report["sections"]) == ["load", "memory", "start"]
    for row in rows_of(report, "load"):
        assert row["failed"] == 0
        assert row["p99_ms"] >= row["p50_ms"] >= 0
        assert row["cpu_ms"] > 0
    memory = rows_of(report, "memory")
    assert [row["streams"] for row in memory] == [1, 1, 1, 8]
    assert memory[3]["used_mb"] == pytest.approx(8 * memory[2]["used_mb"])
    assert all(row["ready_mb"] > 0 for row in memory)
    (start,) = rows_of(report, "start")
    assert start["ready_s"] > start["listening_s"] > 0
    printed, written = capsys.readouterr().out, markdown.read_text()
    assert all(f"{name}: " in printed and f"### {name}" in written for name in report["sections"])


def test_memory_needs_a_causal_model(capsys: pytest.CaptureFixture[str]) -> None:
    bundle = str(STARTER_FOLDER / "sentiment")
    assert main(["scaling", "--bundle", bundle, "--sections", "memory"]) == 1
    assert "needs a causal bundle" in capsys.readouterr().err
    assert main(["scaling", "--bundle", bundle, "--bundle", bundle]) == 1
    assert "two bundle folders have the same name" in capsys.readouterr().err
