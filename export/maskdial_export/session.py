"""Runs exported graphs in ONNX Runtime the way the server does."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from maskdial.bundle.bundle import LARGE_GRAPH, UNWANTED_FUSIONS
from maskdial.bundle.manifest import ENCODER_GRAPH, KVLayout
from maskdial.kernels.graph import AHEAD, NEW_TOKENS
from maskdial.kernels.installed import Kernels, find_kernels
from maskdial.kernels.rewrite import rewrite
from maskdial.kernels.stored import StoredBlockKernels
from maskdial.runtime.cores import usable_cores
from maskdial.runtime.host_limits import available_bytes as available_bytes

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
_IN_BLOCKS = b"MatMulNBits"
_ELEMENTS = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int16)": np.int16,
    "tensor(int8)": np.int8,
}
"""Of a KV cache."""


def kernels_here() -> Kernels | None:
    """The kernels with which a server on this machine computes quantized models."""
    return find_kernels("auto")


@functools.cache
def block_kernels() -> StoredBlockKernels | None:
    """The kernels that read the blocks of GGUF files; None if they are not built."""
    kernels = kernels_here()
    return None if kernels is None else StoredBlockKernels(kernels.path)


def load_session(
    graph: Path | bytes,
    *,
    prepack: bool = True,
    kernels: Kernels | None = None,
    optimizes: bool = True,
) -> onnxruntime.InferenceSession:
    """A session on the CPU, with the graph optimizations that the server enables.

    Without ``prepack``, matrices of floats are read where the file is mapped, instead of from a
    copy in the order that products like best. Those in blocks are packed all the same: each pass
    would restore all of them to floats, which takes three times as long as all else. With
    ``kernels``, a graph file is rewritten for them, with the KV cache that the server chooses, as
    far as they compute any of it. Without ``optimizes``, nodes run as they are, to the last bit of
    what others than this graph's compute the same way.
    """
    options = onnxruntime.SessionOptions()
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if not prepack and not (isinstance(graph, Path) and _IN_BLOCKS in graph.read_bytes()):
        options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = 4  # errors are raised, and said in words of our own
    # Threads that spin while they wait take the time of others, torch's among them
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    source: Path | bytes = graph
    kept: list[onnxruntime.OrtValue] = []
    if kernels is not None and isinstance(graph, Path):
        rewritten = rewrite(graph, "auto")
        if rewritten.num_replaced:
            source = rewritten.model
            options.intra_op_num_threads = num_cores()
            kept = kernels.prepare(options, graph.parent, rewritten.tables)
    size = source.stat().st_size if isinstance(source, Path) else len(source)
    options.enable_mem_reuse = size < LARGE_GRAPH
    session = onnxruntime.InferenceSession(
        source,
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=UNWANTED_FUSIONS,
    )
    del kept
    return session


def num_cores() -> int:
    """The processors that this process may use."""
    return usable_cores() or os.cpu_count() or 1


class Loaded:
    """A graph file in ONNX Runtime, with that of its encoder if it has one.

    Sessions are created when they are first needed, once, and freed by `free`, as weights take as
    much memory in a session as in torch, unless they are not packed (see `load_session`).
    """

    def __init__(
        self,
        path: Path,
        *,
        prepack: bool = True,
        kernels: Kernels | None = None,
        optimizes: bool = True,
    ) -> None:
        self.path = path
        self.kernels = kernels
        self._prepack = prepack
        self._optimizes = optimizes
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}

    def session(self, name: str | None = None) -> onnxruntime.InferenceSession:
        """The session of the graph, or of the file ``name`` next to it."""
        name = name or self.path.name
        if name not in self._sessions:
            self._sessions[name] = load_session(
                self.path.parent / name,
                prepack=self._prepack,
                kernels=self.kernels,
                optimizes=self._optimizes,
            )
        return self._sessions[name]

    def free(self) -> None:
        """Frees the sessions."""
        self._sessions.clear()


Graph = Path | Loaded


def _loaded(graph: Graph) -> Loaded:
    return graph if isinstance(graph, Loaded) else Loaded(graph)


def _pad(texts: Sequence[Ids]) -> Ids:
    padded = np.zeros((len(texts), max(map(len, texts))), np.int64)
    for row, text in enumerate(texts):
        padded[row, : len(text)] = text
    return padded


def _flat_rows(texts: Sequence[Ids], positions: Sequence[Ids]) -> Ids:
    """Indices of the texts' positions in the flattened batch, which is padded to the longest."""
    width = max(map(len, texts))
    return np.concatenate([row * width + chosen for row, chosen in enumerate(positions)])


def _split(rows: Floats, positions: Sequence[Ids]) -> list[Floats]:
    return np.split(rows, np.cumsum([len(chosen) for chosen in positions])[:-1])


