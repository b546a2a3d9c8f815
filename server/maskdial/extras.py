"""Extras: how to install what only some of the commands and settings need."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


def how_to_install(extra: str) -> str:
    """The command that adds an extra to this installation, for errors to end with.

    The name maskdial is on no package index, so pip needs the place that this installation came
    from, which it has noted (PEP 610, ``direct_url.json``).
    """
    try:
        noted = json.loads(distribution("maskdial").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        noted = {}
    url = str(noted.get("url", ""))
    folder = Path(url2pathname(urlsplit(url).path)) if url.startswith("file:") else None
    if folder is not None and (folder / "pyproject.toml").is_file():
        editable = "-e " if noted.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}'{folder}[{extra}]'"
    if version_control := noted.get("vcs_info", {}).get("vcs"):
        return f"pip install 'maskdial[{extra}] @ {version_control}+{url}'"
    return (
        f"in a clone of maskdial, pip install '.[{extra}]'; without one, pip install "
        f"'maskdial[{extra}] @ git+URL' with the address of its repository"
    )
