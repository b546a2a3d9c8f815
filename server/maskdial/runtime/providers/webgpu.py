"""The WebGPU provider, a plug-in for GPUs of all makers: Vulkan, Metal and Direct3D 12."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import RLock

import onnxruntime as ort

from maskdial.bundle.bundle import Bundle
from maskdial.errors import BundleError, ConfigError, DeviceLostError
from maskdial.extras import how_to_install
from maskdial.runtime.providers.plugin import devices_of
from maskdial.runtime.providers.provider import Provider
from maskdial.runtime.providers.webgpu_probe import Device, find_max_buffer_bytes
from maskdial.runtime.webgpu import WebGpuMemory

_log = logging.getLogger(__name__)

_PACKAGE = "onnxruntime_ep_webgpu"
_NO_GPU = (
    "there is no GPU that ONNX Runtime's plug-in for WebGPU can use; check its driver (on Linux, "
    "Vulkan's)"
)
_NO_ADAPTER = "No supported adapters"  # Dawn's words
_TIMEOUT = 120  # seconds
_REPORT = 300  # characters
_MAX_ROUND_TRIPS = 2
# Where the plug-in's attention over 32 tokens and more is wrong: it has another shader for fewer.
_SHORT_QUERY_TOKENS = 16
_LOST = re.compile(r"\[Device[^\]]*\] is lost")  # Dawn's words, whatever the reason
_PROBE = ("-m", "maskdial.runtime.providers.webgpu_probe")

# Operators that compute shapes and positions, which are better off on the CPU: small integers,
# which a pass needs there, or once at its beginning.
_BOOKKEEPING = {
    *("Add", "And", "Cast", "Clip", "Concat", "ConstantOfShape", "CumSum", "Div", "Equal"),
    *("Expand", "Flatten", "Gather", "Greater", "GreaterOrEqual", "Identity", "Less"),
    *("LessOrEqual", "Max", "Min", "Mod", "Mul", "Not", "Or", "Range", "ReduceMax"),
    *("ReduceSum", "Reshape", "Shape", "Size", "Slice", "Squeeze", "Sub", "Transpose"),
    *("Unsqueeze", "Where"),
}


class WebGpuProvider(Provider):
    """Runs bundles of all families, the KV cache in the memory of a GPU."""

    name = "webgpu"
    ort_name = "WebGpuExecutionProvider"
    batch_invariant = False  # kernels differ between shapes
    slots = 16
    context_slots = 4
    max_batch_tokens = 4096
    prefill_chunk_tokens = 512
    turn = RLock()

    def __init__(self) -> None:
        self._is_lost = False

    def installed(self) -> bool:
        """Whether there is a plug-in and a GPU: ``auto`` takes no software adapter."""
        if find_spec(_PACKAGE) is None:
            return False
        try:
            return any(map(_is_gpu, self._all_devices()))
        except ConfigError:
            return False

    def check_lost(self, error: Exception) -> None:
        if _LOST.search(str(error)):
            self._is_lost = True
            raise DeviceLostError(
                "the GPU is lost, since its driver crashed or was reset; restart the server"
            ) from error

    def check(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        if manifest.kv is not None and manifest.kv.states:
            raise ConfigError(f"model {bundle.label!r} has recurrent layers, which only CPUs run")
        if self._is_lost:  # ONNX Runtime keeps one device for all sessions
            raise ConfigError("the GPU was lost while the server ran; restart the server")
        if find_spec(_PACKAGE) is None or find_spec("onnx") is None:
            raise ConfigError(
                f"the plug-in for WebGPU is not installed; {how_to_install('webgpu')}"
            )
        (device,) = self.devices()
        found = probe()
        if not found.has_half and manifest.precision in ("fp16", "int4-fp16"):
            raise ConfigError(
                f"model {bundle.label!r} is {manifest.precision}, and the GPU's driver has "
                "no half precision in shaders (shader-f16); export it with --precision int4 or fp32"
            )
        if not _is_gpu(device):
            _log.warning(
                "model %s runs on a software adapter of WebGPU, which is for tests only",
                bundle.label,
            )
        if not found.attention_works:
            _log.warning(
                "the plug-in's attention over 32 tokens and more is wrong on this adapter; model "
                "%s uses slower ways that are right",
                bundle.label,
            )

    def max_query_tokens(self) -> int | None:
        return None if probe().attention_works else _SHORT_QUERY_TOKENS

    def memory(self) -> WebGpuMemory:
        from maskdial.kernels.webgpu import copy_graphs  # needs onnx, which is optional

        limit = probe().max_buffer_bytes
        return WebGpuMemory(self.devices(), copy_graphs(), self.turn, limit)

    def devices(self) -> list[ort.OrtEpDevice]:
        found = self._all_devices()
        if not found:
            raise ConfigError(_NO_GPU)
        return found[:1]

    def rewrite(self, graph: Path) -> bytes:
        from maskdial.kernels.webgpu import rewrite_for_webgpu  # needs onnx, which is optional

        return rewrite_for_webgpu(graph, lambda: probe().attention_works, probe().max_buffer_bytes)

    def check_split(self, graph: Path, on_cpu: Sequence[str], total: int) -> None:
        within = sorted(kind for kind in on_cpu if kind not in _BOOKKEEPING)
        _log.info(
            "%s: WebGPU runs %d of %d operators; the CPU runs %d that compute shapes and "
            "positions, and %d others",
            *(graph, total - len(on_cpu), total, len(on_cpu) - len(within), len(within)),
        )
        if len(within) > _MAX_ROUND_TRIPS:
            kinds = ", ".join(dict.fromkeys(within))
            raise BundleError(
                f"WebGPU has no kernels for {len(within)} of the {total} operators of {graph} "
                f"({kinds}), and a pass would go back and forth between GPU and CPU; serve it on "
                "the CPU, or export it with --precision fp32"
            )

    def _all_devices(self) -> list[ort.OrtEpDevice]:
        """The plug-in's devices, GPUs first.

        Raises:
            ConfigError: the library cannot be loaded.
        """
        import onnxruntime_ep_webgpu as plugin

        found = devices_of(self.ort_name, str(plugin.get_library_path()))
        return sorted(found, key=_is_gpu, reverse=True)


def _is_gpu(device: ort.OrtEpDevice) -> bool:
    """False for a software adapter."""
    return bool(device.device.type.name == "GPU")


@cache
def probe() -> Device:
    """Uses the device in another process, once: a driver may end the process that loads it.

    Raises:
        ConfigError: that process crashed, hung, or could not use the device.
    """
    command = [sys.executable, *_PROBE]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"the GPU does not answer WebGPU within {_TIMEOUT} seconds; check its driver"
        ) from error
    report = done.stderr.decode(errors="replace")
    if done.stdout:
        found = Device(**json.loads(done.stdout.splitlines()[-1]))
        return replace(found, max_buffer_bytes=find_max_buffer_bytes(report))
    if _NO_ADAPTER in report:
        raise ConfigError(_NO_GPU)
    report = " ".join(report.split())[-_REPORT:]
    reason = f" ({report})" if report else ""
    how = f"ends with signal {-done.returncode}" if done.returncode < 0 else "fails"
    raise ConfigError(
        f"a process that uses the GPU through WebGPU {how}{reason}; check its driver (on "
        "Linux, Vulkan's)"
    )


PROVIDER = WebGpuProvider()
