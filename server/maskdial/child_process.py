"""The environment of child processes, which get no secrets: they work on what strangers send."""

import os
import sys
from collections.abc import Mapping

_NAMES = frozenset(
    {
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "PATH",
        "SYSTEMROOT",
        "TEMP",
        "TMP",
        "TMPDIR",
        "TZ",
        "VIRTUAL_ENV",
    }
)
_PREFIXES = ("COVERAGE_", "LC_", "PYTHON")


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What a child process needs to run this Python with these packages, and nothing else.

    It is a list of what may pass: of what may not, such as keys, tokens and addresses with
    passwords in them, nobody knows all names.
    """
    kept = {
        name: value
        for name, value in environment.items()
        if name in _NAMES or name.startswith(_PREFIXES)
    }
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
