"""The report of a measurement: its sections, on the terminal and in files."""

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtests.engine.section import Section


def machine() -> str:
    """What a measurement ran on, as a line."""
    system = f"{platform.system()} {platform.machine()}"
    return f"{system}, {os.cpu_count()} cores, Python {platform.python_version()}"


def load_averages() -> list[float]:
    """The machine's load averages over 1, 5 and 15 minutes; empty where it has none."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else []


def write_json(path: Path, sections: Sequence[Section], facts: dict[str, Any]) -> None:
    """Writes the sections, and the facts about the run beside them."""
    document = facts | {
        "machine": machine(),
        "load_at_end": load_averages(),
        "sections": {section.name: section.as_json() for section in sections},
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_markdown(path: Path, sections: Sequence[Section]) -> None:
    """Writes the sections as tables."""
    tables = "\n".join(section.as_markdown() for section in sections)
    path.write_text(f"{tables}\n{machine()}, load {load_averages()}\n", encoding="utf-8")
