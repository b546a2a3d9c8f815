"""Models by their names on the Hub: exported once into the cache, listed and removed."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from maskdial import cli
from maskdial.bundle.bundle import read_manifests
from maskdial.config import load_config
from maskdial.errors import ConfigError
from maskdial.extras import how_to_install
from maskdial.model_cache import cached_models
from maskdial.registry.catalog import STARTER_FOLDER

NAME = "acme/taste"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MASKDIAL_CACHE", str(folder))
    return folder


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Path]]:
    """What servers would have served."""
    found: list[dict[str, Path]] = []

    class NoServer:
        failure, started = None, True

        def __init__(self, config: Any, **options: Any) -> None:
            found.append(config.models)

        def run(self) -> None:
            assert all(path.is_dir() for path in found[-1].values())

    monkeypatch.setattr("maskdial.server.Server", NoServer)
    return found


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were exported; the bundle is always the same."""
    names: list[str] = []

    def export(options: list[str], folder: Path, *_: object) -> None:
        names.append(" ".join(options))
        shutil.copytree(STARTER_FOLDER / "sentiment", folder)

    monkeypatch.setattr("maskdial.intake.export_apart", export)
    return names


def test_a_name_of_the_hub_is_exported_once(
    cache: Path,
    served: list[dict[str, Path]],
    exported: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for _ in range(2):
        assert cli.main(["serve", "--model", NAME, "--model", f"mine={STARTER_FOLDER}/hybrid"]) == 0
    assert exported == [NAME]
    assert served == [{NAME: cache / "acme" / "taste", "mine": STARTER_FOLDER / "hybrid"}] * 2
    assert f"exporting {NAME} to" in capsys.readouterr().err

    assert cli.main(["models"]) == 0
    heads, row, total = capsys.readouterr().out.splitlines()
    name, source, precision, task, size = row.split()
    assert heads.split() == ["name", "source", "precision", "task", "bytes"]
    assert (name, precision, task) == (NAME, "int8", "classify")
    assert source == read_manifests(NAME, cache / NAME)[0].source
    assert total == f"{cache}: {size} bytes"
    assert cli.main(["rm", NAME]) == 0
    assert cli.main(["list"]) == 0
    assert NAME not in capsys.readouterr().out
    assert not (cache / "acme" / "taste").exists()
    assert cli.main(["rm", NAME]) == 1
    assert "there is no 'acme/taste' in the cache" in capsys.readouterr().err


def test_a_file_that_changes_meanwhile_is_not_kept(
    cache: Path,
    served: list[dict[str, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")

    def export(options: list[str], folder: Path, *_: object) -> None:
        shutil.copytree(STARTER_FOLDER / "sentiment", folder)
        file.write_bytes(file.read_bytes() + b"more")  # a download goes on

    monkeypatch.setattr("maskdial.intake.export_apart", export)
    assert cli.main(["serve", "--model", str(file)]) == 1
    assert f"{file} has changed while it was exported; wait" in capsys.readouterr().err
    assert [*(cache / "files").iterdir()] == []
    assert served == []


def test_a_file_of_a_repository_is_exported_once(
    cache: Path, served: list[dict[str, Path]], exported: list[str]
) -> None:
    for _ in range(2):
        assert cli.main(["serve", "--model", f"{NAME}:Q4_K_M", "--provider", "cuda,cpu"]) == 0
    assert exported == [f"{NAME}:Q4_K_M"]
    assert served == [{NAME: cache / "acme" / "taste--Q4_K_M"}] * 2
    assert cli.main(["rm", f"{NAME}:Q4_K_M"]) == 0
    assert not (cache / "acme" / "taste--Q4_K_M").exists()


def test_revisions_are_kept_apart(cache: Path, exported: list[str]) -> None:
    for source in (NAME, f"{NAME}@v1.0", f"{NAME}@refs/pr/1", f"{NAME}:Q8_0@v1.0", NAME):
        assert cli.main(["pull", source]) == 0
    assert exported == [
        NAME,
        f"--revision v1.0 {NAME}",
        f"--revision refs/pr/1 {NAME}",
        f"--revision v1.0 {NAME}:Q8_0",
    ]
    names = {each.name for each in cached_models()}
    own = ("taste", "taste@v1.0", "taste@refs%2Fpr%2F1", "taste--Q8_0@v1.0")
    assert names == {f"acme/{each}" for each in own}
    assert cli.main(["rm", f"{NAME}@refs/pr/1", "acme/taste--Q8_0@v1.0"]) == 0
    assert len(cached_models()) == 2


def test_other_providers_get_floats(
    cache: Path, served: list[dict[str, Path]], exported: list[str], tmp_path: Path
) -> None:
    assert cli.main(["serve", "--model", NAME]) == 0
    for _ in range(2):
        assert cli.main(["serve", "--model", NAME, "--provider", "cuda,cpu"]) == 0
    assert exported == [NAME, f"--precision fp32 {NAME}"]
    folder = cache / "acme" / "taste"
    assert [each[NAME] for each in served[1:]] == [folder.with_name("taste+fp32")] * 2
    file = tmp_path / "some.Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    assert cli.main(["serve", "--model", f"a={file}", "--provider", "cuda,cpu"]) == 0
    assert exported[2:] == [str(file)]  # which keeps its integers


def test_without_the_extra_it_says_what_to_install(
    cache: Path,
    served: list[dict[str, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('there is none')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--acme--taste"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc", encoding="utf-8")
    snapshot = folder / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    (snapshot / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert cli.main(["serve", "--model", NAME]) == 1
    exporting, why = capfd.readouterr().err.splitlines()
    assert exporting == f"maskdial: exporting {NAME} to {cache / NAME}"
    assert why.startswith(f"maskdial: model {NAME}: ")
    assert "there is none" in why
    assert how_to_install("export") in why
    assert [*(cache / "acme").iterdir()] == []
    assert served == []


def test_a_file_is_exported_until_it_changes(
    cache: Path,
    served: list[dict[str, Path]],
    exported: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "some.Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for _ in range(2):
        assert cli.main(["serve", "--model", str(file), "--model", f"mine={file}"]) == 0
    assert exported == [str(file)]
    (folder,) = {*served[0].values(), *served[1].values()}
    assert served == [{"some.Q4_K_M": folder, "mine": folder}] * 2
    assert folder.parent == cache / "files"
    capsys.readouterr()
    assert cli.main(["models"]) == 0
    assert f"files/{folder.name}" in capsys.readouterr().out
    file.write_bytes(b"GGUF, and more")
    assert cli.main(["serve", "--model", str(file)]) == 0
    assert exported == [str(file)] * 2
    assert served[2]["some.Q4_K_M"] != folder
    assert cli.main(["serve", "--model", str(tmp_path / "none.gguf")]) == 1
    assert "there is no file" in capsys.readouterr().err


def test_a_checkpoints_folder_is_exported_until_it_changes(
    cache: Path,
    served: list[dict[str, Path]],
    exported: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    asked = ["run", str(folder), "A fine film."]
    for _ in range(2):
        assert cli.main(["serve", "--model", f"mine={folder}"]) == 0
        assert cli.main(asked) == 0
    assert exported == [str(folder)]
    assert served[0] == served[1]
    assert served[0]["mine"].name.startswith("some-model-")
    assert "POSITIVE" in capsys.readouterr().out
    (folder / "model.safetensors").write_bytes(b"more")
    assert cli.main(asked) == 0
    assert exported == [str(folder)] * 2


@pytest.mark.parametrize("flag", ["--max-tokens", "--max-tokens=3"])
def test_an_unknown_flag_is_refused_before_an_export(
    cache: Path, exported: list[str], capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert cli.main(["run", NAME, "A fine film.", flag]) == 1
    assert exported == []
    expected = "maskdial: there is no flag --max-tokens; did you mean --max-new-tokens?\n"
    assert capsys.readouterr().err == expected
    assert cli.main(["run", NAME, "--top-k", "1", "--", "--max-tokens are few."]) == 0
    assert exported == [NAME]


def test_what_is_no_name_of_the_hub(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bundles" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for wrong in ("mine", "a/b/c", "../b", "a/..", "/a/b", "a/", "a b/c", "x="):
        with pytest.raises(ConfigError, match="is neither NAME=PATH, nor a name of the Hub"):
            load_config({"model": [wrong]})
    with pytest.raises(ConfigError, match="say what the bundle is called: NAME=bundles/mine"):
        load_config({"model": ["bundles/mine"]})
    with pytest.raises(ConfigError, match="given twice"):
        load_config({"model": [NAME, f"{NAME}=x"]})


def test_only_bundles_are_listed_and_removed(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cache / "acme" / "other").mkdir(parents=True)
    assert cli.main(["models"]) == 0
    assert "acme/other" not in capsys.readouterr().out
    for name in ("acme/other", "acme", "..", "../..", "/"):
        assert cli.main(["rm", name]) == 1
    assert (cache / "acme" / "other").is_dir()


@pytest.mark.parametrize("linked", ["acme", "acme/taste"])
def test_what_a_link_leads_to_is_not_removed(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], linked: str
) -> None:
    mine = tmp_path / "mine" / "taste"
    shutil.copytree(STARTER_FOLDER / "sentiment", mine)
    (cache / linked).parent.mkdir(parents=True)
    (cache / linked).symlink_to(mine.parent if linked == "acme" else mine)
    assert cli.main(["rm", NAME]) == 1
    assert "is a link to" in capsys.readouterr().err
    assert (mine / "maskdial.json").is_file()


def test_an_empty_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASKDIAL_CACHE", "")
    assert cli.main(["models"]) == 1
    assert "MASKDIAL_CACHE is empty; set it to a folder, or unset it" in capsys.readouterr().err
