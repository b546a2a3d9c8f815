"""The quality gate: the loss it allows, and the layers it keeps in fp32."""

import argparse
import functools
import io
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from maskdial.bundle.bundle import Bundle, load_bundle
from maskdial.bundle.manifest import QualityReport
from maskdial.inspection import describe
from maskdial_export import cli
from maskdial_export.checkpoint.sample import read_calibration, read_sample
from maskdial_export.checkpoint.source import find
from maskdial_export.checks.evaluation import Comparison, Cosine
from maskdial_export.errors import ExportError
from maskdial_export.model import Checkpoint, load_checkpoint
from maskdial_export.quantize.gate import Gate
from maskdial_export.quantize.half_range import LARGEST
from maskdial_export.quantize.quality import Graphs, Quantizer
from maskdial_export.quantize.quantize import IntegerPrecision, projections
from maskdial_export.quantize.stored import StoredIntegers
from maskdial_export.session import Loaded, MaskedSession
from maskdial_export.tracing.graph import optimize, save

New = Callable[[str], Path]
Quantize = Callable[..., QualityReport]

BAD = "bert.encoder.layer.1.output.dense"
# Nothing is kept but what is named
BY_NAME_ONLY = Gate(keep_worst=0)


def make_bad(folder: Path) -> Path:
    """Adds an outlier to a layer's input: with one int8 scale, the rest of its row rounds to 0.

    The weights that the outlier meets are 0, so fp32 does not notice.
    """
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["bert.encoder.layer.1.intermediate.dense.bias"][5] = 1e4
    weights[f"{BAD}.weight"] *= 5
    weights[f"{BAD}.weight"][:, 5] = 0
    save_file(weights, path, metadata={"format": "pt"})
    return folder


@dataclass(frozen=True, slots=True)
class Traced:
    """A checkpoint and its fp32 graph."""

    checkpoint: Checkpoint
    graph: ir.Model


def trace(folder: Path) -> Traced:
    source = find(str(folder), "auto", revision=None, allow_pickle=False)
    checkpoint = load_checkpoint(source)
    return Traced(checkpoint, optimize(checkpoint.trace()))


@pytest.fixture(scope="module")
def traced(checkpoint: New) -> Callable[[str], Traced]:
    return functools.cache(lambda name: trace(checkpoint(name)))


