"""``python -m loadtests kernels``: what it sums up, and what it says without kernels."""

from pathlib import Path

import pytest

from loadtests.__main__ import main
from loadtests.kernels import summarize
from maskdial.kernels import build, installed
from maskdial.registry.catalog import STARTER_FOLDER


def test_the_ratio_is_that_of_the_rounds() -> None:
    row = summarize("decode", [0.004, 0.010, 0.006], [0.002, 0.010, 0.002])
    assert (row.without_ms, row.kernels_ms, row.rounds) == (6.0, 2.0, 3)
    assert (row.ratio, row.least, row.most) == pytest.approx((2.0, 1.0, 3.0))


def test_without_kernels_it_says_how_to_build_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installed, "library_path", lambda: build.library_path(tmp_path))
    assert main(["kernels", "--bundle", str(STARTER_FOLDER / "sentiment")]) == 1
    assert "run python -m maskdial.kernels build" in capsys.readouterr().err
