"""The quality gate of the direct path, and what floats become if no precision is asked for."""

import io
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from maskdial.bundle.manifest import Manifest
from maskdial_export import route
from maskdial_export.direct import quality
from maskdial_export.errors import ExportError, QualityError
from maskdial_export.quantize.gate import Gate
from maskdial_export.route import export_any_way
from tests.export.test_direct import direct, save_folder


def test_int8_that_loses_too_much_becomes_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_folder("llama", tmp_path / "folder"))
    strict, text = Gate(max_loss=1e-9), io.StringIO()
    console = Console(file=text, width=1000)
    calls: list[dict[str, Any]] = []

    def tracer(_source: str, _dest: Path, **options: Any) -> Manifest:
        calls.append(options)
        raise QualityError("too much", "int8 diverges by 7 nats")

    monkeypatch.setattr(route, "load_tracer", lambda: tracer)
    written = export_any_way(folder, tmp_path / "bundle", gate=strict, console=console)
    assert (written.precision, written.quality) == ("fp32", None)
    assert calls[0]["precision"] is None
    assert calls[0]["rounds"]  # it may leave layers in fp32
    assert "int8 diverges by 7 nats, so it becomes fp32; --precision int8" in text.getvalue()
    with pytest.raises(QualityError, match="too much"):
        export_any_way(folder, tmp_path / "other", precision="int8", gate=strict)
    monkeypatch.setattr(route, "_NEEDED", ("no_such_module",))
    with pytest.raises(QualityError, match=r"int8 diverges by .* and the maximum is 1e-09 nats"):
        export_any_way(folder, tmp_path / "other", precision="int8", gate=strict)
    assert not (tmp_path / "other").exists()
    written = export_any_way(
        folder, tmp_path / "other", precision="int8", gate=Gate(max_loss=math.inf)
    )
    assert written.quality is not None
    assert written.quality.max_loss is None


def test_more_is_read_where_chance_could_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder("llama", tmp_path / "folder")
    whole = direct(folder, tmp_path / "whole").quality
    monkeypatch.setattr(quality, "_WORK", 1)
    part = direct(folder, tmp_path / "part").quality
    assert whole is not None
    assert part is not None
    assert part.positions < whole.positions / 2
    assert part.loss == pytest.approx(whole.loss, abs=5 * part.figures["kl_error"])
    monkeypatch.setattr(quality, "_CLEAR", 1e6)
    more = direct(folder, tmp_path / "more").quality
    assert more is not None
    assert (more.positions, more.loss) == (whole.positions, whole.loss)


def test_a_quality_text_is_read_without_a_tracer(tmp_path: Path) -> None:
    folder, text = save_folder("llama", tmp_path / "folder"), tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 200)
    found = direct(folder, tmp_path / "bundle", gate=Gate(text=text)).quality
    assert found is not None
    assert found.text == "text.txt"
    text.write_text("the quick")
    with pytest.raises(QualityError, match=r"text.txt is too short: it gives \d+ decisions"):
        direct(folder, tmp_path / "other", gate=Gate(text=text))
    with pytest.raises(ExportError, match="do not apply to fp32"):
        direct(folder, tmp_path / "other", gate=Gate(max_loss=1), precision="fp32")


def test_a_disk_without_room_is_found_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_folder("llama", tmp_path / "folder")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    with pytest.raises(ExportError, match=r"the bundle takes 0.0 GB, and 0.0 are free on its disk"):
        direct(folder, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
