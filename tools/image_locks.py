"""Writes ``deploy/locks/``: the packages of the container image, with the hashes of their files.

    make locks PYTHON=python3.12

pip resolves them for each platform, at the versions in ``constraints.txt``, from its package index.
Markers are those of the running Python, so it has to be the image's version. A test
fails when the locks do not fit ``pyproject.toml`` and ``constraints.txt``.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "deploy" / "locks"
CONSTRAINTS = ROOT / "constraints.txt"
PYTHON = "3.12"
MACHINES = ("x86_64", "aarch64")
GLIBC_MINOR = 36  # Debian 12; Ubuntu 24.04 and Debian 13 are newer
EXTRAS = ("cuda", "otel")
_HEADER = f"""\
# Written by `make locks`: for Python {PYTHON} on Linux ({", ".join(MACHINES)}).
# One hash for each file that pip takes there.
"""
_PIN = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)


def requirements() -> dict[str, list[str]]:
    """What each lock has to hold: the server's dependencies, those of its extras, and what builds
    its wheels.
    """
    server = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = server["project"]["optional-dependencies"]
    return {
        "server": server["project"]["dependencies"],
        **{extra: extras[extra] for extra in EXTRAS},
        "build": server["build-system"]["requires"],
    }


def pins(text: str) -> dict[str, str]:
    """Version by normalized name, of a lock or of ``constraints.txt``."""
    return {normalized(name): version for name, version in _PIN.findall(text)}


def normalized(name: str) -> str:
    """A package's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lock(wanted: Sequence[str]) -> str:
    """The text of a lock with all that some requirements need.

    Raises:
        SystemExit: pip finds no files for a platform, or needs other packages there.
    """
    hashes: dict[tuple[str, str], set[str]] = {}
    found = []
    for machine in MACHINES:
        files = dict(_resolve(wanted, machine))
        found.append(files.keys())
        for package, digest in files.items():
            hashes.setdefault(package, set()).add(digest)
    partial = [package for package in hashes if not all(package in files for files in found)]
    if partial:
        sys.exit(f"not on every platform: {partial}")
    entries = []
    for (name, version), digests in sorted(hashes.items()):
        lines = f"{name}=={version}", *(f"    --hash=sha256:{each}" for each in sorted(digests))
        entries.append(" \\\n".join(lines) + "\n")
    return _HEADER + "".join(entries)


def _resolve(wanted: Sequence[str], machine: str) -> Iterator[tuple[tuple[str, str], str]]:
    """Name, version and SHA-256 of the files that pip would install on a machine."""
    tags = [f"manylinux_2_{minor}" for minor in range(5, GLIBC_MINOR + 1)]
    tags += ["manylinux1", "manylinux2010", "manylinux2014", "linux"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command: list[str | Path] = [sys.executable, "-m", "pip", "install", "--quiet"]
        command += ["--dry-run", "--ignore-installed", "--target", folder, "--report", report]
        command += ["--only-binary", ":all:", "--python-version", PYTHON, "-c", CONSTRAINTS]
        command += [f"--platform={tag}_{machine}" for tag in tags]
        if subprocess.run([*command, *wanted]).returncode:
            sys.exit(f"pip finds no files for {machine}")
        for each in json.loads(report.read_text(encoding="utf-8"))["install"]:
            package = normalized(each["metadata"]["name"]), each["metadata"]["version"]
            yield package, each["download_info"]["archive_info"]["hashes"]["sha256"]


def main() -> None:
    """Writes all locks."""
    if sys.version_info[:2] != tuple(map(int, PYTHON.split("."))):
        sys.exit(
            f"the image has Python {PYTHON}; run this with it: make locks PYTHON=python{PYTHON}"
        )
    for name, wanted in requirements().items():
        (LOCKS / f"{name}.txt").write_text(lock(wanted), encoding="utf-8")


if __name__ == "__main__":
    main()