@pytest.fixture(scope="module")
def bad_folder(checkpoint: New, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one layer that loses its input in int8."""
    return make_bad(shutil.copytree(checkpoint("bert"), tmp_path_factory.mktemp("bad") / "bert"))


@pytest.fixture(scope="module")
def bad(bad_folder: Path) -> Traced:
    return trace(bad_folder)


@pytest.fixture
def quantize(tmp_path: Path) -> Quantize:
    """Quantizes a graph and returns the report."""

    def run(
        model: Traced,
        gate: Gate,
        precision: IntegerPrecision = "int8",
        console: Console | None = None,
    ) -> QualityReport:
        path = tmp_path / "model.onnx"
        save(model.graph.clone(), path)
        sample = read_sample(gate.text)
        calibration = read_calibration(gate.calibration_text, gate.text)
        shown = console or Console(quiet=True)
        quantizer = Quantizer(
            model.checkpoint,
            precision,
            gate,
            sample,
            calibration,
            shown,
            {},
            StoredIntegers({}, precision),
        )
        return quantizer.replace(Graphs(model.graph, {}), path, Loaded(path))[0]

    return run


FIGURES = {
    "bert": {"agreement", "agreement_or_tie", "top1", "top1_fp32"},
    "bert-classify": {"agreement", "agreement_or_tie"},
    "distilbert-question-answering": {"agreement", "agreement_or_tie"},
    "bert-embed": {"mean_cosine", "least_cosine"},
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_a_task(
    name: str, quantize: Quantize, traced: Callable[[str], Traced], tmp_path: Path
) -> None:
    report = quantize(traced(name), BY_NAME_ONLY)
    assert set(report.figures) == FIGURES[name]
    assert report.positions >= 300
    assert report.max_loss == 0.01
    assert report.loss <= 0.01
    assert report.kept == ()
    operators = {node.op_type for node in ir.load(tmp_path / "model.onnx").graph}
    assert "MatMulIntegerToFloat" in operators


def test_loss_that_is_refused(bad: Traced, quantize: Quantize) -> None:
    with pytest.raises(ExportError, match=r"int8 loses [1-9]\S*% against fp32 on") as error:
        quantize(bad, BY_NAME_ONLY)
    for word in ("the maximum is 1.00%", "--keep", "--max-loss", "decisions"):
        assert word in str(error.value)
    # The weights are random
    assert re.search(
        r"fp32 itself does no better than chance there \(1\.\d% of the tokens found, and "
        r"1\d\.\d% by naming the most frequent one\), so pass a text .* --quality-text; otherwise "
        r"keep layers",
        str(error.value),
    )


def test_automatic_pass_keeps_the_bad_layer(
    bad: Traced, quantize: Quantize, capsys: pytest.CaptureFixture[str]
) -> None:
    report = quantize(bad, Gate(), console=Console(stderr=True, width=200))
    assert report.kept == (BAD,)
    assert report.loss <= 0.01
    assert f"in fp32: {BAD}" in capsys.readouterr().err


def test_layer_that_the_graph_lacks_is_not_kept(
    traced: Callable[[str], Traced], quantize: Quantize
) -> None:
    """An encoder's pooler is in the checkpoint, but not in the graph."""
    model = traced("bert-embed")
    report = quantize(model, Gate(keep_worst=99))
    assert "pooler.dense" in projections(model.checkpoint.model)
    layers = {*projections(model.checkpoint.model), "embeddings.word_embeddings"}
    assert set(report.kept) == layers - {"pooler.dense"}
    assert report.figures["least_cosine"] == pytest.approx(1, abs=1e-6)


def test_layer_kept_by_name(bad: Traced, quantize: Quantize) -> None:
    report = quantize(bad, Gate(keep=("*layer.1.output.*",), keep_worst=0))
    assert report.kept == (BAD,)
    assert report.loss <= 0.01


def test_embedding_kept_by_name(traced: Callable[[str], Traced], quantize: Quantize) -> None:
    gate = Gate(keep=("*.word_embeddings",), keep_worst=0, max_loss=math.inf)
    assert quantize(traced("bert-embed"), gate).kept == ("embeddings.word_embeddings",)


def test_number_of_layers_to_keep(bad: Traced, quantize: Quantize) -> None:
    report = quantize(bad, Gate(keep=("*.query", "cls.*"), keep_worst=3))
    assert BAD in report.kept
    assert len(set(report.kept)) == 2 + 2 + 3


@pytest.mark.parametrize(
    ("precision", "words"),
    [
        ("int4", "store layers as int8 with --int8"),
        ("int4-fp16", "keep layers in fp16 with --keep"),
    ],
)
def test_automatic_pass_gives_up(
    precision: IntegerPrecision, words: str, bad: Traced, quantize: Quantize
) -> None:
    """No quantized graph makes every decision as fp32 does, ties included."""
    with pytest.raises(ExportError, match=words):
        quantize(bad, Gate(max_loss=0), precision=precision)


def test_layers_kept_in_fp16(
    traced: Callable[[str], Traced], quantize: Quantize, tmp_path: Path
) -> None:
    gate = Gate(keep=("*.layer.0.*",), keep_worst=0, max_loss=math.inf)
    report = quantize(traced("bert-classify"), gate, precision="int4-fp16")
    assert len(report.kept) == 6
    graph = ir.load(tmp_path / "model.onnx").graph
    operators = [node.op_type for node in graph]
    assert operators.count("MatMul") == operators.count("MatMulNBits") - 1 == 6  # with the pooler


def test_layers_of_int4_are_raised_to_int8(
    traced: Callable[[str], Traced], quantize: Quantize, tmp_path: Path
) -> None:
    """Those that are named, and the most sensitive ones; the embedding is int8 as it is."""
    gate = Gate(int8=("*.query",), keep=("*.key",), keep_worst=2, max_loss=math.inf)
    report = quantize(traced("bert-classify"), gate, precision="int4")
    assert len(report.kept) == 2
    assert len(set(report.raised)) == 4
    assert not any("embeddings" in name or name in report.kept for name in report.raised)
    assert report.calibration_text == "maskdial_export/calibration.txt"
    products = [n for n in ir.load(tmp_path / "model.onnx").graph if n.op_type == "MatMulNBits"]
    bits = Counter(node.attributes.get_int("bits") for node in products)
    # Layers that are packed with one that is raised, or kept, are so, too.
    assert bits[8] >= 2
    assert bits[4] > 0


def test_int4_is_tuned_and_measured_with_weights_alone(
    traced: Callable[[str], Traced], quantize: Quantize, tmp_path: Path
) -> None:
    """The graph with floats for the latter is removed."""
    console = Console(record=True, quiet=False, file=io.StringIO())
    gate = Gate(int8=("*.query",), keep_worst=0, max_loss=math.inf, tune=0.02)
    report = quantize(traced("bert-classify"), gate, precision="int4", console=console)
    assert report.weights_only is not None
    assert set(report.weights_only) == {"loss", *report.figures}
    shown = console.export_text()
    assert re.search(r"new scales of \d+ of \d+ matrices: relative error .* held out", shown)
    assert "with activations in fp32, loses" in shown
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_only_weights_of_four_bits_are_tuned(
    capsys: pytest.CaptureFixture[str], checkpoint: New, place: Path
) -> None:
    line = refusal(capsys, checkpoint("bert"), place, "--precision", "int8", "--tune", "1")
    assert "--tune trains the scales of 4-bit weights; add --precision int4" in line


def test_layers_of_another_precision_are_not_raised(
    capsys: pytest.CaptureFixture[str], checkpoint: New, place: Path
) -> None:
    line = refusal(capsys, checkpoint("bert"), place, "--precision", "int8", "--int8", "*")
    assert "--int8 names layers of a bundle of int4; add --precision int4" in line


def test_loss_without_a_limit(bad: Traced, quantize: Quantize) -> None:
    report = quantize(bad, Gate(max_loss=math.inf))
    assert report.loss > 0.01
    assert report.max_loss is None
    assert report.kept == ()


@pytest.mark.parametrize("better", [True, False])
def test_a_layer_is_kept_only_if_that_lowers_the_loss_beyond_chance(
    better: bool,
    traced: Callable[[str], Traced],
    quantize: Quantize,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(4, 100)) * 0.02
    noise -= noise.mean(axis=1, keepdims=True)
    # In a row, in blocks, then with a layer kept: below the limit, but nearly as before
    levels = iter([0.02, 0.0101, 0.002 if better else 0.0099])
    order = iter(noise)

    def compare(_self: Cosine, _reference: Any, _answers: Any) -> Comparison:
        return Comparison(next(levels, 0.0099) + next(order, noise[0]), 100, {})

    monkeypatch.setattr(Cosine, "compare", compare)
    monkeypatch.setattr("maskdial_export.quantize.quality.kernels_here", lambda: None)
    if better:
        assert len(quantize(traced("bert-embed"), Gate()).kept) == 1
    else:
        with pytest.raises(ExportError, match="int8 loses"):
            quantize(traced("bert-embed"), Gate())


def test_one_scale_for_a_row_is_taken_where_it_loses_nothing(
    traced: Callable[[str], Traced], quantize: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert quantize(traced("bert-embed"), Gate()).by_row
    monkeypatch.setattr(Cosine, "negligible", 1e-9)
    report = quantize(traced("bert-embed"), Gate())
    assert not report.by_row
    assert report.loss < 0.001


def test_activations_that_overflow(
    traced: Callable[[str], Traced], quantize: Quantize, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(_self: Cosine, _reference: Any, _answers: Any) -> Comparison:
        return Comparison(np.array([0.0, np.nan]), 2, {})

    monkeypatch.setattr(Cosine, "compare", compare)
    with pytest.raises(ExportError, match=r"in int8 the model computes NaN .* overflow"):
        quantize(traced("bert-embed"), Gate(max_loss=math.inf))


@pytest.mark.parametrize("precision", ["fp16", "int4-fp16"])
def test_activations_beyond_half_precision(
    traced: Callable[[str], Traced], quantize: Quantize, precision: Any
) -> None:
    """ONNX Runtime's CPU provider computes in float32, where nothing overflows."""
    model = traced("bert-classify")
    layer = model.checkpoint.model.get_submodule("bert.encoder.layer.0.output.dense")
    reach = [0.99, 1.01]

    def large(_module: Any, _read: Any, output: Any) -> Any:
        output = output.clone()
        output[0, 0, 0] = LARGEST * reach[-1]
        return output

    handle = layer.register_forward_hook(large)
    try:
        with pytest.raises(
            ExportError,
            match=r"layer\.0\.output\.\w+ computes of .* reaches 66,1\d\d, and float16 ends at "
            r"65,504, .*; export it with --precision int8, int4 or fp32",
        ):
            quantize(model, Gate(max_loss=math.inf), precision=precision)
        reach.pop()
        quantize(model, Gate(max_loss=math.inf), precision=precision)
    finally:
        handle.remove()


def test_a_calibration_text_of_one_word(
    traced: Callable[[str], Traced], quantize: Quantize, tmp_path: Path
) -> None:
    text = tmp_path / "word.txt"
    text.write_text("one")
    with pytest.raises(ExportError, match=r"word.txt is too short: it has \d tokens, and at least"):
        quantize(traced("bert-classify"), Gate(calibration_text=text), precision="int4")


def test_a_calibration_text_in_a_script_that_the_tokenizer_does_not_know(
    traced: Callable[[str], Traced], quantize: Quantize, tmp_path: Path
) -> None:
    text = tmp_path / "script.txt"
    text.write_text("𐎀𐎁 𐎂𐎃𐎄 𐎅\n" * 300, encoding="utf-8")
    why = r"knows 0 of the 900 tokens of the calibration text script.txt, and at least 64"
    with pytest.raises(ExportError, match=why):
        quantize(traced("bert-classify"), Gate(calibration_text=text), precision="int4")


def test_a_calibration_text_on_which_layers_read_nan(
    traced: Callable[[str], Traced], quantize: Quantize
) -> None:
    model = traced("bert-classify")
    layer = model.checkpoint.model.get_submodule("bert.encoder.layer.0.output.dense")
    handle = layer.register_forward_hook(lambda _module, _read, output: output * math.inf)
    try:
        with pytest.raises(ExportError, match=r"calibration\.txt overflows or is NaN"):
            quantize(model, Gate(), precision="int4")
    finally:
        handle.remove()


def test_own_text(
    quantize: Quantize,
    traced: Callable[[str], Traced],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    text = tmp_path_factory.mktemp("texts") / "mine.txt"
    text.write_text("A line of mine, and another one.\n" * 60, encoding="utf-8")
    report = quantize(traced("bert-classify"), Gate(text=text))
    assert report.text == "mine.txt"
    assert report.text_sha256 == read_sample(text).sha256
    assert report.text_sha256 != quantize(traced("bert-classify"), Gate()).text_sha256


def test_text_that_is_too_short(
    quantize: Quantize,
    traced: Callable[[str], Traced],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    text = tmp_path_factory.mktemp("texts") / "short.txt"
    text.write_text("Too short. Far too short.", encoding="utf-8")
    for name, asked in (("bert", 21), ("bert-classify", 3), ("distilbert-question-answering", 0)):
        with pytest.raises(ExportError, match=rf"short.txt is too short: .* {asked} decisions"):
            quantize(traced(name), Gate(text=text))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder for bundles."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    return folder


def export_by_command(
    capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, list[str]]:
    """The exit code of ``maskdial export`` and the lines that it wrote."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    code = cli.run(parser.parse_args(["--trace", *map(str, arguments)]))
    return code, capsys.readouterr().err.strip().splitlines()


def test_command_with_a_bundle(
    capsys: pytest.CaptureFixture[str], checkpoint: New, place: Path
) -> None:
    source = checkpoint("bert-token-classify")
    options = ("--precision", "int8", "--keep", "*.layer.0.*.key", "--keep-worst", "1")
    code, lines = export_by_command(capsys, source, place / "bundle", *options)
    assert code == 0
    phases = ("Checking parity", "Quantizing", "Checking quality", "Checking invariance")
    found = [next(i for i, line in enumerate(lines) if line.startswith(name)) for name in phases]
    assert found == sorted(found)
    assert any(
        "loses 0.00%: agreement" in line and "; kept in fp32: bert." in line for line in lines
    )
    assert "in fp32, int8 loses 0.00%, batch-invariant" in lines[-1]
    bundle = load_bundle("tags", place / "bundle")
    manifest = bundle.manifest
    assert manifest.precision == "int8"
    assert manifest.quality is not None
    assert set(manifest.quality.figures) == {"agreement", "agreement_or_tie"}
    assert manifest.quality.positions > 1000
    assert manifest.quality.kept[0] == "bert.encoder.layer.0.attention.self.key"
    assert len(manifest.quality.kept) == 2
    assert manifest.parity.ragged_batch < 1e-5
    logits = MaskedSession(bundle.graph).run([np.array(manifest.golden.input_ids)])[0]
    expected = logits[manifest.golden.row][list(manifest.golden.columns)]
    assert manifest.golden.logits == tuple(expected.tolist())


def test_what_a_language_model_loses_is_in_nats(
    capsys: pytest.CaptureFixture[str], checkpoint: New, place: Path
) -> None:
    options = ("--precision", "int8", "--max-loss", "0.5")
    code, lines = export_by_command(capsys, checkpoint("llama"), place / "bundle", *options)
    assert code == 0
    manifest = load_bundle("mine", place / "bundle").manifest
    quality = manifest.quality
    assert quality is not None
    loss = f"diverges by {quality.loss:.4g} nats"
    assert f"in fp32, int8 {loss}, " in lines[-1]
    assert any(f"{loss}: perplexity fp32" in line for line in lines)
    about = describe(Bundle("x", place / "bundle", manifest), {})["quality"]
    assert about.startswith(f"{loss} from fp32 (at most 0.5 nats): perplexity fp32")


def test_command_that_refuses_leaves_nothing(
    capsys: pytest.CaptureFixture[str], bad_folder: Path, place: Path
) -> None:
    options = ("--precision", "int8", "--keep-worst", "0")
    code, lines = export_by_command(capsys, bad_folder, place / "bundle", *options)
    assert code == 1
    assert lines[-1].startswith("maskdial export: int8 loses ")
    assert list(place.iterdir()) == []


def refusal(capsys: pytest.CaptureFixture[str], source: Path, place: Path, *options: str) -> str:
    code, lines = export_by_command(capsys, source, place / "bundle", *options)
    assert code == 1
    assert list(place.iterdir()) == []
    return lines[-1]


def test_pattern_without_a_match(
    capsys: pytest.CaptureFixture[str], checkpoint: New, place: Path
) -> None:
    options = ("--precision", "int8", "--keep", "*.dense", "--keep", "*.down_proj")
    line = refusal(capsys, checkpoint("bert"), place, *options)
    assert "--keep *.down_proj matches none of the 15 layers" in line
    assert "bert.embeddings.word_embeddings" in line


def test_quality_options_with_fp32(
    capsys: pytest.CaptureFixture[str], checkpoint: New, place: Path
) -> None:
    for options in (("--keep", "*"), ("--max-loss", "inf"), ("--keep-worst", "2")):
        line = refusal(capsys, checkpoint("bert"), place, "--precision", "fp32", *options)
        assert "do not apply to fp32" in line


def test_layers_cannot_be_kept_with_fp16(
    capsys: pytest.CaptureFixture[str], checkpoint: New, place: Path
) -> None:
    options = ("--precision", "fp16", "--keep", "*.query")
    line = refusal(capsys, checkpoint("bert"), place, *options)
    assert "--keep and --keep-worst apply to int8, int4 and int4-fp16" in line


@pytest.mark.parametrize("precision", ["int4", "fp16", "int4-fp16"])
def test_only_int8_has_products_that_saturate(
    capsys: pytest.CaptureFixture[str], checkpoint: New, place: Path, precision: str
) -> None:
    line = refusal(capsys, checkpoint("bert"), place, "--precision", precision, "--reduce-range")
    assert "--reduce-range is for int8" in line
    assert f"so {precision} needs none" in line


def test_unknown_precision(
    capsys: pytest.CaptureFixture[str], checkpoint: New, place: Path
) -> None:
    line = refusal(capsys, checkpoint("bert"), place, "--precision", "int3")
    assert "unknown precision 'int3'" in line


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "No such file"), (b" \n\n", "is empty"), (b"caf\xe9 au lait", "not UTF-8 (byte 3)")],
)
def test_text_that_cannot_be_read(
    content: bytes | None,
    why: str,
    capsys: pytest.CaptureFixture[str],
    checkpoint: New,
    place: Path,
    tmp_path: Path,
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    options = ("--precision", "int8", "--quality-text", str(text))
    assert why in refusal(capsys, checkpoint("bert"), place, *options)


@pytest.mark.parametrize(
    "options", [("--max-loss", "-1"), ("--max-loss", "nan"), ("--keep-worst", "-1")]
)
def test_numbers_out_of_range(
    options: tuple[str, str], capsys: pytest.CaptureFixture[str], place: Path
) -> None:
    with pytest.raises(SystemExit):
        export_by_command(capsys, "source", place / "bundle", *options)
    assert options[1] in capsys.readouterr().err
