"""The command `maskdial doctor`: what this machine and installation have, and what is slow.

Each fact is a line; each thing that makes models slow, or keeps them from being served, is a
sentence at the end with what to do about it.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import onnxruntime as ort

import maskdial
from maskdial.errors import ConfigError
from maskdial.extras import how_to_install
from maskdial.kernels.build import library_path
from maskdial.kernels.installed import find_kernels
from maskdial.model_cache import VARIABLE, cache_folder, cached_models
from maskdial.ps import is_reachable
from maskdial.runtime.cores import usable_cores
from maskdial.runtime.host_limits import available_bytes, reservable_bytes
from maskdial_client.transport import DEFAULT_URL

_LITTLE_MEMORY = 2 * 2**30  # bytes
_LITTLE_DISK = 5 * 2**30
_BUSY = 0.25  # of a core that others take
_PACKED_PRODUCTS = ("vnni", "amx", "dotprod")
"""Parts of the names of instruction sets that multiply bytes in one step."""
_PACKAGES = ("onnxruntime", "numpy", "tokenizers", "fastapi", "uvicorn", "llguidance")


def report(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """Prints what there is, then what to do.

    Args:
        cpuinfo: where the system names its processor.

    Returns:
        The exit status: 1 if something keeps models from being served, else 0.
    """
    advice: list[str] = []
    faults: list[str] = []
    for name, text in _facts(cpuinfo, advice, faults):
        print(f"{name:<10} {text}")
    for sentence in faults:
        print(f"fault: {sentence}")
    for sentence in advice:
        print(f"slow: {sentence}")
    if not faults and not advice:
        print("nothing stands in the way")
    return 1 if faults else 0


def _facts(cpuinfo: Path, advice: list[str], faults: list[str]) -> Iterator[tuple[str, str]]:
    yield "maskdial", f"{maskdial.__version__} in {Path(maskdial.__file__).parent}"
    yield "python", f"{platform.python_version()} on {platform.platform(terse=True)}"
    yield "packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    yield "processor", _processor(cpuinfo, advice)
    yield "kernels", _kernels(advice, faults)
    yield "providers", _providers()
    yield "memory", _memory(advice, faults)
    yield "cache", _cache(advice, faults)
    traces = importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
    how = how_to_install("export")
    yield "export", "directly and by torch" if traces else f"directly; by torch after {how}"
    yield "server", _server()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # onnxruntime-gpu in place of onnxruntime
        return "from another package"


def _processor(cpuinfo: Path, advice: list[str]) -> str:
    name = platform.machine()
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if named:
        name = f"{named[0]} ({name})"
    count = os.cpu_count() or 1
    usable = usable_cores()
    text = f"{name}, {count} logical cores"
    if usable is not None:
        text += f", of which this process may use {usable}"
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > _BUSY * count:
        text += f", load {load:.1f}"
        advice.append(
            f"the load average is {load:.1f} on {count} cores, which models share with what runs"
        )
    return text


def _kernels(advice: list[str], faults: list[str]) -> str:
    try:
        kernels = find_kernels("auto")
    except ConfigError as error:
        faults.append(error.message)
        return "cannot be loaded"
    if kernels is None:
        advice.append(
            "without our kernels ONNX Runtime's own operators run, which take several times as "
            "long; build them with 'python -m maskdial.kernels build', which needs a C++ compiler, "
            f"or PyPI's ({how_to_install('kernels')})"
        )
        return f"not built ({library_path().name})"
    if not any(part in kernels.processor for part in _PACKED_PRODUCTS):
        advice.append(
            f"the kernels use {kernels.processor}: this processor, or the virtual machine's "
            "setting for it, has no instructions for products of bytes (AVX-512 VNNI, AVX VNNI or "
            "AMX); a CPU type such as 'host' shows what the hardware has"
        )
    return f"built, with {kernels.processor}"


def _providers() -> str:
    names = [name.removesuffix("ExecutionProvider") for name in ort.get_available_providers()]
    local = [name for name in names if name != "Azure"]  # which asks another host
    return f"{', '.join(local)} of ONNX Runtime {ort.__version__}"


def _memory(advice: list[str], faults: list[str]) -> str:
    free, reservable = available_bytes(), reservable_bytes()
    texts = []
    if free is not None:
        texts.append(f"{free / 1e9:.1f} GB free")
        if free < _LITTLE_MEMORY:
            advice.append(
                f"{free / 1e9:.1f} GB of memory are free: enough for models of some hundred "
                "million weights, not of billions"
            )
    if reservable is not None:
        texts.append(f"{reservable / 1e9:.1f} GB of addresses may be reserved")
        if reservable < _LITTLE_MEMORY:
            faults.append(
                f"the process may reserve no more than {reservable / 1e9:.1f} GB of addresses; "
                "raise the limit (ulimit -v)"
            )
    return ", ".join(texts) or "the system does not tell"


def _cache(advice: list[str], faults: list[str]) -> str:
    try:
        folder = cache_folder()
    except ConfigError as error:
        faults.append(error.message)
        return "cannot be used"
    models = cached_models()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        faults.append(f"the cache {folder} cannot be written; set {VARIABLE} to a folder that can")
    free = shutil.disk_usage(existing).free
    if free < _LITTLE_DISK:
        advice.append(
            f"{free / 1e9:.1f} GB of disk are free at {folder}, too few to take in models of "
            "billions of weights; 'maskdial rm' removes some"
        )
    size = sum(model.num_bytes for model in models)
    return (
        f"{folder}: {len(models)} model{'' if len(models) == 1 else 's'}, {size / 1e9:.1f} GB; "
        f"{free / 1e9:.1f} GB of disk are free"
    )


def _server() -> str:
    if not is_reachable(DEFAULT_URL):
        return f"none at {DEFAULT_URL}"
    return f"something listens at {DEFAULT_URL}; 'maskdial ps' asks what it serves"
