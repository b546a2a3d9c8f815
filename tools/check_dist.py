"""Builds every distribution of this repository and tries what an installer would get.

    make dist

Sdists and wheels are left in ``dist/``. The wheels go into a fresh virtual environment, where
``maskdial serve`` has to answer a request with the starter models, to have its page, and to stop
when it is told to. On Linux for x86-64 there is a second wheel of the server, with the kernels, and
it is tried as well. Its compiler is PyPI's ziglang, which links for an old glibc and brings a C++
library to link statically; auditwheel names the platforms that the result really runs on.
"""

import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PAGE = ROOT / "server" / "maskdial" / "page"
PROJECTS = [folder for folder in (ROOT / "clients", ROOT) if (folder / "pyproject.toml").is_file()]
GLIBC = "2.17"  # that of manylinux2014
COMPILER = f"{sys.executable} -m ziglang c++ -s -target x86_64-linux-gnu.{GLIBC}"
NATIVE = (sys.platform, platform.machine()) == ("linux", "x86_64")
"""Whether a wheel with the kernels can be built, and tried, on this machine."""
TIMEOUT = 60  # seconds for the server to load its models, to answer, and to stop


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> None:
    """Runs a command away from the repository's own packages; ends the script where it fails."""
    print("$", *(f"{name}={value!r}" for name, value in variables.items()), *command, flush=True)
    subprocess.run(command, cwd=cwd, env=environment() | variables, check=True)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def build() -> None:
    """Builds all projects into `DIST`; a wheel is built from its sdist, as an installer would."""
    shutil.rmtree(DIST, ignore_errors=True)
    for project in PROJECTS:  # without the hook, which builds the kernels
        command = (sys.executable, "-m", "build", "--outdir", DIST, project)
        run(*command, HATCH_BUILD_NO_HOOKS="true")
    if NATIVE:
        build_native(next(DIST.glob("maskdial-*.tar.gz")))
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))


def build_native(sdist: Path) -> None:
    """Builds the wheel with the kernels.

    auditwheel fails if the library needs a newer glibc than `GLIBC`, or a library of the machine.
    """
    with tempfile.TemporaryDirectory(prefix="maskdial-wheel-") as name:
        folder = Path(name)
        shutil.unpack_archive(sdist, folder)
        (source,) = folder.iterdir()
        run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, source, CXX=COMPILER)
        tag = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
        audit = (sys.executable, "-m", "auditwheel", "repair", "--patcher", "none", "--plat", tag)
        run(*audit, "--wheel-dir", DIST, *folder.glob("*.whl"))


def install(folder: Path, *wheels: Path) -> Path:
    """A fresh environment with the wheels; returns its folder of programs."""
    venv.create(folder, with_pip=True)
    programs = folder / "bin"
    run(programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *wheels, cwd=folder)
    run(programs / "pip", "check", cwd=folder)
    return programs


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def request(url: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    message = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(message, timeout=TIMEOUT) as reply:
        return json.load(reply)


def wait_until_ready(server: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while True:
        try:
            request(f"{url}/health/ready")
            return
        except (urllib.error.URLError, ConnectionError):  # HTTP 503 among them
            if server.poll() is not None:
                sys.exit(f"the server ended with exit code {server.returncode}")
            if time.monotonic() > deadline:
                sys.exit(f"the server was not ready within {TIMEOUT} s")
        time.sleep(0.2)


def try_server(programs: Path, folder: Path, *, kernels: bool) -> None:
    """Serves the starter models, asks for one completion, and stops the server.

    ``kernels``: whether they must compute the models; otherwise they must not.
    """
    port = free_port()
    command: list[str | Path] = [programs / "maskdial", "serve", "--port", str(port)]
    print("$", *command, flush=True)
    server = subprocess.Popen(command, cwd=folder, env=environment())
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(server, url)
        body = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 8}}
        text = request(f"{url}/generate", body)["generated_text"]
        if not text:
            sys.exit("the server generated no text")
        print(f"{body['inputs']}{text}", flush=True)
        used = {model["kernels"] for model in request(f"{url}/models")}
        if all(used) is not kernels:
            sys.exit(f"the models' kernels are {used}")
        check_page(url)
        server.send_signal(signal.SIGTERM)
        if server.wait(TIMEOUT) != 0:
            sys.exit(f"the server stopped with exit code {server.returncode}")
    finally:
        server.kill()
        server.wait()


def check_page(url: str) -> None:
    """Fetches the page, the documentation, and every file of the page that the repository has."""
    files = [file for file in sorted(PAGE.rglob("*")) if file.is_file()]
    paths = [f"/page/{file.relative_to(PAGE).as_posix()}" for file in files]
    for path in ("/", "/docs", "/page/swagger/swagger-ui-bundle.js", *paths):
        try:
            with urllib.request.urlopen(url + path, timeout=TIMEOUT) as reply:
                reply.read()
        except urllib.error.HTTPError as error:
            sys.exit(f"{path}: status {error.code}; the wheel lacks a file of the page")
    print(f"the page and its {len(files)} files are there", flush=True)


def main() -> None:
    build()
    with tempfile.TemporaryDirectory(prefix="maskdial-dist-") as name:
        folder = Path(name)
        # One environment for the server and, beside it, the client's own distribution.
        programs = install(folder / "venv", *DIST.glob("maskdial-*-py3-none-any.whl"))
        try_server(programs, folder, kernels=False)
        install(folder / "venv", *DIST.glob("maskdial_client-*.whl"))
        for wheel in DIST.glob("*-manylinux*.whl"):
            run(programs / "pip", "install", "--force-reinstall", "--no-deps", wheel, cwd=folder)
            try_server(programs, folder, kernels=True)
    for file in sorted(DIST.iterdir()):
        print(f"dist/{file.name}  {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
