"""Builds the library of kernels with the C++ compiler of this machine.

A library's name contains a hash of its sources, so one that was built from others is not loaded.
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from maskdial.errors import ConfigError, io_reason
from maskdial.extras import how_to_install

FOLDER = Path(__file__).parent
"""Where the library is built, and looked for."""

_SOURCES = FOLDER / "src"
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    # A product and a sum in one rounding would differ between processors.
    "-ffp-contract=off",
    # Some compilers trap undefined behavior of C++ in the inner loops.
    "-fno-sanitize=all",
)
# Optimized less: at -O3 the compiler takes minutes for each instruction set.
_SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_PROCESSORS = {
    "x86_64": {
        "scalar": (),
        "avx2": ("-mavx2", "-mfma", "-mf16c"),
        "avxvnni": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
        "avx512vnni": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
    },
    # NEON is part of the base.
    "aarch64": {
        "scalar": ("-DSCALAR",),
        "neon": (),
        "dotprod": ("-march=armv8.2-a+dotprod",),
    },
}
"""Flags of each instruction set that ``processor.cpp`` is compiled for."""
_OF_ZIG = {"-march=armv8.2-a+dotprod": "-mcpu=generic+dotprod"}
"""Flags that ziglang knows by another name."""

_PER_PROCESSOR = "processor.cpp"
_ZIG = "ziglang"


def library_path(folder: Path = FOLDER) -> Path:
    """Where the library of these sources is, or would be."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    return folder / f"maskdial_kernels-{digest.hexdigest()[:12]}.so"


def build(folder: Path = FOLDER, *, sanitize: bool = False) -> Path:
    """Builds the library into a folder, removes older ones from it, and returns the new one.

    The compiler is that of ``CXX``, or g++, clang++, or PyPI's ziglang. ``sanitize`` adds
    AddressSanitizer and UndefinedBehaviorSanitizer, for tests.

    Raises:
        ConfigError: there is no compiler, it fails, or this system is not supported.
    """
    if sys.platform == "win32":
        raise ConfigError("the kernels cannot be built on Windows; the server runs without them")
    flags = (*_FLAGS[:-1], *_SANITIZED) if sanitize else _FLAGS
    command = [*find_compiler(), *flags]
    library = library_path(folder)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        objects = Path(name)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, _compilations(command, objects)))
        built = objects / library.name
        _run([*command, "-shared", *map(str, sorted(objects.glob("*.o"))), "-o", str(built)])
        for older in folder.glob("maskdial_kernels-*.so"):
            older.unlink()
        built.replace(library)
    return library


def find_compiler() -> list[str]:
    """The command of the C++ compiler.

    Raises:
        ConfigError: there is none.
    """
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec(_ZIG):
        return [sys.executable, "-m", _ZIG, "c++"]
    raise ConfigError(
        "there is no C++ compiler to build the kernels with; install g++, or the extra that brings "
        f"one: {how_to_install('kernels')}"
    )


def _compilations(command: list[str], objects: Path) -> list[list[str]]:
    """A command for each object: ``processor.cpp`` becomes one for each instruction set."""
    commands = []
    for source in sorted(_SOURCES.glob("*.cpp")):
        if source.name != _PER_PROCESSOR:
            target = objects / f"{source.stem}.o"
            commands.append([*command, "-c", str(source), "-o", str(target)])
    names = {"AMD64": "x86_64", "arm64": "aarch64"}
    machine = names.get(platform.machine(), platform.machine())
    for name, flags in _PROCESSORS.get(machine, {"scalar": ()}).items():
        target = objects / f"processor_{name}.o"
        source = _SOURCES / _PER_PROCESSOR
        named = [_OF_ZIG.get(flag, flag) if _ZIG in command else flag for flag in flags]
        commands.append([*command, *named, f"-DISA={name}", "-c", str(source), "-o", str(target)])
    return commands


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        reason = io_reason(error)
        raise ConfigError(f"the compiler {command[0]} cannot be run: {reason}") from error
    if done.returncode:
        raise ConfigError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
