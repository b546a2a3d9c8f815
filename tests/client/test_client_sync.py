"""The generated sync client, and what the package exports and imports."""

import dataclasses
import importlib
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import maskdial_client
from maskdial_client import _async

ROOT = Path(__file__).resolve().parents[2]


def generate(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = root / "clients" / "generate_sync.py"
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
    )


def test_the_sync_client_is_up_to_date() -> None:
    result = generate(ROOT, "--check")
    assert (result.returncode, result.stderr) == (0, "")


def test_an_outdated_twin_is_named_and_rewritten(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)  # ruff's settings
    shutil.copytree(ROOT / "clients", tmp_path / "clients")
    package = tmp_path / "clients" / "maskdial_client"
    tokens = package / "_async" / "tokens.py"
    tokens.write_text(tokens.read_text().replace("The tokens of a text;", "Tokens of a text;"))
    (package / "_sync" / "server.py").unlink()
    (package / "_sync" / "orphan.py").touch()
    result = generate(tmp_path, "--check")
    assert result.returncode == 1
    named = [Path(line.partition(" ")[0]).name for line in result.stderr.splitlines()]
    assert named == ["server.py", "tokens.py", "orphan.py"]
    assert generate(tmp_path).returncode == 0
    assert generate(tmp_path, "--check").returncode == 0
    assert "Tokens of a text;" in (package / "_sync" / "tokens.py").read_text()
    assert (package / "_sync" / "server.py").read_text() == (
        ROOT / "clients" / "maskdial_client" / "_sync" / "server.py"
    ).read_text()


def test_code_that_cannot_have_a_twin_is_rejected(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "clients", tmp_path / "clients")
    source = tmp_path / "clients" / "maskdial_client" / "_async" / "server.py"
    text = source.read_text()
    for addition, message in (
        ("async def ask() -> None: ...\n", "ask contains async code"),
        ("print()\n", "unsupported statement"),
    ):
        source.write_text(text + addition)
        result = generate(tmp_path, "--check")
        assert result.returncode == 1
        assert message in result.stderr


def test_every_result_class_is_exported() -> None:
    names = [module.name for module in pkgutil.iter_modules(_async.__path__, _async.__name__ + ".")]
    results = {
        name
        for module in map(importlib.import_module, names)
        for name, member in vars(module).items()
        if dataclasses.is_dataclass(member) and getattr(member, "__module__", None) in names
    }
    assert {"Fill", "StreamEvent"} <= results
    assert results <= set(maskdial_client.__all__)


def test_the_client_imports_nothing_beyond_what_httpx_does() -> None:
    def imported(*statements: str) -> set[str]:
        code = "; ".join(["import sys", *statements, "print(*sys.modules)"])
        modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
        return {module.partition(".")[0] for module in modules} - sys.stdlib_module_names

    client = imported("import maskdial_client.cli", "maskdial_client.Client().close()")
    assert client - imported("import httpx", "httpx.Client().close()") == {"maskdial_client"}