class MaskedSession:
    """A session for the graph of a masked model."""

    def __init__(self, graph: Graph) -> None:
        self._session = _loaded(graph).session()
        self.inputs = frozenset(value.name for value in self._session.get_inputs())

    def run(
        self,
        texts: Sequence[Ids],
        types: Sequence[Ids] | None = None,
        positions: Sequence[Ids] | None = None,
        pairs: Sequence[Ids] | None = None,
    ) -> list[Floats]:
        """Runs the texts in one batch: an output (num_positions, columns) or (columns,) for each.

        Args:
            texts: token ids, (length,) each.
            types: token types; None for zeros.
            positions: the tokens whose output is wanted; None for all. Ignored by tasks with one
                output per text.
            pairs: of models that score pairs of tokens, (num_pairs, 2), by their places in
                ``positions``; None for each token with the first one of its text.
        """
        positions = positions or [np.arange(len(text)) for text in texts]
        types = types or [np.zeros_like(text) for text in texts]
        feeds = {
            "input_ids": _pad(texts),
            "token_type_ids": _pad(types),
            "lengths": np.array([len(text) for text in texts], np.int32),
            "rows": _flat_rows(texts, positions),
        }
        if "pairs" in self.inputs:
            pairs = pairs or [
                np.stack([np.arange(len(each)), np.zeros_like(each)], axis=1) for each in positions
            ]
            firsts = np.cumsum([0, *(len(each) for each in positions)])
            feeds["pairs"] = np.concatenate([*map(np.add, pairs, firsts)])
            positions = pairs
        declared = {name: value for name, value in feeds.items() if name in self.inputs}
        output = self._session.run(None, declared)[0]
        return _split(output, positions) if "rows" in self.inputs else list(output)


class CanvasSession:
    """A session for the graph of a model that writes canvases."""

    def __init__(self, graph: Graph) -> None:
        self._session = _loaded(graph).session()

    def run(
        self, texts: Sequence[Ids], soft: Sequence[Floats], temperatures: Sequence[float]
    ) -> list[Floats]:
        """Runs the texts in one batch: an output (num_canvas, vocab_size + hidden_size) for each.

        Args:
            texts: token ids, (length,) each; the canvas is at the end.
            soft: what each canvas has of the pass before, (num_canvas, hidden_size).
            temperatures: of each text.
        """
        sizes = [len(each) for each in soft]
        canvases = [
            np.arange(len(text) - size, len(text)) for text, size in zip(texts, sizes, strict=True)
        ]
        feeds = {
            "input_ids": _pad(texts),
            "lengths": np.array([len(text) for text in texts], np.int32),
            "canvas": np.array(sizes, np.int32),
            "rows": _flat_rows(texts, canvases),
            "soft": np.concatenate(soft),
            "temperatures": np.repeat(np.array(temperatures, np.float32), sizes),
        }
        return _split(self._session.run(None, feeds)[0], canvases)


class CausalSession:
    """A session for the graph of a causal model, with a KV cache of one slot per text.

    A slot of which no token was ``seen`` has states of zeros. ``hidden`` are the hidden states of
    all tokens of the last pass, (num_tokens, hidden_size), if the graph gives them.
    """

    hidden: Floats

    def __init__(self, graph: Graph, layout: KVLayout, slots: int, room: int) -> None:
        self._session = _loaded(graph).session()
        inputs = {value.name: value for value in self._session.get_inputs()}
        self.inputs = frozenset(inputs)
        self._outputs = {value.name for value in self._session.get_outputs()}
        self._cache: dict[str, NDArray[Any]] = {}
        for layer, heads in enumerate(layout.layers):
            for kind in ("key", "value"):
                past = inputs[f"past_{kind}.{layer}"]
                width = past.shape[-1]  # integers have a header
                if not isinstance(width, int):
                    width = heads.head_dim
                shape = slots, heads.num_heads, room, width
                self._cache[f"{kind}.{layer}"] = np.zeros(shape, _ELEMENTS[past.type])
        self._states = {
            f"state.{i}": np.zeros((slots, *shape), np.float32)
            for i, shape in enumerate(layout.states)
        }
        self.seen = np.zeros(slots, np.int64)

    def run(
        self,
        first_slot: int,
        texts: Sequence[Ids],
        positions: Sequence[Ids] | None = None,
        previous_hidden: Floats | None = None,
    ) -> list[Floats]:
        """Appends a text to each slot from ``first_slot``; returns logits (length, vocab_size).

        ``positions`` are the tokens of each text whose logits are wanted; None for all.
        ``previous_hidden`` (length, hidden_size) is what a graph for multi-token prediction reads
        with its text.
        """
        slots = slice(first_slot, first_slot + len(texts))
        seen = self.seen[slots]
        lengths = [len(text) for text in texts]
        totals = seen + lengths
        for state in self._states.values():
            state[slots][seen == 0] = 0
        wanted = positions or [np.arange(len(text)) for text in texts]
        feeds: dict[str, NDArray[Any]] = {
            **self._tokens(texts, seen, wanted),
            "seqlens_k": (totals - 1).astype(np.int32),
            "total_sequence_length": np.array(totals.max(), np.int32),
            "lengths": np.array(lengths, np.int32),
        }
        if previous_hidden is not None:
            feeds["previous_hidden"] = np.ascontiguousarray(previous_hidden[None])
        binding = self._session.io_binding()
        for name, array in feeds.items():
            if name in self.inputs:
                binding.bind_cpu_input(name, array)
        for name, cache in (self._cache | self._states).items():
            # past and present share memory, as in the server
            view = cache[slots]
            place = ("cpu", 0, cache.dtype, view.shape, view.ctypes.data)
            binding.bind_input(f"past_{name}", *place)
            if f"present_{name}" in self._outputs:
                binding.bind_output(f"present_{name}", *place)
        if "hidden" in self._outputs:
            binding.bind_output("hidden")
        binding.bind_output("logits")
        self._session.run_with_iobinding(binding)
        self.seen[slots] = totals
        *before, logits = binding.get_outputs()
        if "hidden" in self._outputs:
            self.hidden = before[-1].numpy()
        return _split(logits.numpy(), wanted)

    def _tokens(
        self, texts: Sequence[Ids], seen: Ids, wanted: Sequence[Ids]
    ) -> dict[str, NDArray[Any]]:
        """The inputs with a number for each token: in padded rows, or one after the other where the
        kernels read how many each row has.
        """
        if NEW_TOKENS not in self.inputs:
            ids = _pad(texts)
            places = seen[:, None] + np.arange(ids.shape[1])
            return {"input_ids": ids, "position_ids": places, "rows": _flat_rows(texts, wanted)}
        counts = np.array([len(text) for text in texts])
        firsts = np.cumsum(counts) - counts
        positions = [start + np.arange(count) for start, count in zip(seen, counts, strict=True)]
        rows = [first + chosen for first, chosen in zip(firsts, wanted, strict=True)]
        return {
            "input_ids": np.concatenate(texts)[None],
            "position_ids": np.concatenate(positions)[None],
            "rows": np.concatenate(rows),
            NEW_TOKENS: counts.astype(np.int32),
            AHEAD: np.zeros(counts.sum(), np.int32),
        }


