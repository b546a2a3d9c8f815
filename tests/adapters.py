"""Adapter bundles with random matrices, for tests that train none."""

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.adapter import (
    ADAPTER_MANIFEST,
    ADAPTER_WEIGHTS,
    AdapterManifest,
    AdapterParity,
    LowRank,
)
from maskdial.bundle.bundle import read_manifests
from maskdial.kernels.rewrite import rewrite

NAMES = {"float16": "F16", "float32": "F32"}


def random_matrices(
    base: Path, seed: int, rank: int = 4, layers: str = "", size: float = 0.1
) -> dict[str, LowRank]:
    """Matrices for the layers that all graphs of a bundle have, whose names end in ``layers``."""
    generator = np.random.default_rng(seed)
    manifests = read_manifests("base", base)
    graphs = [rewrite(base / each.graph, adapters=True).projections for each in manifests]

    def draw(columns: int) -> NDArray[np.float16]:
        return (size * generator.normal(size=(rank, columns))).astype(np.float16)

    return {
        layer: LowRank(draw(place.num_inputs), draw(place.num_outputs))
        for layer, place in graphs[0].items()
        if layer.endswith(layers) and all(layer in graph for graph in graphs)
    }


def pack_tensors(tensors: Mapping[str, NDArray[np.generic]]) -> bytes:
    """A safetensors file."""
    header, data = {}, b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        kind, shape = NAMES[array.dtype.name], list(array.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_adapter(folder: Path, base: Path, content: bytes, **changes: object) -> Path:
    """An adapter bundle with these weights, and with these changes of its manifest."""
    (first, *_) = read_manifests("base", base)
    manifest = AdapterManifest(
        source=folder.name,
        base=first.source,
        base_sha256=first.source_sha256,
        dtype="float16",
        rank=4,
        num_layers=1,
        tool_versions={},
        parity=AdapterParity(tolerance=1, difference=0),
        weights_sha256=hashlib.sha256(content).hexdigest(),
    )
    folder.mkdir(parents=True)
    (folder / ADAPTER_WEIGHTS).write_bytes(content)
    text = manifest.model_copy(update=changes).model_dump_json()
    (folder / ADAPTER_MANIFEST).write_text(text)
    return folder


def make_adapter(
    folder: Path, base: Path, seed: int, rank: int = 4, layers: str = "", size: float = 0.1
) -> Path:
    """An adapter bundle with random matrices."""
    matrices = random_matrices(base, seed, rank, layers, size)
    tensors = {f"{layer}.a": each.a for layer, each in matrices.items()}
    tensors |= {f"{layer}.b": each.b for layer, each in matrices.items()}
    return write_adapter(folder, base, pack_tensors(tensors))
