"""Builds the documents as a site that needs no network, in ``build/site``.

    make docs

Links out of ``docs/`` would break there. So what is built is a copy, in ``build/docs``: documents
of the repository become pages of it, files that are linked to lie beside them, and a link to a
folder becomes its text. A link that leads nowhere ends the build.
"""

import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
_COPY = BUILD / "docs"
_FOLDER = "repository"
_DOCUMENTS = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *("clients/README.md", "loadtests/README.md"),
)
_LINK = re.compile(r"\]\(([^)\s:#]+)")
_WHOLE_LINK = re.compile(r"\[((?:[^]`]|`[^`]*`)*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def copy() -> None:
    """Writes the copy that is built."""
    shutil.rmtree(_COPY, ignore_errors=True)
    shutil.copytree(ROOT / "docs", _COPY)
    shutil.copy(ROOT / "tools" / "site.css", _COPY)
    for name in _DOCUMENTS:
        _take(name)
    for page in _COPY.rglob("*.md"):
        page.write_text(_relinked(page), encoding="utf-8")


def _take(name: str) -> Path:
    """A file of the repository in the copy."""
    place = _COPY / _FOLDER / name
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / name, place)
    return place


def _relinked(page: Path) -> str:
    """A page's text, with links to where files are in the copy."""
    place = page.relative_to(_COPY).as_posix()
    inside = place.startswith(f"{_FOLDER}/")
    source = place.removeprefix(f"{_FOLDER}/") if inside else f"docs/{place}"

    def target_of(path: str) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(source), path))

    def without_folder(match: re.Match[str]) -> str:
        return match[1] if (ROOT / target_of(match[2])).is_dir() else match[0]

    def moved(match: re.Match[str]) -> str:
        target = target_of(match[1])
        if not (ROOT / target).is_file():
            return match[0]  # the build reports it
        if target.startswith("docs/"):
            file = _COPY / target.removeprefix("docs/")
        else:
            file = _COPY / _FOLDER / target
            if not file.exists():
                _take(target)
        return f"]({posixpath.relpath(file, page.parent)}"

    text = _WHOLE_LINK.sub(without_folder, page.read_text(encoding="utf-8"))
    return _LINK.sub(moved, text)


if __name__ == "__main__":
    copy()
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    sys.exit(subprocess.run(build, cwd=ROOT).returncode)
