"""Cores: how many of the machine's physical ones this process may use."""

import math
import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Of version 2: microseconds of processor time, or "max", in each period of microseconds."""


def usable_cores(cpus: Path = _CPUS, quota: Path = _QUOTA) -> int | None:
    """The physical cores that taskset, numactl or a container leave; None if they leave all.

    ONNX Runtime's own default counts and pins to all cores of the machine.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    limit = _quota(quota)
    if len(allowed) == os.cpu_count() and limit is None:
        return None
    cores = len({_siblings(cpus, cpu) for cpu in allowed})
    return max(1, cores if limit is None else min(cores, math.ceil(limit)))


def _siblings(cpus: Path, cpu: int) -> str:
    """What the logical processors of one core have in common."""
    try:
        return (cpus / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return str(cpu)


def _quota(path: Path) -> float | None:
    try:
        time, period = path.read_text().split()
        return None if time == "max" else int(time) / int(period)
    except (OSError, ValueError):
        return None
