"""Joins the graphs of one model: they share a weight file, in which equal tensors are stored once.

These are a model's causal and full graph, bundles of their own before, or its decoder and encoder,
which both look up the tokens' embeddings.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from onnx_ir.external_data import convert_tensors_to_external

from maskdial.bundle.bundle import file_sha256, write_manifest
from maskdial.bundle.manifest import FULL_GRAPH, FULL_MANIFEST, GRAPH, MANIFEST, Manifest
from maskdial_export.tracing.graph import data_file

_Key = tuple[ir.DataType, tuple[int, ...], bytes]


def join(causal: Path, full: Path, manifests: tuple[Manifest, Manifest], folder: Path) -> None:
    """Writes both bundles into ``folder``; the causal one keeps the standard file names.

    Args:
        causal: folder of the bundle under the causal mask.
        full: folder of the bundle under the full mask.
        manifests: their manifests, in this order.
        folder: target folder; may contain other files.

    Raises:
        OSError: a file cannot be written.
    """
    _save_together([causal / GRAPH, full / GRAPH], [folder / GRAPH, folder / FULL_GRAPH])
    weights = data_file(GRAPH)
    hashes = {name: file_sha256(folder / name) for name in (GRAPH, FULL_GRAPH, weights)}
    for source, manifest, graph, manifest_name in (
        (causal, manifests[0], GRAPH, MANIFEST),
        (full, manifests[1], FULL_GRAPH, FULL_MANIFEST),
    ):
        files = {graph: hashes[graph], weights: hashes[weights]}
        for name in manifest.files.keys() - {GRAPH, weights}:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, folder / name)
            files[name] = manifest.files[name]
        files = dict(sorted(files.items()))
        joined = manifest.model_copy(update={"graph": graph, "files": files})
        write_manifest(folder, joined, manifest_name)


def share_weights(folder: Path, graphs: Sequence[str]) -> None:
    """Has graphs in a folder read the weight file of the first of them; the others' are removed.

    Raises:
        OSError: a file cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=".parts.", dir=folder) as parts:
        for name in graphs:
            for file in (name, data_file(name)):
                (folder / file).rename(Path(parts) / file)
        _save_together([Path(parts) / name for name in graphs], [folder / name for name in graphs])


def _save_together(sources: Sequence[Path], targets: Sequence[Path]) -> None:
    """Saves graphs with one shared weight file, next to the first of them."""
    models = [ir.load(source) for source in sources]
    values: dict[_Key, list[ir.Value]] = {}
    for model in models:
        for value in model.graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                values.setdefault(_key(value.const_value), []).append(value)
    tensors = [equal[0].const_value for equal in values.values()]
    shared = convert_tensors_to_external(
        [tensor for tensor in tensors if tensor is not None],
        targets[0].parent,
        data_file(targets[0].name),
    )
    for tensor, equal in zip(shared, values.values(), strict=True):
        for value in equal:
            value.const_value = tensor
    for model, target in zip(models, targets, strict=True):
        ir.save(model, target)


def _key(tensor: ir.ExternalTensor) -> _Key:
    """A key that is the same for equal tensors."""
    shape = tuple(int(size) for size in tensor.shape.numpy())
    return tensor.dtype, shape, hashlib.sha256(tensor.tobytes()).digest()
