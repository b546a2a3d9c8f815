"""What bundles hold and errors repeat never commands the terminal."""

import json
import re
import shutil
from pathlib import Path

import pytest

from maskdial import cli
from maskdial.bundle.manifest import MANIFEST
from maskdial.errors import printable
from maskdial.registry.catalog import STARTER_FOLDER

ATTACK = "\x1b]0;title\x07\x1b[2J\x9b31m\rforged\x7f\x00\u2028[red]"
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b31m\rforged\x7f\x00\u2028[red]"
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose manifest has the attack wherever a text may be any."""
    folder = tmp_path / "bundle"
    shutil.copytree(STARTER_FOLDER / "sentiment", folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["architecture"] = ATTACK
    manifest["labels"] = [f"{label}{ATTACK}" for label in manifest["labels"]]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_inspect(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert cli.main(["inspect", str(bundle)]) == 0
    shown = capsys.readouterr().out
    assert not UNSAFE.search(shown), ascii(shown)
    assert SHOWN in shown
    assert cli.main(["inspect", str(bundle), "--json"]) == 0
    shown = capsys.readouterr().out
    assert not UNSAFE.search(shown), ascii(shown)
    assert json.loads(shown)["architecture"] == ATTACK


def test_an_error_that_repeats_what_a_bundle_says(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    manifest["schema_version"] = ATTACK
    (bundle / MANIFEST).write_text(json.dumps(manifest))
    assert cli.main(["inspect", str(bundle)]) == 1
    assert cli.main(["inspect", f"{bundle}{ATTACK.replace(chr(0), '')}"]) == 1
    shown = capsys.readouterr().err
    assert not UNSAFE.search(shown), ascii(shown)
    assert len(shown.splitlines()) == 2


def test_an_export_says_what_a_checkpoint_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """As text: neither commands nor the markup of the library that prints it."""
    console = pytest.importorskip("rich.console").Console(width=400)
    phase = pytest.importorskip("maskdial_export.phase")
    phase.finding(console, f"layer {ATTACK}")
    shown = capsys.readouterr().out
    assert not UNSAFE.search(shown), ascii(shown)
    assert f"layer {SHOWN}" in shown


def test_other_texts_stay() -> None:
    assert printable("caf\u00e9 \u4e2d \U0001f600 a\\b") == "caf\u00e9 \u4e2d \U0001f600 a\\b"
