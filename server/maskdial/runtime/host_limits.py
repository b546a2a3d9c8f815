"""How much memory the process may still take, by the machine and by its control groups.

Linux only. ``/proc/meminfo`` is described in proc(5), the files of control groups in the kernel's
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken before the system swaps or a control group's limit is reached.

    Page cache that the kernel can drop counts as free. None where the system does not tell.
    """
    meminfo = _read_table(root / "proc/meminfo")
    rooms = list(_rooms_in_groups(root))
    if "MemAvailable:" in meminfo:
        rooms.append(meminfo["MemAvailable:"] * 1024)
    return max(min(rooms), 0) if rooms else None


def reservable_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of addresses that can still be reserved, written or not; None for no limit.

    A process may have one (``ulimit -v``), and the system where it promises no more than it has
    (``vm.overcommit_memory=2``).
    """
    rooms = []
    limit, used = _address_limit(root), _read_words(root / "proc/self/statm")
    if limit is not None and used:
        rooms.append(limit - int(used[0]) * mmap.PAGESIZE)
    if _read_number(root / "proc/sys/vm/overcommit_memory") == 2:
        meminfo = _read_table(root / "proc/meminfo")
        if "CommitLimit:" in meminfo and "Committed_AS:" in meminfo:
            rooms.append((meminfo["CommitLimit:"] - meminfo["Committed_AS:"]) * 1024)
    return max(min(rooms), 0) if rooms else None


def _address_limit(root: Path) -> int | None:
    """The soft limit of the process's address space in bytes."""
    name = "Max address space"
    try:
        lines = (root / "proc/self/limits").read_text().splitlines()
    except OSError:
        return None
    soft = [line.removeprefix(name).split()[0] for line in lines if line.startswith(name)]
    return int(soft[0]) if soft and soft[0].isdecimal() else None


def _rooms_in_groups(root: Path) -> Iterator[int]:
    """What each limited control group leaves, from the process's own up to the topmost one."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            mount, limit, usage, stat = "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            mount, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage, stat = "memory.usage_in_bytes", "total_"
        else:
            continue
        group = root / mount / path.lstrip("/")
        for folder in (group, *group.parents):
            # In a container the path may be the host's, and only the topmost folder be visible.
            total, used = _read_number(folder / limit), _read_number(folder / usage)
            if total is not None and used is not None:
                droppable = _read_table(folder / "memory.stat").get(f"{stat}inactive_file", 0)
                yield total - used + droppable
            if folder == root / mount:
                break


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _read_number(path: Path) -> int | None:
    """The number in a file; None if there is none (``max``: no limit)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_table(path: Path) -> dict[str, int]:
    """A file of lines ``name number``, to which more may be added; empty if it cannot be read."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
