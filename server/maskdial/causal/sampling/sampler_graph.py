"""SamplerGraph: one of the graphs that draw tokens on a device, bound to memory there.

`maskdial_export.sampler_graph` builds them, and says what they compute.
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

from maskdial.runtime.memory import Device, DeviceArray, Staging, copy_array, on_host
from maskdial.runtime.session import Session, SessionOptions

FOLDER = Path(__file__).parent / "graphs"
VOCAB_SIZE = "vocab_size"  # what the graphs call that dimension
BLOCK = 512  # tokens, in the graph for draws from the whole vocabulary
MOST_CANDIDATES = 256  # so many the CUDA kernel of TopK finds fast, ties in the order of ids

_ALIGNMENT = 256  # bytes, as of memory from CUDA itself
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
_OF_CANDIDATES = frozenset({"in_top_k", "kept"})


class Kind(enum.Enum):
    """What a graph's rows need."""

    GREEDY = "greedy"
    """The most likely token."""
    FEW = "few"
    """A token drawn from the most likely ones; greedy rows may be among them."""
    ALL = "all"
    """A token drawn from the whole vocabulary."""


def graph_name(kind: Kind, penalised: bool) -> str:
    """The name of a graph's file in `FOLDER`."""
    return f"{kind.value}_penalised.onnx" if penalised else f"{kind.value}.onnx"


class _Block:
    """Arrays that lie one behind the other, so that one copy moves all of them."""

    def __init__(self, fields: Mapping[str, tuple[Any, tuple[int, ...]]]) -> None:
        """``fields`` gives each array's dtype and its shape with the most rows."""
        self._fields: dict[str, tuple[int, np.dtype[Any], tuple[int, ...]]] = {}
        self.num_bytes = 0
        for name, (dtype, shape) in fields.items():
            self._fields[name] = (self.num_bytes, np.dtype(dtype), shape)
            num_bytes = prod(shape) * np.dtype(dtype).itemsize
            self.num_bytes += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

    def on_host(self, memory: NDArray[np.uint8], num_rows: int) -> dict[str, NDArray[Any]]:
        """The first rows of each array, as views."""
        return {
            name: np.ndarray((num_rows, *shape[1:]), dtype, memory, start)
            for name, (start, dtype, shape) in self._fields.items()
        }

    def on_device(self, memory: DeviceArray, num_rows: int) -> dict[str, DeviceArray]:
        """The first rows of each array, in memory of the device."""
        return {
            name: DeviceArray(memory.pointer + start, (num_rows, *shape[1:]), dtype)
            for name, (start, dtype, shape) in self._fields.items()
        }


class SamplerGraph:
    """A graph and its memory: what goes up, what comes down, each by one copy.

    Everything has one address for each number of rows, as a CUDA graph would need it.

    Raises:
        BundleError: ONNX Runtime cannot load the graph.
        ConfigError: the provider did not come up, or the memory is not there.
    """

    def __init__(
        self,
        kind: Kind,
        penalised: bool,
        device: Device,
        *,
        vocab_size: int,
        max_rows: int,
        options: SessionOptions,
    ) -> None:
        graph = FOLDER / graph_name(kind, penalised)
        self._session = Session(graph, replace(options, captures=False), {VOCAB_SIZE: vocab_size})
        self._device = device
        inputs = {name: (dtype, (max_rows, 1)) for name, dtype in _INPUTS.items()}
        self._inputs = _Block({k: v for k, v in inputs.items() if k in self._session.input_names})
        num_candidates = min(vocab_size, MOST_CANDIDATES)
        self._outputs = _Block(
            {
                name: (_OUTPUTS[name], (max_rows, num_candidates if name in _OF_CANDIDATES else 1))
                for name in self._session.output_names
            }
        )
        self._going_up = np.zeros(self._inputs.num_bytes, np.uint8)
        self._staging = Staging(device, self._inputs.num_bytes, np.uint8)
        self._written = device.allocate((self._outputs.num_bytes,), np.dtype(np.uint8))
        self._came_down = device.pinned((self._outputs.num_bytes,), np.dtype(np.uint8))
        self._bindings: dict[tuple[int, int, int], ort.IOBinding] = {}

    def run(
        self,
        logits: DeviceArray,
        inputs: Mapping[str, NDArray[Any]],
        penalties: Mapping[str, DeviceArray],
    ) -> dict[str, NDArray[Any]]:
        """One pass, and waits for it.

        Args:
            logits: float32 (num_rows, vocab_size).
            inputs: one number a row for each input that is no array on the device, by its name;
                those that this graph does not have are left out.
            penalties: ``token_ids`` and ``penalties``, if the graph is one with penalties.

        Returns:
            The outputs, (num_rows, 1), or those of candidates, (num_rows, num_candidates), by
            name. They are valid until the next pass.
        """
        num_rows = len(logits)
        for name, array in self._inputs.on_host(self._going_up, num_rows).items():
            array[:, 0] = inputs[name]
        sent = self._staging.write(self._going_up)
        self._session.run_with_binding(self._binding(logits, sent, penalties))
        copy_array(self._device, on_host(self._came_down), self._written)
        self._device.synchronize()
        return self._outputs.on_host(self._came_down, num_rows)

    def _binding(
        self, logits: DeviceArray, sent: DeviceArray, penalties: Mapping[str, DeviceArray]
    ) -> ort.IOBinding:
        num_rows = len(logits)
        num_penalised = penalties["token_ids"].shape[1] if penalties else 0
        key = logits.pointer, num_rows, num_penalised
        if key not in self._bindings:
            binding = self._session.io_binding()
            inputs = {"logits": logits} | self._inputs.on_device(sent, num_rows) | dict(penalties)
            # Its length alone matters, and is a constant since the graph was loaded.
            inputs["one_row"] = DeviceArray(logits.pointer, logits.shape[1:], logits.dtype)
            outputs = self._outputs.on_device(self._written, num_rows)
            for bind, arrays in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
                for name, array in arrays.items():
                    bind(name, self._device.name, 0, array.dtype, array.shape, array.pointer)
            self._bindings[key] = binding
        return self._bindings[key]
