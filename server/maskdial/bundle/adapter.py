"""AdapterBundle: a low-rank adapter of a bundle, as `maskdial export-adapter` writes it.

A folder holds::

    adapter.json          the manifest: which base it is for, and how it was checked
    adapter.safetensors   ``LAYER.a`` (rank, inputs) and ``LAYER.b`` (rank, outputs), float16 or
                          float32: the layer's result gets ``(x a^T) b`` added. Scales are folded
                          into ``b``
    head.onnx             if the adapter has a head of its own: what it makes of the base's hidden
                          states (`AdapterHead`)

Layers have the names that the base's checkpoint gives its modules, as the bundle's graph does.
"""

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from maskdial.bundle.manifest import Manifest, ProblemType
from maskdial.errors import BundleError, io_reason

ADAPTER_MANIFEST: Literal["adapter.json"] = "adapter.json"
ADAPTER_WEIGHTS: Literal["adapter.safetensors"] = "adapter.safetensors"
ADAPTER_HEAD: Literal["head.onnx"] = "head.onnx"

_MAX_MANIFEST_BYTES = 2**20
_MAX_FILE_BYTES = 2**32
# safetensors' own limit is 100 MB; the largest adapters name some thousand matrices.
_MAX_HEADER_BYTES = 8 * 2**20
_DTYPES: dict[str, np.dtype[Any]] = {"F16": np.dtype("<f2"), "F32": np.dtype("<f4")}
# The bits of a number's exponent; all of them are set in infinities and NaN.
_EXPONENTS: dict[int, Any] = {2: np.uint16(0x7C00), 4: np.uint32(0x7F800000)}
_LENGTH = struct.Struct("<Q")


class Projection(NamedTuple):
    """A layer of a graph: its inputs and outputs.

    It is computed by ``product``, as the columns from ``first`` on of ``width``: query, key and
    value may be one product.
    """

    num_inputs: int
    num_outputs: int
    product: str
    first: int
    width: int


class LowRank(NamedTuple):
    """A layer's matrices: ``a`` (rank, inputs) and ``b`` (rank, outputs), of one type."""

    a: NDArray[np.generic]
    b: NDArray[np.generic]

    @property
    def num_inputs(self) -> int:
        return int(self.a.shape[1])

    @property
    def num_outputs(self) -> int:
        return int(self.b.shape[1])


class AdapterParity(BaseModel):
    """How the adapter on its base compares with PEFT, in the logits of some texts.

    ``difference`` is the largest one for a base of float32, for others the root mean square by the
    logits' standard deviation; ``base`` is the same of the base without the adapter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tolerance: float
    difference: float
    base: float | None = None


class AdapterHead(BaseModel):
    """A head of an adapter's own, for a base of the task embed-all.

    Its graph takes ``hidden``, float32 (num_rows, hidden_size), the hidden states of one text, and
    returns ``logits``, float32: (num_labels,) for classify, (num_rows, num_labels) for
    token-classify. ``rows`` are the tokens that a classifier reads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: Literal["classify", "token-classify"]
    labels: tuple[str, ...] = Field(min_length=1)
    problem_type: ProblemType | None = None
    rows: Literal["first", "last", "all"]
    sha256: str

    def on(self, base: Manifest) -> Manifest:
        """The manifest of the base with this head in place of its own output."""
        changes = {"task": self.task, "labels": self.labels, "problem_type": self.problem_type}
        return base.model_copy(update={**changes, "embedding": None})


