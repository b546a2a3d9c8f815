"""Which hashes of large files were computed before, so that a start need not compute them again.

SHA-256 takes three seconds for a gigabyte on processors without instructions for it. What tells
that a file is the one that was hashed is its stamp, which ends in the time of its last change
(``ctime``). Every write sets that to the present, and no program can set it to another time. A
file whose last change was a moment before it was hashed may be changed again within the same tick
of the clock, so it is not remembered. What a stamp cannot tell is that a disk has lost a bit since;
the golden check computes with the weights at each start.
"""

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "MASKDIAL_CACHE"
"""The environment variable that says where the cache is."""

_FOLDER = ".verified"
_TICK_NS = 10**9
"""Clocks of file systems have steps of some milliseconds; those over a network differ from ours."""


def find_cache() -> Path:
    """Where the cache is: ``MASKDIAL_CACHE``, or ``maskdial`` where the system has its caches."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "maskdial"


def known_sha256(file: Path, compute: Callable[[Path], str]) -> str:
    """The hex SHA-256 of a file's bytes, computed unless it was before.

    Raises:
        OSError: it cannot be read.
    """
    stamp, path = _stamp(file), _record(file)
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        content = json.loads(path.read_bytes())
        if content["stamp"] == stamp:
            return str(content["sha256"])
    began_ns = time.time_ns()
    sha256 = compute(file)
    if _stamp(file) == stamp and began_ns - stamp[-1] >= _TICK_NS:
        _keep(file, sha256, stamp)
    return sha256


def remember_sha256(file: Path, sha256: str) -> None:
    """Remembers the hash of a file whose only writer computed it after its last write.

    Raises:
        OSError: the file is missing.
    """
    stamp = _stamp(file)
    if time.time_ns() - stamp[-1] >= _TICK_NS:
        _keep(file, sha256, stamp)


def _record(file: Path) -> Path:
    name = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]
    return find_cache() / _FOLDER / f"{name}.json"


def _keep(file: Path, sha256: str, stamp: list[int]) -> None:
    with contextlib.suppress(OSError):  # where it cannot be kept, it is computed again
        _write(_record(file), json.dumps({"stamp": stamp, "sha256": sha256, "file": str(file)}))


def _stamp(file: Path) -> list[int]:
    found = file.stat()
    return [
        *(found.st_dev, found.st_ino, found.st_size),
        *(found.st_mtime_ns, found.st_ctime_ns),
    ]


def _write(path: Path, content: str) -> None:
    """At once, as another process may read it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
    os.replace(name, path)
