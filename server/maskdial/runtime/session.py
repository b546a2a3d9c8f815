"""Session: a graph loaded by ONNX Runtime, and how it runs."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from maskdial.bundle.adapter import Projection
from maskdial.bundle.bundle import LARGE_GRAPH
from maskdial.bundle.manifest import CacheChoice, CacheInteger
from maskdial.errors import BundleError, ConfigError, exhaustion
from maskdial.kernels.installed import EXTERNAL_DATA, Kernels
from maskdial.runtime.cores import usable_cores
from maskdial.runtime.numerics import numerics_version
from maskdial.runtime.providers import find_provider
from maskdial.runtime.providers.provider import Provider

_ERRORS_ONLY = 3
_FATAL_ONLY = 4
_NOT_CAPTURED = -1
_REPORT = 600  # characters; no error of one sentence is longer
_HEAD_START = 0.03  # seconds
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How sessions run.

    Attributes:
        provider: name of the execution provider.
        intra_op_threads: number of threads for one pass; None for one per physical core that the
            process may use.
        allow_spinning: whether threads spin while a pass has nothing for them to do: faster steps
            for one model on cores of its own, slower when several models or processes share them.
        stream: pointer of the stream to run passes in; 0 for one of the session's own.
        captures: whether passes can be captured as CUDA graphs.
        kernels: our own kernels for products and attention, for the CPU provider; None for ONNX
            Runtime's.
        kv_cache: what the graph's KV cache is to consist of, if it has one.
        adapters: whether texts may have adapters, which needs the kernels.
        gives_hidden: whether the kernels' graph gives the hidden states of all tokens, if it can.
        meanwhile: called while ONNX Runtime loads the graph, which takes no part in Python then.
        profile: where `Session.end_profile` finds what each operator of each pass did, a file whose
            name begins so; None for no profile.
    """

    provider: str = "cpu"
    intra_op_threads: int | None = None
    allow_spinning: bool = False
    stream: int = 0
    captures: bool = False
    kernels: Kernels | None = None
    kv_cache: CacheChoice = "float"
    adapters: bool = False
    gives_hidden: bool = False
    meanwhile: Callable[[], object] | None = None
    profile: Path | None = None


class PassStop:
    """Stops a pass, from another thread, between two of its operators."""

    def __init__(self) -> None:
        self.options = ort.RunOptions()
        self.options.log_severity_level = _FATAL_ONLY  # a stop is no error
        self.is_set = False

    def set(self) -> None:
        """Stops the pass that runs with it, or is about to."""
        self.is_set = True
        self.options.terminate = True


