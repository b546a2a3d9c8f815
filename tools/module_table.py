"""Writes ``docs/modules.md``: every module with the first sentence of its docstring.

    make format

A test fails when the page is out of date, or when a module has no docstring.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "modules.md"
PACKAGES = {
    "server/maskdial": "The server.",
    "export/maskdial_export": "The exporter.",
    "clients/maskdial_client": "The client; `_sync` is generated from `_async` by "
    "`clients/generate_sync.py`.",
    "loadtests": "Measurements; run as `python -m loadtests`.",
    "training": "The recipes of the starter models; run as `python -m training`.",
    "tools": "Scripts for the repository itself.",
}
_GENERATED = "_sync"


def page() -> str:
    """The whole page, as Markdown."""
    parts = [
        "# Modules\n",
        "Generated from the modules' docstrings by `make format`; "
        "[architecture.md](architecture.md) tells how they work together.\n",
    ]
    for folder, introduction in PACKAGES.items():
        parts.append(f"## `{folder}/`\n\n{introduction}\n")
        parts.append("| module | |\n|---|---|\n" + "".join(map(_row, _modules(ROOT / folder))))
    return "\n".join(parts)


def first_sentence(file: Path) -> str:
    """What a module's docstring begins with: its first sentence, or its first paragraph.

    Raises:
        ValueError: it has no docstring.
    """
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{file} has no docstring")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)`0-9])\. (?=[A-Z])", paragraph)[0].rstrip(".:")


def _modules(folder: Path) -> list[Path]:
    files = [file for file in sorted(folder.rglob("*.py")) if _GENERATED not in file.parts]
    return [file for file in files if file.name != "__init__.py"]


def _row(file: Path) -> str:
    package = next(folder for folder in PACKAGES if file.is_relative_to(ROOT / folder))
    text = first_sentence(file).replace("|", "\\|")
    return f"| `{file.relative_to(ROOT / package)}` | {text} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
