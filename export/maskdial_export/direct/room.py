"""Whether there is room for a bundle, before the work: in memory, and on its disk."""

import math
import shutil
from collections.abc import Mapping, Set
from pathlib import Path

from maskdial_export.errors import ExportError
from maskdial_export.session import available_bytes

_WORKSPACE = 700 * 10**6
"""Bytes of memory that an export takes beside weights: modules, parts of matrices, passes."""


def num_bytes(
    shapes: Mapping[str, tuple[int, ...]], *, rounds: bool, fours: Set[str] = frozenset()
) -> int:
    """About how many bytes a bundle's weights take, on disk and in memory.

    Args:
        shapes: those of the weights, by name.
        rounds: whether matrices are integers, with scales.
        fours: the names of those that have 4 bits, and not 8.
    """
    needed = 0.0
    for name, shape in shapes.items():
        bits = 32
        if rounds and len(shape) > 1:
            bits = 5 if name in fours else 9
        needed += math.prod(shape) * bits / 8
    return int(needed)


def check_memory(name: str, needed: int, *, as_int8: int | None) -> None:
    """Refuses a model that does not fit into memory: the system would end the process.

    The checks load the bundle as a server does. What else there is has a bounded size.

    Args:
        name: the checkpoint's, for the error.
        needed: bytes that its weights take.
        as_int8: those of int8, which is smaller; None if that is what was asked for.

    Raises:
        ExportError: it does not fit.
    """
    free = available_bytes()
    if free is None or needed + _WORKSPACE <= free:
        return
    smaller = "take a file of fewer bits, or a smaller model"
    if as_int8 is not None and as_int8 + _WORKSPACE <= free:
        smaller = f"--precision int8 would need {(as_int8 + _WORKSPACE) / 1e9:.1f}"
    raise ExportError(
        f"{name} needs {(needed + _WORKSPACE) / 1e9:.1f} GB of memory, and {free / 1e9:.1f} are "
        f"free; {smaller}"
    )


def check_disk(needed: int, folder: Path) -> None:
    """Refuses a bundle that is too large for the disk.

    Raises:
        ExportError: at least so much room is missing.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ExportError(
            f"the bundle takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free on its disk; "
            "make room, or choose another folder (the cache is MASKDIAL_CACHE)"
        )
