"""Packs what a machine with a GPU and without a network lacks, and unpacks it there.

The machine has Python 3.12 on Linux, x86-64, with torch built for CUDA 13, whose libraries ONNX
Runtime shares. What else it has is in a file with a name on each line, as ``pip freeze`` writes it.
The rest is unpacked from wheels into a folder of its own. Of ONNX Runtime's kernels, those of one
architecture are left (`fatbin.py`): its wheel of 256 MB becomes 51.
"""

import importlib.util
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.gpu_session.fatbin import keep
from tools.image_locks import CONSTRAINTS, LOCKS, PYTHON, ROOT, normalized, pins

WORK = ROOT / "build" / "gpu-session"
PARTS, SITE = WORK / "parts", WORK / "site"

# Of the tests and the exporter, beside the server's own.
_BESIDE = (
    *("cuda-bindings", "cuda-pathfinder", "execnet", "filelock", "hypothesis", "iniconfig"),
    *("onnx-ir", "onnxruntime-gpu", "onnxscript", "pluggy", "psutil", "pytest", "pytest-xdist"),
    *("regex", "safetensors", "sentencepiece", "sortedcontainers", "transformers"),
)
_KERNELS = "libonnxruntime_providers_cuda.so"
# Python's module has the library's code in itself.
_LEFT_OUT = ("capi/libonnxruntime.so.", "capi/libonnxruntime_providers_tensorrt.so")
_GLIBC_MINORS = range(5, 40)


def packages(have: Iterable[str]) -> list[str]:
    """What to carry, ``NAME==VERSION`` each, to a machine that has packages of some names."""
    there = {normalized(line.partition("==")[0].strip()) for line in have}
    server = pins((LOCKS / "server.txt").read_text(encoding="utf-8"))
    pinned = pins(CONSTRAINTS.read_text(encoding="utf-8"))
    wanted = server | {name: pinned.get(name, "") for name in _BESIDE}
    del wanted["onnxruntime"]  # the GPU build has the same folder
    return sorted(
        f"{name}=={version}" if version else name
        for name, version in wanted.items()
        if name not in there
    )


def prepare(have: Iterable[str], architecture: int, part_bytes: int) -> list[Path]:
    """Writes the parts of an archive of all that the machine lacks; returns their paths.

    Raises:
        SystemExit: pip does not find a package.
    """
    wheels = WORK / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)  # of other versions
    _download(packages(have), wheels)
    PARTS.mkdir(parents=True, exist_ok=True)
    for old in PARTS.iterdir():
        old.unlink()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as archive:
        for name, content in _contents(wheels, architecture):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    data = packed.getvalue()
    pieces = [data[start : start + part_bytes] for start in range(0, len(data), part_bytes)]
    paths = []
    for number, piece in enumerate(pieces, 1):
        paths.append(PARTS / f"part-{number:02}-of-{len(pieces):02}")
        paths[-1].write_bytes(piece)
    return paths


def unpack() -> None:
    """Unpacks the parts, unless that was done, and links NVIDIA's libraries beside ONNX Runtime,
    which looks for them there.

    Raises:
        SystemExit: parts are missing.
    """
    if SITE.is_dir():
        return
    parts = sorted(PARTS.glob("part-*"))
    number = int(parts[0].name.rpartition("-")[2]) if parts else 0
    if not parts or len(parts) != number:
        sys.exit(f"{len(parts)} of {number or 'some'} parts are in {PARTS}: send the others first")
    partial = SITE.with_name("site.partial")
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as archive:
        archive.extractall(partial, filter="data")
    for library in (partial / "kernels").iterdir() if (partial / "kernels").is_dir() else ():
        library.rename(ROOT / "server/maskdial/kernels" / library.name)
    spec = importlib.util.find_spec("nvidia")
    if spec is not None and spec.submodule_search_locations:
        (partial / "nvidia").symlink_to(next(iter(spec.submodule_search_locations)))
    partial.rename(SITE)


def _download(wanted: list[str], folder: Path) -> None:
    tags = [f"manylinux_2_{minor}" for minor in _GLIBC_MINORS] + ["manylinux1", "manylinux2014"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder)]
    command += ["--only-binary", ":all:", "--python-version", PYTHON, "--implementation", "cp"]
    command += [f"--platform={tag}_x86_64" for tag in tags]
    if subprocess.run([*command, *wanted]).returncode:
        sys.exit("pip does not find all packages")


def _contents(wheels: Path, architecture: int) -> Iterator[tuple[str, bytes]]:
    """Names in the archive and their content: the wheels' files, and our kernels that are built."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as files:
            for name in files.namelist():
                if name.endswith("/") or any(each in name for each in _LEFT_OUT):
                    continue
                content = files.read(name)
                if name.endswith(_KERNELS):
                    provider = bytearray(content)
                    keep(provider, architecture)
                    content = bytes(provider)
                yield name, content
    for library in (ROOT / "server/maskdial/kernels").glob("*.so"):
        yield f"kernels/{library.name}", library.read_bytes()