class AdapterManifest(BaseModel):
    """What an adapter's ``adapter.json`` says of its matrices and heads."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    schema_version: Literal[1] = 1
    source: str
    base: str = Field(description="the base's source, for messages")
    base_sha256: str = Field(description="the base's `Manifest.source_sha256`")
    dtype: Literal["float16", "float32"]
    rank: int = Field(ge=0, description="the largest of its layers; 0 if it has a head only")
    num_layers: int = Field(ge=0)
    head: AdapterHead | None = None
    tool_versions: dict[str, str]
    parity: AdapterParity
    weights_sha256: str

    @property
    def digest(self) -> str:
        """A SHA-256 of all that answers depend on: without a head that of the weights, which of
        adapters that have a head only is the same for all.
        """
        if self.head is None:
            return self.weights_sha256
        parts = f"{self.weights_sha256} {self.head.model_dump_json()}"
        return hashlib.sha256(parts.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class AdapterBundle:
    """An adapter that was read and verified. ``head`` is the content of its graph."""

    name: str
    path: Path
    manifest: AdapterManifest
    matrices: Mapping[str, LowRank]
    head: bytes | None = None


def read_adapter_manifest(name: str, path: Path) -> AdapterManifest:
    """The manifest of an adapter's folder; its weights are not read.

    Raises:
        BundleError: there is none, or it is invalid.
    """
    file = path / ADAPTER_MANIFEST
    try:
        if not file.is_file():
            raise BundleError(
                f"adapter {name!r}: {path} has no {ADAPTER_MANIFEST}; make an adapter bundle with "
                "`maskdial export-adapter`"
            )
        if file.stat().st_size > _MAX_MANIFEST_BYTES:
            raise BundleError(f"adapter {name!r}: {file.name} is larger than 1 MiB")
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = io_reason(error)
        raise BundleError(f"adapter {name!r}: {file} is not readable JSON: {reason}") from error
    try:
        return AdapterManifest.model_validate(content)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BundleError(f"adapter {name!r}: {file.name}: {where}: {first['msg']}") from error


def read_adapter(name: str, path: Path) -> AdapterBundle:
    """Reads and verifies an adapter's folder.

    Raises:
        BundleError: a file is missing, invalid or changed, or a number is not finite.
    """
    manifest = read_adapter_manifest(name, path)
    content = _content(name, path / ADAPTER_WEIGHTS, manifest.weights_sha256)
    matrices = _matrices(name, content)
    if manifest.head is None:
        if not matrices:
            raise BundleError(f"adapter {name!r}: {ADAPTER_WEIGHTS} has no matrices")
        return AdapterBundle(name, path, manifest, matrices)
    head = _content(name, path / ADAPTER_HEAD, manifest.head.sha256)
    return AdapterBundle(name, path, manifest, matrices, head)


def _content(name: str, file: Path, sha256: str) -> bytes:
    """Raises: BundleError: it cannot be read, or is not what was exported."""
    try:
        if file.exists() and not file.is_file():  # reading a pipe would not end
            raise BundleError(f"adapter {name!r}: {file.name} is not a file")
        if file.stat().st_size > _MAX_FILE_BYTES:
            raise BundleError(f"adapter {name!r}: {file.name} is larger than 4 GiB")
        content = file.read_bytes()
    except OSError as error:
        raise BundleError(
            f"adapter {name!r}: {file.name} cannot be read: {error.strerror}"
        ) from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise BundleError(
            f"adapter {name!r}: {file.name} has changed since it was exported (SHA-256 differs)"
        )
    return content


def _matrices(name: str, content: bytes) -> dict[str, LowRank]:
    tensors = _tensors(name, content)
    layers = {key.removesuffix(".a") for key in tensors if key.endswith(".a")}
    if tensors.keys() != {f"{layer}.{part}" for layer in layers for part in "ab"}:
        raise BundleError(f"adapter {name!r}: {ADAPTER_WEIGHTS} has not an a and a b of each layer")
    found = {}
    for layer in sorted(layers):
        a, b = tensors[f"{layer}.a"], tensors[f"{layer}.b"]
        if a.dtype != b.dtype or len(a) != len(b):
            raise BundleError(f"adapter {name!r}: a and b of layer {layer!r} do not fit together")
        for matrix in (a, b):
            exponent = _EXPONENTS[matrix.itemsize]
            if np.any((matrix.view(exponent.dtype) & exponent) == exponent):
                raise BundleError(
                    f"adapter {name!r}: layer {layer!r} has numbers that are not finite"
                )
        found[layer] = LowRank(a, b)
    return found


def _tensors(name: str, content: bytes) -> dict[str, NDArray[np.generic]]:
    """The tensors of a safetensors file: nothing in its header is believed."""

    def broken(why: str) -> BundleError:
        return BundleError(f"adapter {name!r}: {ADAPTER_WEIGHTS} is no safetensors file: {why}")

    if len(content) < _LENGTH.size:
        raise broken("it has no header")
    (size,) = _LENGTH.unpack_from(content)
    if size > min(_MAX_HEADER_BYTES, len(content) - _LENGTH.size):
        raise broken(f"its header would have {size:,} bytes")
    data = memoryview(content)[_LENGTH.size + size :]
    try:
        header = json.loads(content[_LENGTH.size : _LENGTH.size + size])
    except (ValueError, RecursionError) as error:
        raise broken("its header is not JSON") from error
    if not isinstance(header, dict):
        raise broken("its header is not an object")
    header.pop("__metadata__", None)
    tensors = {}
    for key, entry in header.items():
        try:
            tensors[key] = _tensor(entry, data)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise broken(f"tensor {key[:100]!r} is not a matrix within it") from error
    return tensors


def _tensor(entry: Any, data: memoryview) -> NDArray[np.generic]:
    """Raises: KeyError, TypeError, ValueError: the entry is not a matrix in the data."""
    dtype = _DTYPES[entry["dtype"]]
    (rows, columns), (start, end) = entry["shape"], entry["data_offsets"]
    numbers = (rows, columns, start, end)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError
    if not rows or not columns or end > len(data):
        raise ValueError
    if end - start != math.prod((rows, columns, dtype.itemsize)):
        raise ValueError
    matrix: NDArray[np.generic] = np.frombuffer(data[start:end], dtype).reshape(rows, columns)
    return matrix
