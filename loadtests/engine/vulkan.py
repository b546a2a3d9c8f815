"""What this process gives a GPU to do through Vulkan, counted by a layer of ours."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("vulkan_layer.c")
_NAME = "VK_LAYER_MASKDIAL_traffic"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts since the process began.

    Attributes:
        submissions: of work to the GPU's queue.
        bytes_up: that the host had copied to the GPU's memory, the parameters of shaders included.
        bytes_down: that were copied back.
    """

    submissions: int
    bytes_up: int
    bytes_down: int

    def __sub__(self, before: "Traffic") -> "Traffic":
        return Traffic(*(n - m for n, m in zip(astuple(self), astuple(before), strict=True)))


def count_traffic(folder: Path) -> Callable[[], Traffic] | None:
    """Compiles the layer into a folder, and has Vulkan load it when it is first used.

    Returns:
        What reads the counts, which stay 0 if nothing uses Vulkan; None where there is no Linux or
        no C compiler.
    """
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        return None
    library = folder / "layer.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, _SOURCE], check=True)
    layer = {
        "name": _NAME,
        "type": "GLOBAL",
        "library_path": str(library),
        "api_version": "1.3.0",
        "implementation_version": "1",
        "description": "counts submissions and copies",
    }
    manifest = {"file_format_version": "1.0.0", "layer": layer}
    (folder / "layer.json").write_text(json.dumps(manifest), encoding="utf-8")
    os.environ |= {"VK_LAYER_PATH": str(folder), "VK_INSTANCE_LAYERS": _NAME}
    loaded = ctypes.CDLL(str(library))
    submissions, bytes_up, bytes_down = (
        ctypes.c_uint64.in_dll(loaded, name) for name in ("submissions", "bytes_up", "bytes_down")
    )
    return lambda: Traffic(submissions.value, bytes_up.value, bytes_down.value)
