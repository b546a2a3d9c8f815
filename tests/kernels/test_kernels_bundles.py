"""Bundles with and without the kernels: the same graph on disk, the same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from loadtests.__main__ import main as loadtests
from maskdial.bundle.bundle import load_bundles
from maskdial.bundle.manifest import GRAPH
from maskdial.config import Config
from maskdial.errors import BundleError, ConfigError
from maskdial.kernels import build as building
from maskdial.kernels import installed as finding
from maskdial.kernels.installed import Kernels, find_kernels
from maskdial.kernels.logits import SUMMARY
from maskdial.kernels.rewrite import rewrite
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.golden import causal_logits, masked_logits
from maskdial.registry.loading import load_model
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

HYBRID = STARTER_FOLDER / "hybrid"
SENTIMENT = STARTER_FOLDER / "sentiment"
PRODUCTS = ("Linear", "Linears", "NormLinear", "NormLinears")


def logits(path: Path, index: int, kernels: Kernels | None, threads: int = 1) -> NDArray[Any]:
    """The logits of a bundle's golden input."""
    bundle = load_bundles("starter", path)[index]
    session = Session(bundle.graph, SessionOptions(intra_op_threads=threads, kernels=kernels))
    assert session.kernels == (kernels.processor if kernels else "")
    assert session.multiplies_exactly == (kernels is not None)
    if bundle.manifest.kv is None:
        return masked_logits(session, bundle.manifest.golden)
    runner = Runner(
        session,
        bundle.manifest.kv,
        slots=2,
        max_length=64,
        vocab_size=bundle.manifest.vocab_size,
    )
    return causal_logits(runner, bundle.manifest.golden)


@pytest.mark.parametrize(("path", "index"), [(HYBRID, 0), (HYBRID, 1), (SENTIMENT, 0)])
def test_the_starters_answer_as_without_the_kernels(
    kernels: Kernels, processor: str, path: Path, index: int
) -> None:
    plain = logits(path, index, None)
    one, two = (logits(path, index, Kernels(kernels.path, processor), n) for n in (1, 2))
    np.testing.assert_array_equal(two, one)
    tolerance = load_bundles("starter", path)[index].manifest.golden.tolerance
    # attention adds up in another order
    np.testing.assert_allclose(one, plain, rtol=0, atol=tolerance)


def test_rewriting_takes_every_product_and_fuses_gates(kernels: Kernels) -> None:
    before = onnx.load(HYBRID / GRAPH, load_external_data=False).graph
    rewritten = rewrite(HYBRID / GRAPH)
    after = onnx.load_from_string(rewritten.model).graph
    num_products = sum(node.op_type == "MatMulIntegerToFloat" for node in before.node)
    num_gates = sum(node.op_type == "Sigmoid" for node in before.node)
    linears = [node for node in after.node if node.op_type in PRODUCTS]
    num_attentions = sum(node.op_type == "GroupQueryAttention" for node in before.node)
    assert rewritten.num_replaced == num_products + num_attentions
    assert not rewritten.num_left
    assert num_gates
    norms = [node for node in linears if node.op_type.startswith("Norm")]
    sums = [node for node in before.node if node.op_type == "SkipSimplifiedLayerNormalization"]
    assert len(norms) == len(sums) - 1  # the last one is that of the LM head's rows
    num_outputs = sum(len(node.output) for node in linears) - len(norms)
    assert num_outputs == num_products - num_gates
    assert len({node.input[0] for node in linears}) == len(linears)
    left = {node.op_type for node in after.node}
    assert "CausalAttention" in left
    assert not left & {
        "GroupQueryAttention",
        "MatMulIntegerToFloat",
        "QuantizeLinear",
        "ReduceMax",
        "Sigmoid",
    }
    assert {each.name[:7] for each in before.output} == {"logits", "present"}
    assert [each.name for each in after.output] == ["logits", *SUMMARY]


def changed(tmp_path: Path, change: Callable[[onnx.GraphProto], object]) -> list[onnx.NodeProto]:
    """The nodes of the starter's graph, changed and then rewritten."""
    model = onnx.load(HYBRID / GRAPH, load_external_data=False)
    change(model.graph)
    onnx.save(model, tmp_path / GRAPH)
    return list(onnx.load_from_string(rewrite(tmp_path / GRAPH).model).graph.node)


