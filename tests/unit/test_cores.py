"""The cores that a process may use."""

import os
from pathlib import Path

import pytest

from maskdial.runtime.cores import usable_cores


@pytest.mark.parametrize(
    ("allowed", "quota", "cores"),
    [
        (range(8), None, None),
        (range(8), "max 100000", None),
        (range(8), "unreadable", None),
        (range(4), None, 2),
        ({0, 2, 7}, "max 100000", 3),
        (range(8), "250000 100000", 3),
        (range(8), "9900000 100000", 4),
        ({0, 1}, "400000 100000", 1),
        (range(8), "1000 100000", 1),
    ],
)
def test_affinity_and_quotas_limit_the_physical_cores(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: set[int],
    quota: str | None,
    cores: int | None,
) -> None:
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        first = cpu // 2 * 2
        (topology / "thread_siblings_list").write_text(f"{first}-{first + 1}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    limit = tmp_path / "cpu.max"
    if quota is not None:
        limit.write_text(quota + "\n")
    assert usable_cores(tmp_path, limit) == cores