class Session:
    """One graph, loaded. A pass releases the GIL; only one thread at a time should run passes.

    Attributes:
        turn: held while inputs are bound, since those in main memory are then copied to the device,
            while the pass over them runs, and while what was bound is freed.
        kernels: the instruction set of our kernels, if they compute any part of it; else empty.
        multiplies_exactly: whether they compute all quantized products of the graph, and so without
            saturating; also of a graph that a provider rewrote without products of integers.
        is_exact: whether they compute all products and all attention of a causal graph, so that a
            text gives the same bits token by token and in pieces of any size.
        numerics: the version of its bits (`numerics_version`); empty if they depend on the machine.
        kv_cache: the integers of the graph's KV cache; None if it is one of floats.
        windows: by layer, how many tokens our kernels read, where that is not all.
        projections: the products that adapters may add to, by their layers' names.
    """

    turn: AbstractContextManager[Any] = nullcontext()

    def __init__(
        self,
        graph: Path,
        options: SessionOptions,
        free_dimensions: Mapping[str, int] | None = None,
    ) -> None:
        """Loads a graph.

        ``free_dimensions`` gives sizes to symbolic dimensions, so that ONNX Runtime can fold what
        depends on them.

        Raises:
            BundleError: ONNX Runtime cannot load the graph.
            ConfigError: the provider did not start (no device, a missing library), or there are no
                kernels that can compute the graph over a cache of the integers asked for.
        """
        self._provider = provider = find_provider(options.provider)
        self.turn = provider.turn
        provider_options = provider.options(
            stream=options.stream, captures=options.captures, threads=options.intra_op_threads
        )
        settings = _session_options(options, free_dimensions or {})
        devices = provider.devices()
        if devices:
            settings.add_provider_for_devices(devices, provider_options)
            settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        self.kernels, self.multiplies_exactly, self.is_exact = "", False, False
        self.numerics = ""
        self.kv_cache: CacheInteger | None = None
        self.windows: Mapping[int, int] = {}
        self.projections: Mapping[str, Projection] = {}
        model: str | bytes = str(graph)
        kept: list[ort.OrtValue] = []
        if options.kernels is not None:
            model, kept = self._take_kernels(graph, options.kernels, settings, options)
        elif options.kv_cache not in ("auto", "float"):
            raise ConfigError(
                f"only the kernels can read a KV cache of {options.kv_cache}: build them (python "
                "-m maskdial.kernels build) and serve the model on the CPU, or leave out "
                f"--kv-cache-dtype {options.kv_cache}"
            )
        elif (rewritten := provider.rewrite(graph)) is not None:
            model, self.multiplies_exactly = rewritten, True
            settings.add_session_config_entry(EXTERNAL_DATA, str(graph.parent))
        try:
            if options.provider == "cpu":
                size = len(model) if isinstance(model, bytes) else graph.stat().st_size
                settings.enable_mem_reuse = size < LARGE_GRAPH
            create = partial(
                ort.InferenceSession,
                model,
                settings,
                providers=None if devices else [(provider.ort_name, provider_options)],
                disabled_optimizers=provider.disabled_optimizers,
                # Otherwise ONNX Runtime silently falls back to another provider.
                enable_fallback=False,
            )
            with self.turn:
                self._session = _beside(create, options.meanwhile)
            del kept
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            if exhaustion(error) is not None:
                raise
            remedy = "; serve it with --kernels off" if self.kernels else ""
            reason = " ".join(str(error).split())
            if len(reason) > _REPORT:  # OpenVINO's, which sums it up at the end
                reason = f"{reason[: _REPORT // 2]} ... {reason[-_REPORT // 2 :]}"
            raise BundleError(f"ONNX Runtime cannot load {graph}: {reason}{remedy}") from error
        if provider.ort_name not in self._session.get_providers():
            raise ConfigError(
                f"provider {options.provider!r} did not start; check that its libraries are "
                "installed, in the versions that this ONNX Runtime was built for"
            )
        if devices:
            self._check_split(graph, provider)
        self.captures = options.captures
        self.input_names = frozenset(value.name for value in self._session.get_inputs())
        self.output_names = tuple(value.name for value in self._session.get_outputs())

    def __del__(self) -> None:
        with self.turn:  # its weights leave the device
            self.__dict__.pop("_session", None)

    def _take_kernels(
        self, graph: Path, kernels: Kernels, settings: ort.SessionOptions, options: SessionOptions
    ) -> tuple[str | bytes, list[ort.OrtValue]]:
        """What to load: the graph rewritten for the kernels, or its path if they have no part; and
        what to keep until it is loaded.
        """
        from maskdial.kernels.rewrite import rewrite  # needs onnx, which is optional

        rewritten = rewrite(
            graph,
            options.kv_cache,
            adapters=options.adapters,
            gives_hidden=options.gives_hidden,
        )
        if not rewritten.num_replaced:
            return str(graph), []
        kept = kernels.prepare(settings, graph.parent, rewritten.tables)
        self.kernels, self.multiplies_exactly = kernels.processor, not rewritten.num_left
        self.is_exact = rewritten.is_exact
        if rewritten.is_portable:
            self.numerics = numerics_version(self.kernels)
        self.kv_cache, self.windows = rewritten.kv_cache, rewritten.windows
        self.projections = rewritten.projections
        return rewritten.model, kept

    def _check_split(self, graph: Path, provider: Provider) -> None:
        """Has a plug-in judge which operators it leaves to the CPU."""
        on_cpu, total = [], 0
        for part in self._session.get_provider_graph_assignment_info():
            kinds = [node.op_type for node in part.get_nodes()]
            total += len(kinds)
            on_cpu += kinds if part.ep_name != provider.ort_name else []
        provider.check_split(graph, on_cpu, total)

    def run(self, feeds: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
        """Runs one pass and returns the graph's first output, in the shape that the graph gives it.

        Feeds that the graph does not declare are ignored.
        """
        (output,) = self.run_for(self.output_names[:1], feeds)
        return cast(NDArray[np.float32], output)

    def run_until(
        self, feeds: Mapping[str, NDArray[Any]], stop: PassStop
    ) -> NDArray[np.float32] | None:
        """As `run`; None if the pass was stopped before its end."""
        declared = {name: array for name, array in feeds.items() if name in self.input_names}
        try:
            with self.turn:
                (output,) = self._session.run(self.output_names[:1], declared, stop.options)
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            self._provider.check_lost(error)
            if not stop.is_set:
                raise
            return None
        return cast(NDArray[np.float32], output)

    def run_for(
        self, outputs: Sequence[str], feeds: Mapping[str, NDArray[Any]]
    ) -> list[NDArray[Any]]:
        """Runs one pass and returns the named outputs; feeds as of `run`.

        Raises:
            DeviceLostError: the device is gone.
        """
        declared = {name: array for name, array in feeds.items() if name in self.input_names}
        try:
            with self.turn:
                return cast(list[NDArray[Any]], self._session.run(outputs, declared))
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            self._provider.check_lost(error)
            raise

    def io_binding(self) -> ort.IOBinding:
        """A new binding of this session's inputs and outputs to memory."""
        return self._session.io_binding()

    def end_profile(self) -> Path:
        """Ends a profile; ONNX Runtime's documentation describes the file."""
        return Path(self._session.end_profiling())

    def run_with_binding(self, binding: ort.IOBinding, capture: int | None = None) -> None:
        """Runs one pass over bound memory.

        If the session captures passes, a pass with a number, ``capture``, is captured as the CUDA
        graph of that number when it first runs in a thread, and replayed when it runs there again.
        Its bindings, its shapes and what the graph's nodes on the CPU read must never change.

        Raises:
            DeviceLostError: the device is gone.
        """
        options = None
        if self.captures:
            options = ort.RunOptions()
            number = _NOT_CAPTURED if capture is None else capture
            options.add_run_config_entry("gpu_graph_id", str(number))
        try:
            with self.turn:
                self._session.run_with_iobinding(binding, options)
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            self._provider.check_lost(error)
            raise


def _beside(create: Callable[[], T], meanwhile: Callable[[], object] | None) -> T:
    """Runs ``create`` in a thread while ``meanwhile`` runs in this one."""
    if meanwhile is None:
        return create()
    with ThreadPoolExecutor(1, "maskdial-session") as pool:
        created = pool.submit(create)
        # Until it is in ONNX Runtime it needs the interpreter, which tokenizers keep for seconds.
        wait([created], timeout=_HEAD_START)
        meanwhile()
        return created.result()


def _session_options(
    options: SessionOptions, free_dimensions: Mapping[str, int]
) -> ort.SessionOptions:
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.intra_op_threads or usable_cores() or 0
    settings.inter_op_num_threads = 1
    settings.log_severity_level = _ERRORS_ONLY
    settings.add_session_config_entry(
        "session.intra_op.allow_spinning", str(int(options.allow_spinning))
    )
    # Spinning ends with the pass, so what runs between passes has all cores.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    if options.profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile)
    for name, size in free_dimensions.items():
        settings.add_free_dimension_override_by_name(name, size)
    return settings