class EncoderDecoderSession:
    """Sessions for both graphs of an encoder-decoder model, with caches of one slot per text."""

    def __init__(
        self, graph: Graph, layout: KVLayout, slots: int, room: int, source_room: int
    ) -> None:
        """``graph`` is the decoder's, next to the encoder's."""
        loaded = _loaded(graph)
        self._encoder = loaded.session(ENCODER_GRAPH)
        self._decoder = loaded.session()
        self.inputs = frozenset(value.name for value in self._decoder.get_inputs())
        self._outputs = {value.name for value in self._decoder.get_outputs()}
        layers = range(len(layout.layers))
        num_heads, head_dim = layout.layers[0]
        self._names = [f"{kind}.{i}" for i in layers for kind in ("key", "value")]
        shape = (slots, num_heads, room, head_dim)
        source_shape = (slots, num_heads, source_room, head_dim)
        self._past = {name: np.zeros(shape, np.float32) for name in self._names}
        self._cross = {name: np.zeros(source_shape, np.float32) for name in self._names}
        self._source_lengths = np.ones(slots, np.int64)
        self.seen = np.zeros(slots, np.int64)

    def encode(self, first_slot: int, sources: Sequence[Ids]) -> None:
        """Reads a source text into each slot from ``first_slot``, in one batch."""
        lengths = np.array([len(source) for source in sources], np.int32)
        feeds = {"input_ids": _pad(sources), "lengths": lengths}
        outputs = self._encoder.run([f"cross_{name}" for name in self._names], feeds)
        slots = slice(first_slot, first_slot + len(sources))
        for name, output in zip(self._names, outputs, strict=True):
            self._cross[name][slots, :, : output.shape[2]] = output
        self._source_lengths[slots] = lengths
        self.seen[slots] = 0

    def step(self, slots: Sequence[int], token_ids: Sequence[int]) -> Floats:
        """Appends a token to each of these slots; returns logits (num_slots, vocab_size).

        All slots run, so that rows may lie between those that are asked for; what is written
        there is overwritten by the slot's next token.
        """
        count = max(slots) + 1
        ids = np.zeros((count, 1), np.int64)
        ids[list(slots), 0] = token_ids
        sources = self._source_lengths[:count]
        feeds: dict[str, NDArray[Any]] = {
            "input_ids": ids,
            "position_ids": self.seen[:count, None],
            "seqlens_k": self.seen[:count].astype(np.int32),
            "total_sequence_length": np.array(self.seen[:count].max() + 1, np.int32),
            "source_seqlens_k": (sources - 1).astype(np.int32),
            "total_source_length": np.array(sources.max(), np.int32),
            "rows": np.array(slots, np.int64),
        }
        binding = self._decoder.io_binding()
        for name, array in feeds.items():
            if name in self.inputs:
                binding.bind_cpu_input(name, array)
        for name in self._names:
            for prefix, cache in (("past", self._past), ("cross", self._cross)):
                view = cache[name][:count]
                place = ("cpu", 0, np.float32, view.shape, view.ctypes.data)
                binding.bind_input(f"{prefix}_{name}", *place)
                if prefix == "past" and f"present_{name}" in self._outputs:
                    binding.bind_output(f"present_{name}", *place)
        binding.bind_output("logits")
        self._decoder.run_with_iobinding(binding)
        self.seen[list(slots)] += 1
        logits: Floats = binding.get_outputs()[-1].numpy()
        return logits
