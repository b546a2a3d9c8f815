"""What the comparison ran on: the processor, its load, and the versions of all that took part."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

from loadtests.compare.work import Provider
from loadtests.errors import LoadTestError
from loadtests.reports import load_averages, machine

_PACKAGES = (
    "maskdial",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "triton",
    "transformers",
    "openvino",
    "openvino-genai",
    "nncf",
    "llama-cpp-python",
    "onnxruntime-genai",
)
_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


_GPU_FACTS = "name,memory.total,driver_version"


def describe(threads: int, provider: Provider) -> dict[str, Any]:
    """As JSON values.

    Raises:
        LoadTestError: the provider is CUDA, and there is no device.
    """
    processor, flags = _processor()
    return {
        "machine": machine(),
        "processor": processor,
        "instructions": flags,
        "gpu": gpu() if provider == "cuda" else None,
        "threads": threads,
        "load": load_averages(),
        "versions": _versions(),
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [
        *([f"NVIDIA GPU: {facts['gpu']}"] * bool(facts["gpu"])),
        f"{facts['processor']} ({', '.join(facts['instructions'])})",
        f"{facts['machine']}, {facts['threads']} threads a pass, load {facts['load']}",
        versions,
    ]


def gpu() -> str:
    """The first CUDA device's name, memory and driver, as its driver tells them.

    Raises:
        LoadTestError: there is none.
    """
    command = ["nvidia-smi", "--id=0", f"--query-gpu={_GPU_FACTS}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LoadTestError(f"--provider cuda needs an NVIDIA GPU: {error}") from error
    return told.stdout.strip()


def _processor() -> tuple[str, list[str]]:
    """Its name and the instructions that matter here, where the system tells."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return platform.processor() or platform.machine(), []
    facts: dict[str, str] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    has = facts.get("flags", "").split()
    return facts.get("model name", platform.machine()), [flag for flag in _FLAGS if flag in has]


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
