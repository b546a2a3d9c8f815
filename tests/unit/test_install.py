"""Installing from the repository, as a newcomer does: pip, a new environment, and nothing else."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 900  # seconds for pip to fetch, to compile the kernels and to install

pytestmark = pytest.mark.slow


def environment() -> dict[str, str]:
    """What a shell of somebody else has: none of our variables, nothing of this checkout.

    pip compiles no bytecode: that of all packages takes longer than what the tests import of them.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MASKDIAL_", "PYTHON", "VIRTUAL_ENV", "COV_", "COVERAGE_"))
    } | {"PIP_NO_COMPILE": "1"}


class Installation:
    """A virtual environment with nothing but pip."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=True)
        self.folder = folder
        self.programs = folder / ("Scripts" if os.name == "nt" else "bin")

    def run(self, *command: str | Path, **settings: str) -> str:
        """What a program of the environment prints; it must succeed."""
        program, *arguments = command
        done = subprocess.run(
            [self.programs / program, *arguments],
            cwd=self.folder,
            env=environment() | settings,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pip(self, *arguments: str | Path, **settings: str) -> None:
        self.run("python", "-m", "pip", "--disable-pip-version-check", *arguments, **settings)

    def client(self) -> Path:
        """Where Python finds the client, which works."""
        script = (
            "import maskdial_client as c; c.Client('http://localhost').close(); print(c.__file__)"
        )
        return Path(self.run("python", "-c", script).strip())

    def has(self, module: str) -> bool:
        script = f"import importlib.util as u; print(u.find_spec({module!r}) is not None)"
        return self.run("python", "-c", script).strip() == "True"


@pytest.fixture(scope="module", autouse=True)
def _index(tmp_path_factory: pytest.TempPathFactory) -> None:
    """pip's package index, as it is configured here."""
    folder = tmp_path_factory.mktemp("index")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--retries", "0", "--timeout", "20", "--dest", str(folder), "hatchling"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.skip(f"pip reaches no package index: {done.stderr.strip().splitlines()[-1]}")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """`pip install .`

    Without the kernels, whose compilation takes most of the time: their own tests have those of an
    editable install, and ``make dist`` installs a wheel with them.
    """
    new = Installation(tmp_path_factory.mktemp("server") / "venv")
    new.pip("install", ROOT, HATCH_BUILD_NO_HOOKS="true")
    return new


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of `pip install ./clients`, which the tests install several times."""
    folder = tmp_path_factory.mktemp("client")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(ROOT / "clients")]
    subprocess.run(command, cwd=folder, env=environment(), check=True, timeout=TIMEOUT)
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture
def url(installed: Installation) -> Iterator[str]:
    """The starter models, served by that installation."""
    process = subprocess.Popen(
        [installed.programs / "maskdial", "serve", "--port", "0"],
        cwd=installed.folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        deadline = time.monotonic() + 120
        while httpx.get(f"{found[1]}/health/ready", timeout=60).status_code != 200:
            assert time.monotonic() < deadline, "the models did not load"
            time.sleep(0.1)
        yield found[1]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_it_serves_and_has_its_client(installed: Installation, url: str) -> None:
    installed.pip("check")
    reply = httpx.post(f"{url}/fill-mask", json={"inputs": "The [MASK] barked."}, timeout=60)
    assert reply.status_code == 200
    assert installed.run("maskdial", "health", "--port", url.rpartition(":")[2]) == "ready\n"
    assert "The dog barked" in installed.run("maskdial", "fill", "--url", url, "The [MASK] barked.")
    script = (
        "from maskdial_client import Client\n"
        f"with Client({url!r}) as client: print(client.classify('A fine film.').label)"
    )
    assert installed.run("python", "-c", script).strip() == "POSITIVE"
    assert not installed.has("torch")


def test_the_clients_own_distribution_beside_it_breaks_nothing(
    installed: Installation, client_wheel: Path
) -> None:
    """In either order, and whichever of the two goes first."""
    bundled = installed.client()
    installed.pip("install", client_wheel)
    installed.pip("check")
    own = installed.client()
    assert own != bundled
    assert own.parents[1] in bundled.parents
    assert "usage: maskdial fill" in installed.run("maskdial", "fill", "--help")
    installed.pip("uninstall", "--yes", "maskdial-client")
    assert installed.client() == bundled
    assert "usage: maskdial fill" in installed.run("maskdial", "fill", "--help")
    installed.pip("install", client_wheel)
    installed.pip("uninstall", "--yes", "maskdial")
    assert installed.client() == own
    assert not installed.has("maskdial")


def test_the_client_alone_needs_httpx_only(client_wheel: Path, tmp_path: Path) -> None:
    new = Installation(tmp_path / "venv")
    new.pip("install", client_wheel)
    assert new.client().is_file()
    assert new.has("httpx")
    for module in ("maskdial", "onnxruntime", "numpy", "fastapi"):
        assert not new.has(module), module


@pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="this is no Git checkout"
)
def test_a_wheel_from_git_has_all_packages(tmp_path: Path) -> None:
    """As `pip install git+URL` builds it, without the kernels, which take longer to compile."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        "wheels",
    ]
    done = subprocess.run(
        [*command, f"git+{ROOT.as_uri()}"],
        cwd=tmp_path,
        env=environment() | {"HATCH_BUILD_NO_HOOKS": "true"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"maskdial/cli.py", "maskdial_export/cli.py", "maskdial_client.pth"} <= names
    assert "maskdial/client/maskdial_client/cli.py" in names
    assert "maskdial/starter/sentiment/maskdial.json" in names
    assert not any(name.endswith(".so") for name in names)
