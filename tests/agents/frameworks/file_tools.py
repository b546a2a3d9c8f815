"""The two tools that every framework gets."""

from pathlib import Path


def read_file(path: str) -> str:
    """Reads a text file.

    Args:
        path: where it is.
    """
    return Path(path).read_text(encoding="utf-8")


def edit_file(path: str, old: str, new: str) -> str:
    """Replaces a text in a file.

    Args:
        path: where the file is.
        old: the text to replace.
        new: what it becomes.
    """
    text = Path(path).read_text(encoding="utf-8")
    if text.count(old) != 1:
        return f"{old!r} is {text.count(old)} times in {path}"
    Path(path).write_text(text.replace(old, new), encoding="utf-8")
    return "done"
