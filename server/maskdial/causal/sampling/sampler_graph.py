"""SamplerGraph: one of the graphs that draw tokens on a device, bound to its memory.

`maskdial_export.sampler_graph` builds them and describes what they compute.
"""

import enum
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from maskdial.runtime.memory import Buffer, Memory, Staging, copy_buffer, host_buffer
from maskdial.runtime.session import Session, SessionOptions

FOLDER = Path(__file__).parent / "graphs"
VOCAB_SIZE = "vocab_size"  # the name of that dimension in the graphs
BLOCK = 512  # tokens, in the graph for draws from the whole vocabulary
MAX_CANDIDATES = 256  # the CUDA kernel of TopK is fast up to here, and keeps ties in order of id

_ALIGNMENT = 256  # bytes, as cudaMalloc aligns
_INPUTS: dict[str, Any] = {
    "repetition_penalty": np.float32,
    "temperature": np.float32,
    "kth": np.int64,
    "least_total": np.float64,
    "top_p": np.float64,
    "min_p": np.float64,
    "uniform": np.float64,
}
_OUTPUTS: dict[str, Any] = {
    "token_id": np.int64,
    "logprob": np.float32,
    "best": np.float32,
    "total": np.float64,
    "place": np.float64,
    "in_top_k": np.bool_,
    "kept": np.bool_,
}
_PER_CANDIDATE = frozenset({"in_top_k", "kept"})


class Kind(enum.Enum):
    """What a graph draws for its rows."""

    GREEDY = "greedy"
    """The most likely token."""
    FEW = "few"
    """A token drawn from the most likely ones; some rows may be greedy."""
    ALL = "all"
    """A token drawn from the whole vocabulary."""


def graph_name(kind: Kind, penalized: bool) -> str:
    """The name of a graph's file in `FOLDER`."""
    return f"{kind.value}_penalized.onnx" if penalized else f"{kind.value}.onnx"


class _Block:
    """Arrays in one piece of memory, so that a single copy moves all of them.

    Args:
        fields: by name, each array's dtype and its shape with the maximum number of rows.
    """

    def __init__(self, fields: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
        self._fields: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        self.num_bytes = 0
        for name, (dtype, shape) in fields.items():
            self._fields[name] = (self.num_bytes, np.dtype(dtype), shape)
            num_bytes = prod(shape) * np.dtype(dtype).itemsize
            self.num_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def arrays(self, memory: NDArray[np.uint8], num_rows: int) -> dict[str, NDArray[Any]]:
        """The first rows of each array in main memory, as views."""
        return {
            name: np.ndarray((num_rows, *shape[1:]), dtype, memory, start)
            for name, (start, dtype, shape) in self._fields.items()
        }

    def buffers(self, memory: Buffer, num_rows: int) -> dict[str, Buffer]:
        """The first rows of each array in the device's memory."""
        return {
            name: Buffer(memory.pointer + start, (num_rows, *shape[1:]), dtype)
            for name, (start, dtype, shape) in self._fields.items()
        }


class SamplerGraph:
    """A graph and its memory: one copy takes all inputs up, one takes all outputs down.

    Raises:
        BundleError: ONNX Runtime cannot load the graph.
        ConfigError: the provider did not start, or the memory is too small.
    """

    def __init__(
        self,
        kind: Kind,
        penalized: bool,
        memory: Memory,
        *,
        vocab_size: int,
        max_rows: int,
        options: SessionOptions,
    ) -> None:
        graph = FOLDER / graph_name(kind, penalized)
        self._session = Session(graph, replace(options, captures=False), {VOCAB_SIZE: vocab_size})
        self._memory = memory
        inputs = {name: (dtype, (max_rows, 1)) for name, dtype in _INPUTS.items()}
        self._inputs = _Block({k: v for k, v in inputs.items() if k in self._session.input_names})
        num_candidates = min(vocab_size, MAX_CANDIDATES)
        self._outputs = _Block(
            {
                name: (_OUTPUTS[name], (max_rows, num_candidates if name in _PER_CANDIDATE else 1))
                for name in self._session.output_names
            }
        )
        self._upload = np.zeros(self._inputs.num_bytes, np.uint8)
        self._staging = Staging(memory, self._inputs.num_bytes, np.uint8)
        self._written = memory.allocate((self._outputs.num_bytes,), np.dtype(np.uint8))
        self._download = memory.pinned((self._outputs.num_bytes,), np.dtype(np.uint8))
        self._bindings: dict[tuple[int, int, int], ort.IOBinding] = {}

    def run(
        self,
        logits: Buffer,
        inputs: Mapping[str, NDArray[Any]],
        penalties: Mapping[str, Buffer],
    ) -> dict[str, NDArray[Any]]:
        """Runs one pass and waits for it.

        Args:
            logits: float32 (num_rows, vocab_size).
            inputs: (num_rows,) each, by the names of the graph's inputs; those that this graph does
                not have are ignored.
            penalties: ``token_ids`` and ``penalties``, if the graph applies penalties.

        Returns:
            The outputs by name, (num_rows, 1), or (num_rows, num_candidates) if they are per
            candidate. They are valid until the next pass.
        """
        num_rows = len(logits)
        for name, array in self._inputs.arrays(self._upload, num_rows).items():
            array[:, 0] = inputs[name]
        sent = self._staging.write(self._upload)
        self._session.run_with_binding(self._binding(logits, sent, penalties))
        copy_buffer(self._memory, host_buffer(self._download), self._written)
        self._memory.synchronize()
        return self._outputs.arrays(self._download, num_rows)

    def _binding(
        self, logits: Buffer, sent: Buffer, penalties: Mapping[str, Buffer]
    ) -> ort.IOBinding:
        num_rows = len(logits)
        num_penalized = penalties["token_ids"].shape[1] if penalties else 0
        key = logits.pointer, num_rows, num_penalized
        if key not in self._bindings:
            binding = self._session.io_binding()
            inputs = {"logits": logits} | self._inputs.buffers(sent, num_rows) | dict(penalties)
            # The graph reads its shape only, which is a constant since the graph was loaded.
            inputs["one_row"] = Buffer(logits.pointer, logits.shape[1:], logits.dtype)
            outputs = self._outputs.buffers(self._written, num_rows)
            for bind, buffers in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
                for name, buffer in buffers.items():
                    bind(name, self._memory.device, 0, buffer.dtype, buffer.shape, buffer.pointer)
            self._bindings[key] = binding
        return self._bindings[key]
