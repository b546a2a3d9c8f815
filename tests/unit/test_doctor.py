"""``maskdial doctor``: what it tells of a machine, and what it advises."""

import os
import shutil
from pathlib import Path

import pytest

from maskdial import cli, doctor
from maskdial.errors import ConfigError
from maskdial.kernels.installed import Kernels


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(doctor, "available_bytes", lambda: 9 * 2**30)
    monkeypatch.setattr(doctor, "reservable_bytes", lambda: None)
    monkeypatch.setattr(doctor, "is_reachable", lambda url: False)
    monkeypatch.setattr(doctor, "find_kernels", lambda setting: Kernels(tmp_path, "avx512vnni"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(50 * 2**30))
    monkeypatch.setenv("MASKDIAL_CACHE", str(tmp_path / "cache"))


class Disk:
    def __init__(self, free: int) -> None:
        self.free = free


def told(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str], list[str]]:
    """The exit status, the facts, and the sentences after them."""
    status = cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    end = next(index for index, line in enumerate(lines) if line.startswith("server")) + 1
    return status, {line[:10].strip(): line[11:] for line in lines[:end]}, lines[end:]


def test_a_machine_without_faults(capsys: pytest.CaptureFixture[str]) -> None:
    status, facts, sentences = told(capsys)
    assert (status, sentences) == (0, ["nothing stands in the way"])
    assert facts["kernels"] == "built, with avx512vnni"
    assert facts["memory"] == "9.7 GB free"
    assert facts["cache"].endswith("0 models, 0.0 GB; 53.7 GB of disk are free")
    assert facts["server"] == "none at http://127.0.0.1:8000"
    assert f"{os.cpu_count()} logical cores" in facts["processor"]


def test_what_is_slow_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(doctor, "available_bytes", lambda: 2**30)
    monkeypatch.setattr(doctor, "find_kernels", lambda setting: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(2**30))
    status, facts, sentences = told(capsys)
    assert status == 0
    assert facts["kernels"].startswith("not built (maskdial_kernels-")
    assert [sentence.split(":")[0] for sentence in sentences] == ["slow"] * 4
    for sentence, part in zip(
        sentences,
        ("load average is 99.0", "maskdial.kernels build", "1.1 GB of memory", "maskdial rm"),
        strict=True,
    ):
        assert part in sentence
    monkeypatch.setattr(doctor, "find_kernels", lambda setting: Kernels(tmp_path, "avx2"))
    assert "no instructions for products of bytes" in " ".join(told(capsys)[2])


def test_what_keeps_models_from_being_served_is_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(setting: str) -> None:
        raise ConfigError("the kernels cannot be loaded: truncated")

    monkeypatch.setattr(doctor, "find_kernels", broken)
    monkeypatch.setattr(doctor, "reservable_bytes", lambda: 2**28)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    status, _, sentences = told(capsys)
    assert status == 1
    assert [sentence.split(":")[0] for sentence in sentences] == ["fault"] * 3
    for part in ("cannot be loaded: truncated", "ulimit -v", "set MASKDIAL_CACHE"):
        assert part in " ".join(sentences)


def test_a_broken_setting_or_package_does_not_end_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("onnxruntime", "no-such-package"))
    (tmp_path / "file").touch()
    for cache, part in (
        ("", "MASKDIAL_CACHE is empty"),
        (str(tmp_path / "file"), "cannot be written"),
        (str(tmp_path / "file" / "below"), "cannot be written"),
    ):
        monkeypatch.setenv("MASKDIAL_CACHE", cache)
        status, facts, (sentence,) = told(capsys)
        assert status == 1
        assert sentence.startswith("fault: ")
        assert part in sentence
        assert facts["packages"].endswith("no-such-package from another package")


def test_the_processor_is_named_where_the_system_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = tmp_path / "cpuinfo"
    named.write_text("processor : 0\nmodel name\t: A 9000\nmodel name\t: A 9000\n")
    doctor.report(named)
    assert "processor  A 9000 (" in capsys.readouterr().out
    doctor.report(tmp_path / "none")
    assert f"processor  {os.uname().machine}, " in capsys.readouterr().out
