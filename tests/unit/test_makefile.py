"""make: an environment that cannot work is a sentence, not an error 127."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    shutil.which("make") is None or os.name == "nt", reason="there is no make"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment is complete: make has nothing to install."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "hatch_build.py", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(sys.executable)
    for name in ("pip", "maskdial", "ruff"):
        write_program(programs, name)
    (folder / ".venv" / ".runtime-installed").touch()
    return folder


def write_program(programs: Path, name: str) -> None:
    """As pip writes it."""
    program = programs / name
    program.write_text(f"#!{programs.absolute()}/python\nprint('served')\n")
    program.chmod(0o755)


def make(folder: Path, *goals: str) -> subprocess.CompletedProcess[str]:
    # The options of a make that runs the tests are not those of this one.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *goals], cwd=folder, capture_output=True, text=True, timeout=60, env=variables
    )


def test_a_good_environment_is_used(checkout: Path) -> None:
    done = make(checkout, "serve")
    assert done.returncode == 0, done.stderr
    assert "served" in done.stdout


def test_a_python_that_is_gone(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3")
    done = make(checkout, "serve")
    assert done.returncode == 2
    assert ".venv: its Python is gone; remove it and run make again: rm -rf .venv" in done.stderr
    assert "127" not in done.stderr


@pytest.mark.parametrize("keep", [False, True], ids=["moved", "copied"])
def test_a_checkout_that_was_moved(checkout: Path, keep: bool) -> None:
    """A copy would otherwise run the original's code."""
    other = checkout.parent / "other"
    if keep:
        shutil.copytree(checkout, other, symlinks=True)
    else:
        checkout.rename(other)
    for goal in ("serve", "test", "check"):
        done = make(other, goal)
        assert done.returncode == 2
        assert ".venv was made in another folder; remove it and run make again" in done.stderr
        assert "127" not in done.stderr
        assert "served" not in done.stdout
    assert make(other, "help").returncode == 0
    assert make(other).returncode == 0


def test_the_environments_of_ray_and_of_clients(checkout: Path) -> None:
    for name in (".venv-ray", ".venv-clients/sdks"):
        programs = checkout / name / "bin"
        programs.mkdir(parents=True)
        write_program(programs, "pip")
        (programs / "python").symlink_to("/nowhere/python3")
        done = make(checkout, "test-ray")
        assert f"{name}: its Python is gone" in done.stderr
        shutil.rmtree(checkout / name)


def test_an_environment_without_pip_is_made_anew(checkout: Path) -> None:
    """Debian's Python without python3-venv leaves one behind; PYTHON is a stand-in here."""
    (checkout / ".venv" / "bin" / "pip").unlink()
    (checkout / ".venv" / ".runtime-installed").unlink()
    done = make(checkout, "--dry-run", "serve")
    assert done.returncode == 0, done.stderr
    assert "-m venv .venv" in done.stdout
