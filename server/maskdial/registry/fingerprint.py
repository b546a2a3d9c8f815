"""Fingerprint: what the bits of a model's keys and values depend on, beside adapter and tokens."""

import hashlib
import platform
from pathlib import Path

import onnxruntime as ort

import maskdial
from maskdial.bundle.bundle import Bundle
from maskdial.bundle.manifest import KVLayout
from maskdial.runtime.session import Session, SessionOptions

_CPUINFO = Path("/proc/cpuinfo")
_WEIGHTS = (".onnx", ".data")


def fingerprint(
    bundle: Bundle,
    session: Session,
    options: SessionOptions,
    layout: KVLayout,
    *,
    block_tokens: int,
    chunk_tokens: int,
) -> str:
    """Two servers whose models have the same one compute the same keys and values, to the last bit.

    The tokenizer and the chat template have no part in it: keys and values are of token ids. It is
    rather different once too often, which costs a prompt that is read again, than equal.
    """
    kernels = options.kernels
    files = bundle.manifest.files
    parts = [
        f"files {sorted((name, files[name]) for name in files if name.endswith(_WEIGHTS))}",
        f"layout {layout.model_dump_json()} {block_tokens}",
        f"versions {maskdial.__version__} {ort.__version__}",
        f"provider {options.provider} {_processor()}",
        f"graph {session.kernels} {session.is_exact} {session.multiplies_exactly}",
        # The name has a hash of the sources.
        f"kernels {'' if kernels is None or not session.kernels else kernels.path.name}",
        f"adapters {options.adapters}",
    ]
    if not session.is_exact:  # other products may be divided among threads, or by a chunk's length
        parts.append(f"division {options.intra_op_threads} {chunk_tokens}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _processor() -> str:
    """The instruction sets, by which ONNX Runtime chooses its kernels."""
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    named = ("flags", "Features", "CPU part")  # of x86, and of Arm
    return str(sorted({line for line in lines if line.startswith(named)}))
