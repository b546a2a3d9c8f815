"""What the comparison ran on: the processor, its load, and the versions of all that took part."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from loadtests.reports import load_averages, machine

_PACKAGES = (
    "maskdial",
    "onnxruntime",
    "torch",
    "transformers",
    "openvino",
    "openvino-genai",
    "nncf",
    "llama-cpp-python",
    "onnxruntime-genai",
)
_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def describe(threads: int) -> dict[str, Any]:
    """As JSON values."""
    processor, flags = _processor()
    return {
        "machine": machine(),
        "processor": processor,
        "instructions": flags,
        "threads": threads,
        "load": load_averages(),
        "versions": _versions(),
    }


def lines(facts: dict[str, Any]) -> list[str]:
    """The same for people."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [
        f"{facts['processor']} ({', '.join(facts['instructions'])})",
        f"{facts['machine']}, {facts['threads']} threads a pass, load {facts['load']}",
        versions,
    ]


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
