"""What the machine is. Prints lines, and fails where something is missing.

python -m tools.gpu_session.probe cuda|webgpu|cpu
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

_SECONDS = 20


def main(provider: str) -> int:
    """Prints what there is; returns 0 if models can run on the provider."""
    print(f"Python {platform.python_version()}, {platform.platform()}")
    if provider == "webgpu":
        return _webgpu()
    import onnxruntime as ort

    print(f"onnxruntime {ort.__version__}: {', '.join(ort.get_available_providers())}")
    return 0 if provider == "cpu" else _cuda()


def _cuda() -> int:
    _tell(
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,memory.used,clocks.max.mem,power.limit",
        "--format=csv",
    )
    from maskdial.errors import ConfigError
    from maskdial.runtime.cuda import CudaMemory, check_device
    from maskdial.runtime.providers.cuda import PROVIDER, load_libraries

    if not PROVIDER.in_build():
        print("this ONNX Runtime has no CUDA provider")
        return 1
    try:
        check_device()
        load_libraries()
        print(f"{CudaMemory().free_bytes() / 1e9:.1f} GB of the GPU's memory are free")
    except ConfigError as error:
        print(error.message)
        return 1
    return 0


def _webgpu() -> int:
    """Whether there is a driver of Vulkan, which the plug-in needs."""
    drivers = [
        each
        for folder in ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/nvidia")
        for each in Path(folder).rglob("*icd*.json")
    ]
    print("drivers of Vulkan:", ", ".join(map(str, drivers)) or "none is described")
    return _tell("vulkaninfo", "--summary")


def _tell(*command: str) -> int:
    """Prints what a program says; returns its exit status, 1 if there is no such program."""
    if shutil.which(command[0]) is None:
        print(f"{command[0]} is not installed")
        return 1
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{command[0]} took more than {_SECONDS} s")
        return 1
    print(done.stdout + done.stderr, end="")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
