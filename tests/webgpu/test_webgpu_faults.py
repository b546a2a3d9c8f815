"""Drivers that fail: the server says so in a sentence, and goes on or turns red."""

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from maskdial.errors import ConfigError
from maskdial.runtime.providers.webgpu import probe
from tests.http.process import Process
from tests.servers import wait_for

pytestmark = pytest.mark.slow

_LOSES_ITS_DEVICE = """
import sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from maskdial.errors import ConfigError, DeviceLostError
from maskdial.runtime.providers.webgpu import PROVIDER
from maskdial.runtime.session import PassStop, Session, SessionOptions

graph, fault = map(Path, sys.argv[1:])
session, feeds = Session(graph, SessionOptions("webgpu", 1)), {"x": np.ones(4, np.float32)}
assert (session.run(feeds) == 2).all()
fault.write_text("lost")
binding = session.io_binding()
binding.bind_cpu_input("x", feeds["x"])
binding.bind_output("y", "cpu")
stop = PassStop()
for run in (
    lambda: session.run(feeds),
    lambda: session.run_until(feeds, stop),
    lambda: session.run_with_binding(binding),
):
    try:
        run()
    except DeviceLostError as error:
        print(error.message)
fault.write_text("")
try:
    PROVIDER.check(SimpleNamespace(manifest=SimpleNamespace(family="masked", kv=None)))
except ConfigError as error:
    print(error.message)
"""


def test_a_driver_that_crashes_when_it_is_loaded(fault: Path) -> None:
    fault.write_text("crash")
    probe.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match="GPU through WebGPU ends with signal 6; check its driver"
        ):
            probe()
    finally:
        probe.cache_clear()


def test_a_lost_device_is_an_error_of_its_own(fault: Path, tmp_path: Path) -> None:
    """In every kind of pass, and when the next model is loaded."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "twice", [x], [y])
    path, opsets = tmp_path / "model.onnx", [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    command = [sys.executable, "-c", _LOSES_ITS_DEVICE, str(path), str(fault)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lost = "the GPU is lost, since its driver crashed or was reset; restart the server"
    refused = "the GPU was lost while the server ran; restart the server"
    assert done.stdout.splitlines() == [lost, lost, lost, refused]


@pytest.mark.webgpu
def test_readiness_shows_a_lost_device(fault: Path) -> None:
    fault.write_text("")
    process = Process("--provider", "webgpu")
    try:
        process.wait_until_ready()
        http, body = process.http, {"inputs": "a fine day"}
        assert http.post("/classify", json=body).status_code == 200
        fault.write_text("lost")
        reply = http.post("/classify", json=body)
        assert reply.status_code == 500
        assert "died (DeviceLostError: the GPU is lost" in reply.text
        wait_for(lambda: http.get("/health/ready").status_code == 503)
        assert http.get("/health/ready").json() == {
            "status": "engine down",
            "models": ["sentiment"],
        }
        assert http.get("/health/live").status_code == 200
    finally:
        process.close()
