"""ONNX Runtime sessions: providers, threads, IO binding."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from maskdial.errors import BundleError, ConfigError
from maskdial.models.bundle import UNWANTED_FUSIONS

Provider = Literal["cpu", "cuda"]

_PROVIDER_NAMES: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
}
_ERRORS_ONLY = 3
# Kernels of attention: flash, memory-efficient, and products one by one (`sdpa_kernel` of the CUDA
# provider). cuDNN's are left out: they are planned anew for each length of a prompt.
_ATTENTION_KERNELS = 1 | 2 | 16
_NOT_CAPTURED = -1


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How sessions run.

    ``intra_op_threads`` is the number of threads for one pass, 0 for one per core.
    ``allow_spinning`` lets threads spin while a pass has nothing for them to do: faster steps for
    one model on cores of its own, slower when several models or processes share them. On CUDA,
    ``stream`` is the stream that passes run in, 0 for one of the session's own, and ``captures``
    lets passes be captured as CUDA graphs.
    """

    provider: Provider = "cpu"
    intra_op_threads: int = 0
    allow_spinning: bool = False
    stream: int = 0
    captures: bool = False


def has_provider(provider: Provider) -> bool:
    """Whether this installation's ONNX Runtime was built with a provider."""
    return _PROVIDER_NAMES[provider] in ort.get_available_providers()


class Session:
    """One graph, loaded. Runs release the GIL; one thread at a time should run it."""

    def __init__(
        self,
        graph: Path,
        options: SessionOptions,
        free_dimensions: Mapping[str, int] | None = None,
    ) -> None:
        """Loads a graph.

        ``free_dimensions`` gives symbolic dimensions their sizes, so that what depends on them is
        computed once.

        Raises:
            BundleError: ONNX Runtime cannot load it.
            ConfigError: the provider did not come up (no device, a missing library).
        """
        wanted = _PROVIDER_NAMES[options.provider]
        try:
            self._session = ort.InferenceSession(
                str(graph),
                _session_options(options, free_dimensions or {}),
                providers=[(wanted, _provider_options(options))],
                disabled_optimizers=UNWANTED_FUSIONS if options.provider == "cpu" else (),
                # Without it a provider that fails is another one, with a message on stdout.
                enable_fallback=False,
            )
        except Exception as error:  # its exceptions share no other base
            raise BundleError(f"ONNX Runtime cannot load {graph}: {error}") from error
        if wanted not in self._session.get_providers():
            raise ConfigError(
                f"provider {options.provider!r} did not start; are its libraries there, and of the "
                "versions that this ONNX Runtime was built for?"
            )
        self.provider: Provider = options.provider
        self.captures = options.captures
        self.input_names = frozenset(value.name for value in self._session.get_inputs())
        self.output_names = tuple(value.name for value in self._session.get_outputs())

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """One pass; the graph's first output. Feeds that the graph does not know are left out."""
        declared = {name: array for name, array in feeds.items() if name in self.input_names}
        (output,) = self._session.run(self.output_names[:1], declared)
        return cast(NDArray[np.float32], output)

    def io_binding(self) -> ort.IOBinding:
        """A new binding of this session's inputs and outputs to memory."""
        return self._session.io_binding()

    def run_with_binding(self, binding: ort.IOBinding, capture: int | None = None) -> None:
        """One pass over bound memory.

        With a number, ``capture``, the pass is captured as a CUDA graph of that number when it
        first runs in a thread, and replayed when it runs there again: its bindings, its shapes and
        what the graph's nodes on the CPU read must always be the same. The session must be one that
        ``captures``.
        """
        if not self.captures:
            self._session.run_with_iobinding(binding)
            return
        options = ort.RunOptions()
        number = _NOT_CAPTURED if capture is None else capture
        options.add_run_config_entry("gpu_graph_id", str(number))
        self._session.run_with_iobinding(binding, options)


def _session_options(
    options: SessionOptions, free_dimensions: Mapping[str, int]
) -> ort.SessionOptions:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.intra_op_threads
    settings.inter_op_num_threads = 1
    settings.log_severity_level = _ERRORS_ONLY
    settings.add_session_config_entry(
        "session.intra_op.allow_spinning", str(int(options.allow_spinning))
    )
    # Spinning ends with the pass: what runs between passes has all cores.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    for name, size in free_dimensions.items():
        settings.add_free_dimension_override_by_name(name, size)
    return settings


def _provider_options(options: SessionOptions) -> dict[str, str]:
    """What the provider is asked for; ONNX Runtime's documentation of it has the names."""
    if options.provider == "cpu":
        return {}
    wanted = {
        # Products of float32 keep its precision, and normalisation is summed up in float32.
        "use_tf32": "0",
        "sdpa_kernel": str(_ATTENTION_KERNELS),
        "enable_skip_layer_norm_strict_mode": "1",
        # The memory beside the KV cache grows by what a pass needs, not to the next power of two.
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": str(int(options.captures)),
    }
    if options.stream:
        wanted["user_compute_stream"] = str(options.stream)
    return wanted
