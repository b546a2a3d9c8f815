"""Where the system gives no more threads or memory, a start ends with a sentence."""

import shlex
import subprocess
import sys
import threading
from pathlib import Path

import onnxruntime
import pytest

from maskdial.config import Config
from maskdial.errors import ConfigError, explain_exhaustion
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.loading import start_models


@pytest.mark.parametrize("name", ["hybrid", "sentiment"])
def test_no_thread_can_be_started(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ConfigError, match="no more threads; raise the limits"):
        start_models(name, STARTER_FOLDER / name, Config(threads=1), Metrics())


def test_other_errors_are_their_own() -> None:
    with pytest.raises(ConfigError, match="no more memory"), explain_exhaustion():
        raise MemoryError
    with pytest.raises(ConfigError, match="no more memory"), explain_exhaustion():
        raise ImportError("onnx.so: failed to map segment from shared object")
    with pytest.raises(RuntimeError, match="bug"), explain_exhaustion():
        raise RuntimeError("bug")


def test_onnx_runtime_gets_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no fault of the graph, nor of the kernels."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("[ONNXRuntimeError] : 6 : Exception during init: std::bad_alloc")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    with pytest.raises(ConfigError, match="no more memory; raise the limits"):
        start_models("hybrid", STARTER_FOLDER / "hybrid", Config(threads=1), Metrics())


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="the system tells no limits")
def test_addresses_that_suffice_for_no_model() -> None:
    """Libraries end a process that can reserve no more: SIGABRT, and not a word on the limit."""
    limited = f"ulimit -v 300000 && exec {shlex.quote(sys.executable)} -m maskdial serve --port 0"
    ended = subprocess.run(["sh", "-c", limited], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "MB of addresses, too few for any model; raise the limit (ulimit -v)" in ended.stderr
    assert "Traceback" not in ended.stderr
