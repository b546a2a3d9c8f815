"""Uses a WebGPU device, to find out what it computes; run as a module, in a process of its own.

A driver may end the process that loads it. The last line of the output is a `Device` as JSON; the
size of the largest buffer has to be read from the errors.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

_LENGTH, _HEADS, _HEAD_DIM = 40, 2, 64
"""The shader for long passes is used from 32 tokens on; heads of 64 are the commonest."""
_TOLERANCE = 1e-3
_TOO_LARGE = 2**38  # elements of 4 bytes: no device has such a buffer
_ERRORS_ONLY, _FATAL_ONLY = 3, 4


@dataclass(frozen=True, slots=True)
class Device:
    """What a device computes.

    Attributes:
        attention_works: whether attention over passes of 32 tokens and more is right.
        has_half: whether its shaders have half precision.
        max_buffer_bytes: the size of the largest buffer, if it is known.
    """

    attention_works: bool
    has_half: bool
    max_buffer_bytes: int | None = None


def examine() -> Device:
    """Uses the first device of the plug-in, GPUs before others.

    Raises:
        RuntimeError: it does not return what was written to it.
    """
    import onnxruntime_ep_webgpu as plugin

    from maskdial.kernels.webgpu_attention import attention_check, half_check

    name = plugin.get_ep_name()
    ort.set_default_logger_severity(_ERRORS_ONLY)
    ort.register_execution_provider_library(name, plugin.get_library_path())
    devices = [each for each in ort.get_ep_devices() if each.ep_name == name]
    devices.sort(key=lambda each: each.device.type.name != "GPU")
    settings = ort.SessionOptions()
    settings.log_severity_level = _FATAL_ONLY
    settings.add_provider_for_devices(devices[:1], {})
    _check_copies()
    feeds, wanted = _attention()
    session = ort.InferenceSession(attention_check(_LENGTH, _HEADS, _HEAD_DIM), settings)
    (found,) = session.run(None, feeds)
    attention_works = bool(np.abs(found - wanted).max() <= _TOLERANCE)
    return Device(attention_works, _computes(half_check(), settings))


def provoke_limit() -> None:
    """Has ONNX Runtime report the size of the largest buffer, to the standard error output.

    Python cannot ask it for the limits of a device, but it says which one a request is beyond.
    """
    for _ in range(2):  # the first one is not checked, and fails in the driver
        with suppress(Exception):  # ONNX Runtime's exceptions share no other base
            ort.OrtValue.ortvalue_from_shape_and_type((_TOO_LARGE,), np.float32, "webgpu")


def find_max_buffer_bytes(report: str) -> int | None:
    """The size that `provoke_limit` had reported; None if it was not."""
    found = re.search(r"max buffer size limit \((\d+)\)", report)
    return int(found[1]) if found else None


def _check_copies() -> None:
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    host, back = map(ort.OrtValue.ortvalue_from_numpy, (ones, zeros))
    there = ort.OrtValue.ortvalue_from_shape_and_type((4,), np.float32, "webgpu")
    ort.copy_tensors([host], [there])
    ort.copy_tensors([there], [back])
    if not (back.numpy() == 1).all():
        raise RuntimeError("it does not return what was written to it")


def _attention() -> tuple[Mapping[str, NDArray[np.float32]], NDArray[np.float32]]:
    """Inputs of attention, whose last keys are hidden, and its output in NumPy."""
    rng = np.random.default_rng(0)
    shape = _LENGTH, _HEADS, _HEAD_DIM
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    bias = np.zeros((_LENGTH, _LENGTH), np.float32)
    bias[:, -3:] = -1e30
    scores = np.einsum("qhd,khd->hqk", q, k) * _HEAD_DIM**-0.5 + bias
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    attended = np.einsum("hqk,khd->qhd", weights, v)
    named: dict[str, Any] = {"q": q, "k": k, "v": v}
    feeds = {name: array.reshape(1, _LENGTH, -1) for name, array in named.items()}
    return feeds | {"bias": bias[None, None]}, attended.reshape(1, _LENGTH, -1)


def _computes(graph: bytes, settings: ort.SessionOptions) -> bool:
    """Whether twice 1 is 2 in half precision."""
    try:
        (twice,) = ort.InferenceSession(graph, settings).run(None, {"x": np.ones(4, np.float16)})
    except Exception:  # ONNX Runtime's exceptions share no other base
        return False
    return bool((twice == 2).all())


if __name__ == "__main__":
    print(json.dumps(asdict(examine())), flush=True)
    provoke_limit()  # what was found counts, even if the driver crashes
