"""Where a model runs: on the CPU, or on a GPU that is there, works, and has kernels for it."""

import contextlib
import ctypes
import io
import logging
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import onnxruntime as ort

from maskdial.errors import ConfigError
from maskdial.models.bundle import Bundle
from maskdial.runtime.cuda import CudaDevice, check_device
from maskdial.runtime.session import has_provider

_log = logging.getLogger(__name__)


def find_device(bundle: Bundle, asked: Literal["auto", "cpu", "cuda"]) -> CudaDevice | None:
    """The GPU that a model is to run on; None is the CPU.

    ``auto`` takes a GPU where one can be had, and says in the log why it does not.

    Raises:
        ConfigError: CUDA was asked for, and the model cannot run there.
    """
    gpu_build = _gpu_build()
    if asked == "cpu" or (asked == "auto" and not has_provider("cuda") and gpu_build is None):
        return None
    try:
        if not has_provider("cuda"):
            raise ConfigError(
                f"this ONNX Runtime has no CUDA provider; {_how_to_get_it(gpu_build)}"
            )
        check_device()
        _check_kernels(bundle)
        _load_libraries()
        device = CudaDevice()
    except ConfigError as error:
        if asked == "cuda":
            raise ConfigError(
                f"provider 'cuda' was asked for, but {error.message}; or use --provider cpu"
            ) from error
        _log.info("model %s runs on the CPU: %s", bundle.label, error.message)
        return None
    return device


def _gpu_build() -> str | None:
    """The version of ONNX Runtime's CUDA build that pip installed.

    It may be overwritten: both builds are the folder ``onnxruntime``, and the last one is in it.
    """
    try:
        return version("onnxruntime-gpu")
    except PackageNotFoundError:
        return None


def _how_to_get_it(gpu_build: str | None) -> str:
    if gpu_build is None:
        return "pip install 'maskdial[cuda]'"
    return f"pip install --force-reinstall --no-deps onnxruntime-gpu=={gpu_build}"


def _load_libraries() -> None:
    """Loads what the provider needs: NVIDIA's wheels where they are installed, or the system's.

    Raises:
        ConfigError: one of the libraries is missing.
    """
    said = io.StringIO()  # it prints what it does not find, also where nothing is missed
    with contextlib.redirect_stdout(said):
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


def _check_kernels(bundle: Bundle) -> None:
    """Refuses what would run on the CPU all the same, node by node, with copies in between.

    Raises:
        ConfigError: ONNX Runtime's CUDA provider has no kernels for the bundle.
    """
    manifest = bundle.manifest
    if manifest.precision in ("int8", "int4"):
        reason = f"is {manifest.precision}, which is for CPUs"
    elif manifest.family == "causal" and manifest.kv is not None and manifest.kv.dtype != "float16":
        reason = f"is {manifest.precision}, and CUDA attends over a cache in half precision only"
    else:
        return
    raise ConfigError(
        f"model {bundle.label!r} {reason}; export it with --precision fp16 or int4-fp16"
    )
