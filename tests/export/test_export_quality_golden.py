"""The checks that a server runs on a quantized bundle before it serves it."""

import io
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from rich.console import Console

from maskdial.bundle.bundle import file_sha256, load_bundle
from maskdial.bundle.exactness import multiplies_exactly
from maskdial.bundle.manifest import GRAPH, KERNEL_CHECK, MANIFEST, GoldenCheck
from maskdial.config import Config
from maskdial.errors import BundleError, CheckError
from maskdial.kernels.installed import find_kernels
from maskdial.metrics import Metrics
from maskdial.registry.loading import load_model
from maskdial.runtime.session import Session, SessionOptions
from maskdial_export.checkpoint.sample import Sample, read_sample
from maskdial_export.checkpoint.source import find
from maskdial_export.checks.kernels import exact_here, kernel_check
from maskdial_export.export import export
from maskdial_export.golden_check import half_tolerance, quantized_tolerance
from maskdial_export.model import load_checkpoint
from maskdial_export.quantize import quality as quality_module
from maskdial_export.quantize.gate import Gate
from maskdial_export.quantize.int4 import INT4
from maskdial_export.quantize.quantize import projections
from maskdial_export.quantize.sensitivity import int4_weight
from maskdial_export.session import CausalSession

New = Callable[[str], Path]


