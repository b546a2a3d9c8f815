"""How to install an extra: by what pip can find, which is no package index."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from maskdial import extras

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = re.compile(r"pip install [^`\n]*\bmaskdial(?:\[[a-z,]+\])?(?! @ git\+)(?=['\"`\s]|$)")


def noted(monkeypatch: pytest.MonkeyPatch, note: dict[str, Any] | None) -> str:
    content = None if note is None else json.dumps(note)
    found = SimpleNamespace(read_text=lambda name: content)
    monkeypatch.setattr(extras, "distribution", lambda name: found)
    return extras.how_to_install("grpc")


@pytest.mark.parametrize(("editable", "flag"), [(True, "-e "), (False, "")])
def test_a_clone_is_installed_from_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, editable: bool, flag: str
) -> None:
    clone = tmp_path / "my clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    note = {"url": clone.as_uri(), "dir_info": {"editable": editable}}
    assert noted(monkeypatch, note) == f"pip install {flag}'{clone}[grpc]'"


def test_a_repository_is_installed_from_again(monkeypatch: pytest.MonkeyPatch) -> None:
    note = {"url": "https://git.example/maskdial", "vcs_info": {"vcs": "git", "commit_id": "1a2b"}}
    command = "pip install 'maskdial[grpc] @ git+https://git.example/maskdial'"
    assert noted(monkeypatch, note) == command


@pytest.mark.parametrize("note", [None, {"url": "file:///gone", "dir_info": {}}])
def test_without_a_place_both_forms_are_told(
    monkeypatch: pytest.MonkeyPatch, note: dict[str, Any] | None
) -> None:
    told = noted(monkeypatch, note)
    assert "pip install '.[grpc]'" in told
    assert "pip install 'maskdial[grpc] @ git+URL'" in told


def test_nothing_is_installed_by_a_name_that_is_on_no_index() -> None:
    """Neither in texts nor in errors: anybody could publish something under it."""
    kinds = (".md", ".py", ".toml", ".yaml", ".js", ".html", ".ipynb")
    folders = ("docs", "server", "export", "clients", "deploy", "loadtests", "training")
    files = [file for each in folders for file in (ROOT / each).rglob("*") if file.suffix in kinds]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Dockerfile")]
    assert len(files) > 500
    found = [
        f"{file}: {match[0]}" for file in files for match in BY_NAME.finditer(file.read_text())
    ]
    assert found == []
