"""The JSON files of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from maskdial_export.errors import ExportError


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file is missing.

    Raises:
        ExportError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path} is not a JSON object")
    return content