@pytest.fixture(scope="module")
def int8(checkpoint: New, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8") / "bundle"
    export(str(checkpoint("llama")), folder, precision="int8", gate=Gate(max_loss=math.inf))
    return folder


@pytest.fixture(scope="module")
def by_row(checkpoint: New, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked model that loses nothing by a scale for each row."""
    folder = tmp_path_factory.mktemp("by_row") / "bundle"
    export(str(checkpoint("bert")), folder, task="embed", precision="int8")
    return folder


@pytest.fixture
def copy(int8: Path, tmp_path: Path) -> Path:
    return shutil.copytree(int8, tmp_path / "bundle")


@pytest.fixture
def by_row_copy(by_row: Path, tmp_path: Path) -> Path:
    return shutil.copytree(by_row, tmp_path / "bundle")


def spoil_kernel_check(folder: Path) -> None:
    """Changes the check so that a correct CPU seems to compute too small a sum."""
    path = folder / KERNEL_CHECK
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name == "weight":
            weight = numpy_helper.to_array(tensor).copy()
            weight[0, 0] -= 1
            tensor.CopyFrom(numpy_helper.from_array(weight, "weight"))
    onnx.save(model, path)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][KERNEL_CHECK] = file_sha256(path)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def largest_weight(folder: Path) -> int:
    """The largest integer of the products with a scale for each row."""
    graph = onnx.load(folder / "model.onnx").graph
    names = {node.input[1] for node in graph.node if node.op_type == "MatMulIntegerToFloat"}
    weights = [numpy_helper.to_array(each) for each in graph.initializer if each.name in names]
    return max(int(np.abs(array.astype(int)).max()) for array in weights)


def test_divergences_are_torchs(
    monkeypatch: pytest.MonkeyPatch, checkpoint: New, bundle: New, int8: Path
) -> None:
    """Where memory is spent for some positions: at every second one."""
    sample = Sample("words", "0" * 64, "one two three four five six seven eight nine ten\n" * 4)
    source = find(str(checkpoint("llama")), "auto", revision=None, allow_pickle=False)
    loaded = load_checkpoint(source)
    layout, vocabulary = loaded.kv, loaded.model.config.vocab_size
    assert layout is not None
    count = sum(len(text) - 1 for text in loaded.evaluation(sample).texts)
    kept = "maskdial_export.checks.next_tokens._MAX_KEPT"
    monkeypatch.setattr(kept, (count // 2 + 1) * vocabulary)
    evaluation = loaded.evaluation(sample)
    graphs = bundle("llama") / "model.onnx", int8 / "model.onnx"
    _, answers = (evaluation.answers(graph) for graph in graphs)
    expected = []
    for text in sorted(evaluation.texts, key=len):
        runs = (CausalSession(graph, layout, 1, len(text)).run(0, [text])[0] for graph in graphs)
        fp32, other = (torch.from_numpy(logits[:-1]).log_softmax(dim=1) for logits in runs)
        each = torch.nn.functional.kl_div(other, fp32, reduction="none", log_target=True).sum(1)
        each[1::2] = -1
        expected.append(each.numpy())
    np.testing.assert_allclose(answers[:, 2], np.concatenate(expected), rtol=0.01, atol=1e-6)
    assert answers[:, 2].max() > 1e-6


def test_int8_bundle_is_served(int8: Path) -> None:
    manifest = load_bundle("mine", int8).manifest
    assert manifest.batch_invariant
    assert manifest.golden.tolerance > 1e-3
    assert manifest.quality is not None
    figures = {"perplexity", "perplexity_fp32", "top1_agreement", "kl_divergence"}
    assert set(manifest.quality.figures) == figures | {"kl_error", "kl_worst_window"}
    assert not manifest.quality.by_row
    assert KERNEL_CHECK not in manifest.files
    assert manifest.quality.positions > 1000
    assert 0 < manifest.quality.figures["kl_divergence"] < 0.01
    assert manifest.quality.max_loss is None
    model = load_model("mine", int8, Config(golden_check="warn"), Metrics())
    model.engine.stop(0)


def test_a_quality_text_of_one_window_has_no_standard_error(
    checkpoint: New, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 256  # of a whole window
    (folder / "config.json").write_text(json.dumps(config))
    source = find(str(folder), "auto", revision=None, allow_pickle=False)
    loaded = load_checkpoint(source)
    page = read_sample(None).text
    end = loaded.tokenizer.encode(page).offsets[223][1]  # an end token follows
    text = tmp_path / "text.txt"
    text.write_text(page[:end])
    (window,) = loaded.evaluation(read_sample(text)).texts
    assert len(window) == 225
    gate = Gate(text=text, max_loss=math.inf)
    export(str(folder), tmp_path / "bundle", precision="int8", gate=gate)
    quality = load_bundle("mine", tmp_path / "bundle").manifest.quality
    assert quality is not None
    worst = quality.figures["kl_worst_window"]
    assert quality.loss == quality.figures["kl_divergence"] == pytest.approx(worst)
    assert "kl_error" not in quality.figures


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_golden_check_of_an_int8_bundle(copy: Path, kernels: Literal["auto", "off"]) -> None:
    """The logits are those of the arithmetic that serves; the others may be anything."""
    manifest = json.loads((copy / MANIFEST).read_text())
    serve = kernels == "auto" and find_kernels("auto") is not None
    tolerance = manifest["golden"]["tolerance"]
    for name in ("logits", "kernel_logits"):
        if manifest["golden"][name] is not None:
            manifest["golden"][name][0] += 1.1 * tolerance
            (copy / MANIFEST).write_text(json.dumps(manifest))
            if (name == "kernel_logits") == serve:
                with pytest.raises(CheckError, match=r"differ by") as caught:
                    load_model("mine", copy, Config(kernels=kernels), Metrics())
                cause = "same kernels" if serve else "this machine computes something else"
                assert cause in caught.value.message
            else:
                load_model("mine", copy, Config(kernels=kernels), Metrics()).engine.stop(0)
            manifest["golden"][name][0] -= 1.1 * tolerance


def test_a_bundle_without_the_kernels_logits_names_the_cause(copy: Path) -> None:
    if find_kernels("auto") is None:
        pytest.skip("there are no kernels")
    manifest = json.loads((copy / MANIFEST).read_text())
    assert manifest["quality"]["measured_with"] == "kernels"
    assert manifest["quality"]["portable"].keys() == {"loss", *manifest["quality"]["figures"]}
    manifest["golden"]["kernel_logits"] = None
    (copy / MANIFEST).write_text(json.dumps(manifest))
    load_model("mine", copy, Config(), Metrics()).engine.stop(0)
    manifest["golden"]["logits"][0] += 1.5 * manifest["golden"]["tolerance"]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckError, match=r"had none of this server.s kernels.* --kernels off"):
        load_model("mine", copy, Config(), Metrics())


@pytest.mark.usefixtures("exact_products")
def test_kernels_that_are_not_exact(by_row_copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = by_row_copy
    spoil_kernel_check(copy)
    with pytest.raises(BundleError, match=r"'mine' is int8, and .* saturate") as caught:
        load_model("mine", copy, Config(kernels="off"), Metrics())
    assert (
        f"(maskdial export bert {copy}-7bit --task embed --precision int8 --reduce-range)"
        in caught.value.message
    )
    settings = Config(golden_check="warn", kernels="off")
    load_model("mine", copy, settings, Metrics()).engine.stop(0)
    assert "saturate" in caplog.text


def test_kernel_check_says_what_the_processor_does(tmp_path: Path) -> None:
    onnx.save(kernel_check(), tmp_path / KERNEL_CHECK)
    session = Session(tmp_path / KERNEL_CHECK, SessionOptions())
    products = [session.run({"rows": np.full((n, 64), 255, np.uint8)}) for n in (1, 16)]
    assert [each.shape for each in products] == [(1, 64), (16, 64)]
    exact = 127 * 127 * 64
    assert exact_here() == all((each == exact).all() for each in products)
    half = session.run({"rows": np.full((1, 64), 192, np.uint8)})  # pairs fit into 16 bits
    assert (half == (192 - 128) * 127 * 64).all() or not exact_here()


def saturate(rows: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What a kernel returns that adds pairs of products in 16 bits, as CPUs without VNNI do."""
    pairs = rows.astype(np.int64).reshape(-1, 32, 2) * 127
    sums = pairs.sum(axis=2).clip(-(2**15), 2**15 - 1).sum(axis=1) - 128 * 127 * 64
    return np.repeat(sums[:, None], 64, axis=1).astype(np.float32)


def test_saturating_kernel_is_seen() -> None:
    assert not multiplies_exactly(saturate)


def test_export_on_a_processor_without_vnni(
    checkpoint: New, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights with a scale for a row get 7 bits without being told to, and the bundle needs no
    kernel check; those in blocks do not.
    """
    monkeypatch.setattr(quality_module, "exact_here", lambda: False)
    told = io.StringIO()
    console = Console(file=told, width=200)
    source = str(checkpoint("bert"))
    export(source, tmp_path / "bundle", task="embed", precision="int8", console=console)
    assert "no VNNI), so weights with a scale for each row get 7 bits" in told.getvalue()
    assert largest_weight(tmp_path / "bundle") == 63
    assert KERNEL_CHECK not in load_bundle("mine", tmp_path / "bundle").manifest.files
    told.truncate(0)
    gate = Gate(max_loss=math.inf)
    for precision in ("int8", "int4"):
        folder = tmp_path / precision
        export(str(checkpoint("llama")), folder, precision=precision, gate=gate, console=console)
    assert "Checking quality" in told.getvalue()
    assert "7 bits" not in told.getvalue()


def test_tolerance_grows_with_what_quantizing_changed() -> None:
    logits = np.zeros(8, np.float32)
    change = np.array([0.1, -0.1] * 4, np.float32)
    assert quantized_tolerance(logits, [logits + change], 1e-3) == pytest.approx(0.4)
    assert quantized_tolerance(logits, [logits], 1e-3) == 1e-3
    # the kernels differ more from ONNX Runtime than either from fp32
    both = [logits + change, logits - change]
    assert quantized_tolerance(logits, both, 1e-3) == pytest.approx(0.8)


def test_a_shift_of_all_logits_leaves_no_room_for_other_changes() -> None:
    logits = np.linspace(-1, 1, 8, dtype=np.float32)
    change = np.array([0.1, -0.1] * 4, np.float32)
    shifted = [logits + change + 5, logits + change + 9]
    tolerance = quantized_tolerance(logits, shifted, 1e-3, centered=True)
    assert tolerance == pytest.approx(0.4, rel=1e-3)
    check = GoldenCheck(
        input_ids=(0,), row=0, columns=(0, 1), logits=(2.0, 3.0), tolerance=1.0, centered=True
    )
    assert check.drift(np.array([7.0, 8.0]), np.array([2.0, 3.0])) == 0
    assert check.drift(np.array([7.0, 9.0]), np.array([2.0, 3.0])) == 0.5
    plain = check.model_copy(update={"centered": False})
    assert plain.drift(np.array([7.0, 9.0]), np.array([2.0, 3.0])) == 6
    assert math.isnan(check.drift(np.array([math.nan, 9.0]), np.array([2.0, 3.0])))


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_graph_without_a_layer_is_refused(
    layer: int, kernels: Literal["auto", "off"], copy: Path
) -> None:
    """Both of its sums with the residual stream are of zeros."""
    path = copy / GRAPH
    model = onnx.load(path)
    ends = tuple(f".layers.{layer}.{name}.scale" for name in ("self_attn.o_proj", "mlp.down_proj"))
    gone = [each for each in model.graph.initializer if each.name.endswith(ends)]
    assert len(gone) == len(ends)
    for tensor in gone:
        zeros = np.zeros_like(numpy_helper.to_array(tensor))
        tensor.CopyFrom(numpy_helper.from_array(zeros, tensor.name))
    onnx.save(model, path)
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["files"][GRAPH] = file_sha256(path)
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckError, match="differ by"):
        load_model("mine", copy, Config(kernels=kernels), Metrics())


def test_tolerance_of_float16_is_what_float16_changes() -> None:
    exact = np.linspace(-1, 1, 100, dtype=np.float32)
    change = np.array([0.001, -0.001] * 50, np.float32)
    assert half_tolerance(exact, [exact + change], 1e-3) == pytest.approx(0.008, rel=1e-3)
    # of several, the one that is further off
    both = [exact + change, exact + 2 * change]
    assert half_tolerance(exact, both, 1e-3) == pytest.approx(0.016, rel=1e-3)
    assert half_tolerance(exact, [exact], 1e-4) == 2 * 2**-10  # a step at 1
    assert half_tolerance(8 * exact, [8 * exact], 1e-4) == 2 * 2**-7
    assert half_tolerance(exact, [exact], 0.1) == 0.1


@pytest.mark.parametrize("precision", ["fp16", "int4-fp16"])
def test_another_float16_passes_the_golden_check(
    precision: str, checkpoint: New, tmp_path: Path
) -> None:
    """torch's float16 with the same weights rounds in other places than ONNX Runtime's."""
    gate = Gate(max_loss=math.inf)
    golden = export(str(checkpoint("qwen3")), tmp_path / "b", precision=precision, gate=gate).golden
    source = find(str(checkpoint("qwen3")), "auto", revision=None, allow_pickle=False)
    model = load_checkpoint(source).half().model
    if precision == "int4-fp16":
        for name in projections(model):
            weight = model.get_submodule(name).weight
            rounded = int4_weight(INT4["int4-fp16"], weight.detach().float().T).T
            weight.data = rounded.half()
    with torch.no_grad():
        output = model(input_ids=torch.tensor([golden.input_ids]))
    logits = output.logits[0, golden.row, list(golden.columns)].float().numpy()
    drift = np.abs(logits - np.array(golden.logits)).max()
    assert 0 < drift <= golden.tolerance < 0.02


def test_float16_goes_through_the_gate(checkpoint: New, tmp_path: Path) -> None:
    manifest = export(str(checkpoint("llama")), tmp_path / "bundle", precision="fp16")
    assert manifest.kv is not None
    assert manifest.kv.dtype == "float16"
    assert manifest.quality is not None
    assert manifest.quality.loss < 0.001
    assert manifest.quality.figures["perplexity"] != manifest.quality.figures["perplexity_fp32"]
    assert load_bundle("mine", tmp_path / "bundle").manifest == manifest


def test_seven_bits_need_no_kernel_check(checkpoint: New, tmp_path: Path) -> None:
    gate, source = Gate(reduce_range=True), str(checkpoint("bert"))
    manifest = export(source, tmp_path / "b", task="embed", precision="int8", gate=gate)
    assert KERNEL_CHECK not in manifest.files
    assert largest_weight(tmp_path / "b") == 63
