"""Sessions: what they ask of ONNX Runtime. The CUDA provider is a recorder here."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, save

from maskdial.bundle.bundle import LARGE_GRAPH
from maskdial.errors import BundleError, ConfigError
from maskdial.runtime.session import Session, SessionOptions


class RecordingSession:
    """Takes the place of ONNX Runtime's session, and notes how it is made and run."""

    made: list["RecordingSession"] = []  # noqa: RUF012
    started = True

    def __init__(self, path: str, options: Any, **kwargs: Any) -> None:
        self.options = options
        self.kwargs = kwargs
        self.runs: list[Any] = []
        self.made.append(self)

    def get_providers(self) -> list[str]:
        return [self.kwargs["providers"][0][0] if self.started else "CPUExecutionProvider"]

    def get_inputs(self) -> list[Any]:
        return []

    def get_outputs(self) -> list[Any]:
        return []

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        number = None if options is None else options.get_run_config_entry("gpu_graph_id")
        self.runs.append((binding, number))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> type[RecordingSession]:
    monkeypatch.setattr(RecordingSession, "made", [])
    monkeypatch.setattr("onnxruntime.InferenceSession", RecordingSession)
    return RecordingSession


def test_cuda_is_asked_for_alone_and_with_full_precision(recorded: type[RecordingSession]) -> None:
    Session(Path("model.onnx"), SessionOptions("cuda", stream=77, captures=True))
    (made,) = recorded.made
    ((name, options),) = made.kwargs["providers"]
    assert name == "CUDAExecutionProvider"
    assert options["user_compute_stream"] == "77"
    assert options["enable_cuda_graph"] == "1"
    assert options["use_tf32"] == "0"
    assert made.kwargs["enable_fallback"] is False
    assert made.kwargs["disabled_optimizers"] == frozenset()


def test_without_a_given_stream_the_session_has_its_own(recorded: type[RecordingSession]) -> None:
    Session(Path("model.onnx"), SessionOptions("cuda"))
    ((_, options),) = recorded.made[0].kwargs["providers"]
    assert "user_compute_stream" not in options
    assert options["enable_cuda_graph"] == "0"


def test_a_provider_that_does_not_start_is_an_error(
    recorded: type[RecordingSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordingSession, "started", False)
    with pytest.raises(ConfigError, match="'cuda' did not start"):
        Session(Path("model.onnx"), SessionOptions("cuda"))


@pytest.mark.parametrize("is_large", [False, True])
def test_memory_of_large_graphs_is_not_planned(
    is_large: bool, recorded: type[RecordingSession], tmp_path: Path
) -> None:
    graph = tmp_path / "model.onnx"
    graph.write_bytes(bytes(LARGE_GRAPH if is_large else LARGE_GRAPH - 1))
    Session(graph, SessionOptions())
    assert recorded.made[0].options.enable_mem_reuse is not is_large


def test_passes_are_captured_by_their_numbers_and_others_never(
    recorded: type[RecordingSession],
) -> None:
    session = Session(Path("model.onnx"), SessionOptions("cuda", captures=True))
    session.run_with_binding("a")
    session.run_with_binding("b", 8)
    assert recorded.made[0].runs == [("a", "-1"), ("b", "8")]
    plain = Session(Path("model.onnx"), SessionOptions("cuda"))
    plain.run_with_binding("c", 8)
    assert recorded.made[1].runs == [("c", None)]


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Returns the number of columns of a matrix."""
    info = helper.make_tensor_value_info
    path = tmp_path / "model.onnx"
    nodes = [helper.make_node("Shape", ["matrix"], ["columns"], start=1, end=2)]
    model = helper.make_graph(
        nodes,
        "columns",
        [info("matrix", TensorProto.FLOAT, ["rows", "vocab_size"])],
        [info("columns", TensorProto.INT64, [1])],
    )
    save(helper.make_model(model, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def test_a_free_dimension_gets_its_size(graph: Path) -> None:
    session = Session(graph, SessionOptions(intra_op_threads=1), {"vocab_size": 3})
    assert session.run({"matrix": np.zeros((2, 3), np.float32)}) == [3]
    with pytest.raises(Exception, match="Got invalid dimensions"):
        session.run({"matrix": np.zeros((2, 4), np.float32)})


def test_a_file_that_is_no_graph_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(BundleError, match="cannot load"):
        Session(tmp_path / "model.onnx", SessionOptions())


@pytest.mark.parametrize("domain", ["acme", "maskdial"])
def test_operators_that_onnx_runtime_does_not_have_are_refused(tmp_path: Path, domain: str) -> None:
    info = helper.make_tensor_value_info
    values = [info(name, TensorProto.FLOAT, ["rows"]) for name in ("source", "result")]
    node = helper.make_node("Linear", ["source"], ["result"], domain=domain)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(domain, 1)]
    graph = helper.make_graph([node], "hostile", values[:1], values[1:])
    path = tmp_path / "model.onnx"
    save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    with pytest.raises(BundleError, match=rf"cannot load.*{domain}"):
        Session(path, SessionOptions())
