"""How much memory is free: what the machine has, the limits of control groups, and promises."""

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

from maskdial.causal.model import CausalModel
from maskdial.config import Config
from maskdial.errors import ConfigError
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.loading import load_model
from maskdial.runtime import memory
from maskdial.runtime.host_limits import available_bytes, reservable_bytes
from maskdial.runtime.memory import HostMemory

MEMINFO = "MemTotal:  16000 kB\nMemFree:  100 kB\nMemAvailable:   8000 kB\nHugePages_Total:  0\n"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": MEMINFO}, 8000 * 1024),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a.slice/b",
                "sys/fs/cgroup/a.slice/memory.max": 1_000_000,
                "sys/fs/cgroup/a.slice/memory.current": 900_000,
                "sys/fs/cgroup/a.slice/memory.stat": "anon 5\ninactive_file 50000\nslab 1",
                "sys/fs/cgroup/a.slice/b/memory.max": "max",
                "sys/fs/cgroup/a.slice/b/memory.current": 400_000,
            },
            150_000,  # the group above has the limit, and 50,000 bytes of page cache to drop
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/../../host/path",
                "sys/fs/cgroup/memory.max": 500_000,
                "sys/fs/cgroup/memory.current": 600_000,
            },
            0,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "5:cpu,cpuacct:/c\n4:memory:/docker/1234\n0::/",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 700_000,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 300_000,
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 1000",
            },
            401_000,
        ),
    ],
    ids=["unknown", "machine", "version 2", "version 2 in a container", "version 1"],
)
def test_available_bytes(tmp_path: Path, files: dict[str, object], expected: int | None) -> None:
    assert available_bytes(write(tmp_path, files)) == expected


STATM = "50 20 10 1 0 30 0"
LIMITS = "Limit  Soft Limit  Hard Limit  Units\nMax processes  9  9  processes\n"
STRICT = MEMINFO + "CommitLimit: 9000 kB\nCommitted_AS: 8000 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/statm": STATM, "proc/meminfo": STRICT}, None),
        (
            {
                "proc/self/statm": STATM,
                "proc/self/limits": LIMITS + "Max address space  unlimited unlimited  bytes",
                "proc/sys/vm/overcommit_memory": 0,
                "proc/meminfo": STRICT,
            },
            None,
        ),
        (
            {
                "proc/self/statm": STATM,
                "proc/self/limits": LIMITS + f"Max address space  {60 * mmap.PAGESIZE} 1  bytes",
            },
            10 * mmap.PAGESIZE,
        ),
        ({"proc/sys/vm/overcommit_memory": 2, "proc/meminfo": STRICT}, 1000 * 1024),
    ],
    ids=["unknown", "no limits", "unlimited", "address space", "no overcommitment"],
)
def test_reservable_bytes(tmp_path: Path, files: dict[str, object], expected: int | None) -> None:
    assert reservable_bytes(write(tmp_path, files)) == expected


def test_what_cannot_be_reserved_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "reservable_bytes", lambda: 1000)
    assert HostMemory().free_bytes() == 1000


def test_what_was_promised_and_not_written_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**12)
    gc.collect()  # what earlier tests left would be freed in between
    own, other = HostMemory(), HostMemory()
    before = own.free_bytes()
    assert before is not None
    buffer = other.allocate((8 * 2**20,), np.dtype(np.uint8))
    assert own.free_bytes() == before - 8 * 2**20
    other.view(buffer)[: 3 * 2**20] = 1
    assert own.free_bytes() == before - 5 * 2**20
    other.decommit(buffer)
    assert own.free_bytes() == before - 8 * 2**20
    del other
    assert own.free_bytes() == before


def test_slots_and_prefix_cache_fit_into_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = STARTER_FOLDER / "hybrid"
    config = Config(kv_cache_dtype="float")
    roomy = load_model("hybrid", path, config, Metrics())
    assert isinstance(roomy, CausalModel)
    assert roomy.manifest.kv is not None
    slot = roomy.manifest.kv.bytes_per_token * roomy.max_length
    roomy.stop()
    promised = HostMemory().free_bytes
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**12)
    elsewhere = 10**12 - (promised() or 0)
    monkeypatch.setattr(memory, "available_bytes", lambda: elsewhere + int(3.5 * slot))
    tight = load_model("hybrid", path, config, Metrics())
    try:
        assert isinstance(tight, CausalModel)
        assert tight.slots == 3
        assert "prefix cache" in caplog.text
    finally:
        tight.stop()
    del tight
    with pytest.raises(ConfigError, match="--slots 3"):
        load_model("hybrid", path, config.model_copy(update={"slots": 4}), Metrics())
