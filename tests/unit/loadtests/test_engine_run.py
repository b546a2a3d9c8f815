"""``python -m loadtests engine`` on the starter model; no time is asserted."""

import json
from pathlib import Path
from typing import Any

import pytest

import maskdial
from loadtests.__main__ import main
from loadtests.engine import SHARES, speculation

STARTER = Path(maskdial.__file__).parent / "starter"


def rows_of(report: dict[str, Any], section: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = report["sections"][section]["rows"]
    return rows


def test_every_section_on_the_starter_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("maskdial.causal.engine._UNUSED_SLOT_SECONDS", 0.1)
    monkeypatch.setattr(speculation, "_STREAMS", (1, 2))
    # In a tenth of a second a draft model that does not pay would hardly be asked again.
    monkeypatch.setattr("maskdial.causal.drafts.policy._PROBE_SHARE", 1.0)
    output = tmp_path / "report.json"
    bundle = str(STARTER / "hybrid")
    arguments = ["engine", "--bundle", bundle, "--draft", bundle, "--seconds", "0.1"]
    assert main([*arguments, "--output", str(output)]) == 0
    report = json.loads(output.read_text(encoding="utf-8"))
    assert list(report["sections"]) == list(SHARES)
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in SHARES)

    assert [row["chunk_tokens"] for row in rows_of(report, "stall")] == [128, 256, 384]
    assert report["prefill_chunk_tokens"] == 256
    assert all(row["steps"] > 0 for row in rows_of(report, "split"))
    cached = [row["cached_tokens"] for row in rows_of(report, "prefix")]
    assert cached == [0, 0, 448]
    for row in rows_of(report, "together"):
        assert row["together_passes"] < row["alone_passes"] == 8
    for row in rows_of(report, "speculation"):
        assert (row["tokens_per_pass"] > 1) == (row["accepted_percent"] > 0)
        if row["text"] == "copy" and row["streams"] == 1:
            assert row["accepted_percent"] > 0
        if row["text"].endswith("90%"):
            assert row["drafts"] > 0  # of a model that is no smaller, so they rarely pay
    steps = rows_of(report, "steps")
    assert [row["rows"] for row in steps if row["kind"] == "decode"] == [1, 2, 4, 8, 8]
    assert [row["context"] for row in steps if row["kind"] == "prefill"] == [0, 0, 0, 0, 256]
    assert [row["rows"] for row in steps if row["kind"] == "mixed"] == [1] * 3 + [4] * 3 + [7] * 3
    assert all(row["steps"] > 0 for row in steps)


def test_a_masked_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--bundle", str(STARTER / "sentiment")]) == 1
    assert "is a masked bundle; this needs a causal one" in capsys.readouterr().err


def test_a_missing_bundle_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--bundle", str(tmp_path / "nothing")]) == 1
    assert "has no maskdial.json" in capsys.readouterr().err
