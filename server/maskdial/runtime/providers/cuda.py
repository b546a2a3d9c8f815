"""The CUDA provider, for NVIDIA GPUs."""

import contextlib
import ctypes
import io
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnxruntime as ort

from maskdial.bundle.bundle import Bundle
from maskdial.errors import ConfigError, DeviceLostError
from maskdial.extras import how_to_install
from maskdial.runtime.cuda import TURN, CudaMemory, check_device, lost_reason
from maskdial.runtime.providers.provider import Provider

# Flash, memory-efficient and unfused attention (`sdpa_kernel` of the CUDA provider). cuDNN's is
# left out: it is planned anew for each length of a prompt.
_ATTENTION_KERNELS = 1 | 2 | 16


class CudaProvider(Provider):
    """Runs bundles in half precision, and masked ones in fp32, in the memory of a GPU."""

    name = "cuda"
    ort_name = "CUDAExecutionProvider"
    batch_invariant = False  # kernels differ between batch sizes
    slots = 512
    context_slots = 16
    max_batch_tokens = 4096
    prefill_chunk_tokens = 2048
    # A pass of BERT-base on an H200 takes 2.4 ms, and 0.5 us for each token.
    free_padding = 4096
    pad_multiple = 8  # in half precision the attention kernel for local windows needs it
    # Doubled while a step reads its weights, in less than that from where it multiplies: see
    # tools/cache_simulation.py.
    batch_sizes = (1, 2, 4, 8, 16, 32, 64, 96, *range(128, 257, 32), *range(320, 513, 64))
    captures = True
    turn = TURN

    def installed(self) -> bool:
        return self.in_build() or _gpu_build() is not None

    def check(self, bundle: Bundle) -> None:
        if not self.in_build():
            raise ConfigError(f"this ONNX Runtime has no CUDA provider; {_how_to_get_it()}")
        check_device()
        _check_kernels(bundle)
        load_libraries()

    def check_lost(self, error: Exception) -> None:
        with self.turn:
            reason = lost_reason()
        if reason is not None:
            raise DeviceLostError(f"the GPU is lost ({reason}); restart the server") from error

    def memory(self) -> CudaMemory:
        return CudaMemory()

    def options(self, *, stream: int, captures: bool, threads: int | None) -> dict[str, str]:
        options = {
            # Keep the precision of float32 products, and sum up layer norms in float32.
            "use_tf32": "0",
            "sdpa_kernel": str(_ATTENTION_KERNELS),
            "enable_skip_layer_norm_strict_mode": "1",
            # Grow the arena by what a pass needs, not to the next power of two: the KV cache takes
            # most of the memory.
            "arena_extend_strategy": "kSameAsRequested",
            "enable_cuda_graph": str(int(captures)),
        }
        if stream:
            options["user_compute_stream"] = str(stream)
        return options


def _gpu_build() -> str | None:
    """The version of ONNX Runtime's CUDA build that pip installed.

    The CPU build may have overwritten it: both unpack into the folder ``onnxruntime``.
    """
    try:
        return version("onnxruntime-gpu")
    except PackageNotFoundError:
        return None


def _how_to_get_it() -> str:
    gpu_build = _gpu_build()
    if gpu_build is None:
        return how_to_install("cuda")
    return f"pip install --force-reinstall --no-deps onnxruntime-gpu=={gpu_build}"


def _check_kernels(bundle: Bundle) -> None:
    """Refuses bundles that ONNX Runtime would run on the CPU, node by node, with copies in between.

    Raises:
        ConfigError: ONNX Runtime's CUDA provider has no kernels for the bundle.
    """
    manifest = bundle.manifest
    if manifest.precision in ("int8", "int4"):
        reason = f"is {manifest.precision}, which only CPUs run"
    elif manifest.family == "encoder-decoder":
        raise ConfigError(
            f"model {bundle.label!r} has an encoder and a decoder, which only CPUs run"
        )
    elif manifest.family == "causal" and manifest.kv is not None and manifest.kv.dtype != "float16":
        reason = f"is {manifest.precision}, and CUDA attention needs a KV cache in half precision"
    else:
        return
    raise ConfigError(
        f"model {bundle.label!r} {reason}; export it with --precision fp16 or int4-fp16"
    )


def load_libraries() -> None:
    """Loads the provider's libraries: NVIDIA's wheels if they are installed, or the system's.

    Raises:
        ConfigError: one of them is missing.
    """
    output = io.StringIO()  # it prints what it does not find, even if nothing is missing
    with contextlib.redirect_stdout(output):
        ort.preload_dlls()
    provider = Path(ort.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    if not provider.is_file():  # not Linux
        return
    try:
        ctypes.CDLL(str(provider))
    except OSError as error:
        raise ConfigError(
            f"ONNX Runtime's CUDA provider cannot be loaded ({error}); install the NVIDIA driver, "
            "CUDA 13 and cuDNN 9, or pip install 'onnxruntime-gpu[cuda,cudnn]'"
        ) from error


PROVIDER = CudaProvider()
