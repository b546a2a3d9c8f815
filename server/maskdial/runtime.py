"""ONNX Runtime sessions: providers, threads, IO binding."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from maskdial.bundle import UNWANTED_FUSIONS
from maskdial.errors import BundleError, ConfigError

Provider = Literal["cpu", "cuda"]

_PROVIDER_NAMES: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
}
_ERRORS_ONLY = 3


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How sessions run.

    ``intra_op_threads`` is the number of threads for one pass, 0 for one per core.
    ``allow_spinning`` lets threads spin while a pass has nothing for them to do: faster steps for
    one model on cores of its own, slower when several models or processes share them.
    """

    provider: Provider = "cpu"
    intra_op_threads: int = 0
    allow_spinning: bool = False


def resolve_provider(asked: Literal["auto", "cpu", "cuda"]) -> Provider:
    """The provider to use; ``auto`` takes CUDA where this ONNX Runtime has it.

    Raises:
        ConfigError: the provider that was asked for is not in this installation.
    """
    available = ort.get_available_providers()
    if asked == "auto":
        return "cuda" if _PROVIDER_NAMES["cuda"] in available else "cpu"
    if _PROVIDER_NAMES[asked] not in available:
        raise ConfigError(
            f"provider {asked!r} was asked for, but this ONNX Runtime has only "
            f"{', '.join(available)}; install onnxruntime-gpu, or use --provider cpu"
        )
    return asked


class Session:
    """One graph, loaded. Runs release the GIL; one thread at a time should run it."""

    def __init__(self, graph: Path, options: SessionOptions) -> None:
        """Loads a graph.

        Raises:
            BundleError: ONNX Runtime cannot load it.
            ConfigError: the provider did not come up (no device, a missing library).
        """
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = options.intra_op_threads
        settings.inter_op_num_threads = 1
        settings.log_severity_level = _ERRORS_ONLY
        settings.add_session_config_entry(
            "session.intra_op.allow_spinning", str(int(options.allow_spinning))
        )
        # Spinning ends with the pass: what runs between passes has all cores.
        settings.add_session_config_entry("session.force_spinning_stop", "1")
        wanted = _PROVIDER_NAMES[options.provider]
        try:
            self._session = ort.InferenceSession(
                str(graph),
                settings,
                providers=[wanted],
                disabled_optimizers=UNWANTED_FUSIONS if options.provider == "cpu" else (),
            )
        except Exception as error:  # its exceptions share no other base
            raise BundleError(f"ONNX Runtime cannot load {graph}: {error}") from error
        if wanted not in self._session.get_providers():
            raise ConfigError(
                f"provider {options.provider!r} did not start; is there a device and its driver?"
            )
        self.provider: Provider = options.provider
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

    def run_with_binding(self, binding: ort.IOBinding) -> None:
        """One pass over bound memory."""
        self._session.run_with_iobinding(binding)