def initializer(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    return next(each for each in graph.initializer if each.name == name)


def test_another_zero_point_stays(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        initializer(graph, "int8.zero_point").raw_data = b"\x7f"

    assert not [node for node in changed(tmp_path, change) if node.op_type in PRODUCTS]


def test_a_zero_point_of_weights_stays(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == "MatMulIntegerToFloat":
                node.input.append("int8.zero_point")

    assert not [node for node in changed(tmp_path, change) if node.op_type in PRODUCTS]


def test_the_largest_magnitude_of_another_axis_stays(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        initializer(graph, "int8.axes").raw_data = np.array([1]).tobytes()
        initializer(graph, "int8.axes_of_matrices").raw_data = np.array([0]).tobytes()

    nodes = changed(tmp_path, change)
    assert "ReduceMax" in {node.op_type for node in nodes}
    attributes = [each for n in nodes if n.op_type in PRODUCTS for each in n.attribute]
    assert {each.i for each in attributes if each.name == "by_row"} == {0}


@pytest.mark.parametrize("shared", [False, True])
def test_the_gelu_of_a_product_is_fused_with_it(
    kernels: Kernels, tmp_path: Path, shared: bool
) -> None:
    """Unless the product itself is used, too. The results are ONNX Runtime's to the last bit."""
    rng = np.random.default_rng(0)
    helper, arrays = (
        onnx.helper,
        {
            "step": np.float32(0.03),
            "zero": np.uint8(128),
            # Of 7 bits: with 8, ONNX Runtime's sums saturate on processors without VNNI.
            "weight": rng.integers(-63, 64, (40, 50)).astype(np.int8),
            "scale": rng.random(50, np.float32) / 20,
            "bias": rng.standard_normal(50, np.float32),
        },
    )
    microsoft = {"domain": "com.microsoft"}
    inputs = ["rows", "weight", "step", "scale", "zero"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["rows"]),
        helper.make_node("MatMulIntegerToFloat", inputs, ["product"], **microsoft),
        helper.make_node("BiasGelu", ["product", "bias"], ["y"], **microsoft),
    ]
    kind = onnx.TensorProto.FLOAT
    results = [helper.make_tensor_value_info("y", kind, None)]
    if shared:
        results.append(helper.make_tensor_value_info("product", kind, None))
    graph = helper.make_graph(
        nodes,
        "gelu",
        [helper.make_tensor_value_info("x", kind, [None, 40])],
        results,
        [onnx.numpy_helper.from_array(np.asarray(each), name) for name, each in arrays.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / GRAPH)
    rewritten = onnx.load_from_string(rewrite(tmp_path / GRAPH).model).graph
    expected_kinds = ["Linear", "BiasGelu"] if shared else ["Linear"]
    assert [node.op_type for node in rewritten.node] == expected_kinds
    x = rng.standard_normal((9, 40), np.float32)
    plain, used = (
        Session(tmp_path / GRAPH, SessionOptions(kernels=each)).run({"x": x})
        for each in (None, kernels)
    )
    np.testing.assert_array_equal(used, plain)


def test_a_product_with_one_column_becomes_a_sum(tmp_path: Path) -> None:
    """As the gates of shared experts: ONNX Runtime's product depends on the number of rows."""
    rows = np.random.default_rng(0).normal(size=(9, 64)).astype(np.float32)
    weight = rows[:1] + 1
    model = onnx.load(HYBRID / GRAPH, load_external_data=False)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    gate = onnx.helper.make_node("Gemm", ["index_select", "weight"], ["gate"], transB=1)
    model.graph.node.append(gate)
    gate_output = onnx.helper.make_tensor_value_info("gate", onnx.TensorProto.FLOAT, ["rows", 1])
    model.graph.output.append(gate_output)
    (tmp_path / GRAPH).write_bytes(model.SerializeToString())
    rewritten = rewrite(tmp_path / GRAPH)
    assert rewritten.is_exact
    graph = onnx.load_from_string(rewritten.model).graph
    nodes = [node for node in graph.node if node.output[0].startswith("gate")]
    kept = [initializer(graph, name) for node in nodes for name in node.input[1:]]
    read = onnx.helper.make_tensor_value_info("index_select", onnx.TensorProto.FLOAT, ["rows", 64])
    part = onnx.helper.make_graph(nodes, "gate", [read], [gate_output], kept)
    part_model = onnx.helper.make_model(part, opset_imports=model.opset_import, ir_version=10)
    session = ort.InferenceSession(part_model.SerializeToString())
    (found,) = session.run(None, {"index_select": rows})
    np.testing.assert_allclose(found, rows @ weight.T, rtol=1e-5)
    for row, value in zip(rows, found, strict=True):
        np.testing.assert_array_equal(session.run(None, {"index_select": row[None]})[0][0], value)


def test_attention_over_float16_stays(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        for value in graph.input:
            if value.name.startswith("past"):
                value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16

    assert "CausalAttention" not in {node.op_type for node in changed(tmp_path, change)}


def test_attention_through_a_window_and_with_sinks_has_a_kernel(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == "GroupQueryAttention":
                node.attribute.extend([onnx.helper.make_attribute("local_window_size", 40)])
                node.input.extend([*[""] * (11 - len(node.input)), "sinks"])

    attentions = [node for node in changed(tmp_path, change) if node.op_type == "CausalAttention"]
    assert attentions
    for node in attentions:
        assert [each.i for each in node.attribute if each.name == "window"] == [40]
        assert node.input[9:11] == ["sinks", "new_tokens"]


@pytest.mark.parametrize("attribute", ["softcap", "rotary_interleaved"])
def test_attention_of_another_kind_stays(tmp_path: Path, attribute: str) -> None:
    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            if node.op_type == "GroupQueryAttention":
                kept = [each for each in node.attribute if each.name != attribute]
                del node.attribute[:]
                value = 1.0 if attribute == "softcap" else 1
                node.attribute.extend([*kept, onnx.helper.make_attribute(attribute, value)])

    kinds = {node.op_type for node in changed(tmp_path, change)}
    assert "GroupQueryAttention" in kinds
    assert "CausalAttention" not in kinds


def test_a_gate_that_is_used_elsewhere_stays_apart(tmp_path: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        gate = next(node for node in graph.node if node.op_type == "Sigmoid").input[0]
        graph.output.append(onnx.ValueInfoProto(name=gate))

    kinds = [node.op_type for node in changed(tmp_path, change)]
    assert kinds.count("Sigmoid") == 1
    assert "MatMulIntegerToFloat" not in kinds


def test_a_graph_without_quantized_products_is_left_alone(kernels: Kernels, tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "plain", [value], [result])
    opsets = [onnx.helper.make_opsetid("", 20)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "g")
    session = Session(tmp_path / "g", SessionOptions(kernels=kernels))
    assert not session.kernels
    assert not session.multiplies_exactly


@pytest.fixture
def built(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The kernels, as if they were built for this installation."""
    monkeypatch.setattr(finding, "library_path", lambda: kernels.path)
    return kernels


@pytest.mark.parametrize("setting", ["auto", "on", "off"])
def test_a_loaded_model_says_what_computes_it(
    built: Kernels, setting: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(kernels=setting, threads=1, max_context=64, slots=1)
    with caplog.at_level("INFO", "maskdial.models"):
        model = load_model("hybrid", HYBRID, config, Metrics())
    model.stop()
    assert model.kernels == ("" if setting == "off" else built.processor)
    assert ("kernels" in caplog.messages[-1]) == (setting != "off")


def test_kernels_that_were_not_built_are_left_out_or_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(finding, "library_path", lambda: building.library_path(tmp_path))
    assert find_kernels("off") is None
    assert find_kernels("auto") is None
    assert not caplog.messages
    with pytest.raises(ConfigError, match=r"not built; run python -m maskdial.kernels build"):
        find_kernels("on")
    (tmp_path / "maskdial_kernels-000000000000.so").touch()
    assert find_kernels("auto") is None
    assert "not built" in caplog.text


def test_a_broken_library_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "maskdial_kernels-1.so"
    library.write_bytes(b"not a library")
    monkeypatch.setattr(finding, "library_path", lambda: library)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        find_kernels("auto")


def test_instructions_that_are_missing_are_an_error(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASKDIAL_KERNELS_ISA", "mmx")
    with pytest.raises(ConfigError, match="does not have"):
        Kernels.load(kernels.path)
    with pytest.raises(BundleError, match=r"does not have.*--kernels off"):
        logits(SENTIMENT, 0, kernels)


def test_building_without_a_compiler_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"install g\+\+, or the extra .*: pip install"):
        building.build(tmp_path)


def test_a_compiler_that_is_not_there_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    with pytest.raises(ConfigError, match="cannot be run"):
        building.build(tmp_path)


def test_a_failing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(ConfigError, match=r"false .* failed"):
        building.build(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("compiler", "flag"), [("g++", "-march=armv8.2-a+dotprod"), (None, "-mcpu=generic+dotprod")]
)
def test_each_compiler_knows_the_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str | None, flag: str
) -> None:
    """ziglang 0.17 says "unknown CPU: 'armv8.2'"."""
    commands = []

    def run(command: list[str]) -> None:
        commands.append(command)
        Path(command[-1]).touch()

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: compiler)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr(building, "_run", run)
    building.build(tmp_path)
    (dotprod,) = [command for command in commands if "-DISA=dotprod" in command]
    assert flag in dotprod
    assert ("ziglang" in dotprod) == (compiler is None)


def test_the_load_test_measures_both(
    built: Kernels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "kernels.md"
    bundles = [f"--bundle={path}" for path in (HYBRID, SENTIMENT)]
    assert loadtests(["kernels", *bundles, "--seconds=0.01", f"--markdown={table}"]) == 0
    text = table.read_text()
    assert "| decode, batch 16, context 96 |" in text
    assert "| 8 x 32 tokens |" in text
    assert "| 16 x 5 to 128 tokens |" in text
    assert f"{built.processor} kernels" in text


def test_a_graph_that_names_the_kernels_itself_is_refused(tmp_path: Path) -> None:
    model = onnx.load(SENTIMENT / GRAPH, load_external_data=False)
    model.graph.node[0].domain = "maskdial"
    model.opset_import.append(onnx.helper.make_opsetid("maskdial", 1))
    onnx.save(model, tmp_path / GRAPH)
    with pytest.raises(BundleError, match="uses operators of the domain 'maskdial'"):
        rewrite(tmp_path / GRAPH)


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    (tmp_path / GRAPH).write_bytes(b"not a graph")
    with pytest.raises(BundleError, match="cannot be read as an ONNX graph"):
        rewrite(tmp_path / GRAPH)
