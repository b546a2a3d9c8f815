"""Loading verifies a bundle; the shipped ones serve as examples."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from maskdial.bundle.bundle import Bundle, file_sha256, load_bundle, load_bundles
from maskdial.bundle.manifest import FULL_GRAPH, FULL_MANIFEST, GRAPH, MANIFEST, GoldenCheck
from maskdial.config import Config
from maskdial.errors import BundleError
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER, find_bundles
from maskdial.registry.golden import check_golden
from maskdial.registry.loading import load_model


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return shutil.copytree(STARTER_FOLDER / "sentiment", tmp_path / "bundle")


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def refusal(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        load_bundle("mine", folder)
    assert "'mine'" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "tasks"), [("hybrid", ["generate", "fill-mask"]), ("sentiment", ["classify"])]
)
def test_starter_bundles_are_intact_and_passed_parity(name: str, tasks: list[str]) -> None:
    manifests = [bundle.manifest for bundle in load_bundles(name, STARTER_FOLDER / name)]
    assert [manifest.task for manifest in manifests] == tasks
    for manifest in manifests:
        assert manifest.batch_invariant
        assert manifest.parity.reference == "torch"
        figures = manifest.parity.model_dump(exclude={"reference", "tolerance"}, exclude_none=True)
        assert max(figures.values()) <= 1e-4
        assert (manifest.kv is not None) == (manifest.family == "causal")


def test_starter_bundles_are_what_is_served_by_default_and_small() -> None:
    assert set(find_bundles(Config()).scan()) == {"hybrid", "sentiment"}
    files = [file for file in STARTER_FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 25e6


def test_missing_and_unreadable_manifest(copy: Path) -> None:
    (copy / MANIFEST).write_text("{")
    assert "not readable JSON" in refusal(copy)
    (copy / MANIFEST).write_bytes(b"\xff\xfe")
    assert "not readable JSON" in refusal(copy)
    (copy / MANIFEST).unlink()
    assert "maskdial export" in refusal(copy)


def test_a_deep_or_large_manifest_is_refused(copy: Path) -> None:
    (copy / MANIFEST).write_text("[" * 100_000 + "]" * 100_000)
    assert "not readable JSON" in refusal(copy)
    (copy / MANIFEST).write_text("[" + "0," * 10_000_000 + "0]")
    assert "a manifest has at most" in refusal(copy)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"special_tokens": {"mask": 2**70}}, "special_tokens.mask"),
        ({"special_tokens": {"eos": [-5]}}, "special_tokens.eos"),
        ({"graph": "tokenizer.json"}, "graph"),
    ],
)
def test_values_that_cannot_be_are_refused(
    copy: Path, change: dict[str, object], words: str
) -> None:
    change_manifest(copy, lambda manifest: manifest.update(change))
    assert f"{MANIFEST}: {words}" in refusal(copy)


@pytest.mark.parametrize("labels", [[], ["a"] * 3])
def test_other_labels_than_the_graph_has_are_refused(copy: Path, labels: list[str]) -> None:
    change_manifest(copy, lambda manifest: manifest.update(labels=labels))
    with pytest.raises(BundleError, match=f"2 outputs, .* of the manifest {len(labels)};"):
        load_model("mine", copy, Config(golden_check="warn"), Metrics())


def test_other_schema_version(copy: Path) -> None:
    change_manifest(copy, lambda manifest: manifest.update(schema_version=2))
    assert "schema version 2" in refusal(copy)
    (copy / MANIFEST).write_text("[]")
    assert "schema version None" in refusal(copy)


def test_wrong_field(copy: Path) -> None:
    change_manifest(copy, lambda manifest: manifest.update(max_length=0))
    assert "max_length" in refusal(copy)


def test_changed_and_missing_file(copy: Path) -> None:
    with (copy / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert "tokenizer.json has changed" in refusal(copy)
    (copy / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in refusal(copy)
    change_manifest(copy, lambda manifest: manifest["files"].pop("tokenizer.json"))
    assert "does not list tokenizer.json" in refusal(copy)


def test_file_outside_the_bundle(copy: Path) -> None:
    outside = copy.parent / "outside"
    outside.write_text("x")
    files = {"../outside": file_sha256(outside)}
    change_manifest(copy, lambda manifest: manifest["files"].update(files))
    assert "outside the bundle" in refusal(copy)


@pytest.fixture
def with_two_graphs(copy: Path) -> Path:
    """The same graph twice, each with a manifest."""
    manifest = json.loads((copy / MANIFEST).read_text())
    shutil.copyfile(copy / GRAPH, copy / FULL_GRAPH)
    manifest["graph"] = FULL_GRAPH
    manifest["files"][FULL_GRAPH] = manifest["files"].pop(GRAPH)
    (copy / FULL_MANIFEST).write_text(json.dumps(manifest))
    return copy


def test_a_manifest_without_its_graph_is_refused(copy: Path) -> None:
    change_manifest(copy, lambda manifest: manifest.pop("graph", None))
    (bundle,) = load_bundles("mine", copy)
    assert bundle.graph == copy / GRAPH
    assert bundle.label == "mine"


def test_two_graphs_in_one_folder(with_two_graphs: Path) -> None:
    bundles = load_bundles("mine", with_two_graphs)
    assert [bundle.name for bundle in bundles] == ["mine", "mine"]
    assert [bundle.label for bundle in bundles] == ["mine", "mine:full"]
    assert [bundle.graph.name for bundle in bundles] == [GRAPH, FULL_GRAPH]
    assert load_bundle("mine", with_two_graphs) == bundles[0]


def test_a_second_graph_that_has_changed(with_two_graphs: Path) -> None:
    (with_two_graphs / FULL_GRAPH).write_bytes(b"changed")
    with pytest.raises(BundleError, match=r"model\.full\.onnx has changed"):
        load_bundles("mine", with_two_graphs)
    manifest = json.loads((with_two_graphs / FULL_MANIFEST).read_text())
    (with_two_graphs / FULL_MANIFEST).write_text(json.dumps(manifest | {"max_length": 0}))
    with pytest.raises(BundleError, match=r"maskdial\.full\.json: max_length"):
        load_bundles("mine", with_two_graphs)


def with_other_golden(folder: Path) -> None:
    change_manifest(folder, lambda manifest: manifest["golden"].update(logits=[9.0, 9.0]))


@pytest.mark.parametrize("field", ["input_ids", "columns", "logits"])
def test_a_golden_check_of_a_million_values_is_refused(copy: Path, field: str) -> None:
    change_manifest(copy, lambda manifest: manifest["golden"].update({field: [1] * 10**6}))
    with pytest.raises(BundleError, match=f"golden.{field}.*at most"):
        load_bundle("mine", copy)


def test_golden_check_refuses_a_drift(copy: Path) -> None:
    assert isinstance(load_bundle("mine", copy), Bundle)
    with_other_golden(copy)
    with pytest.raises(BundleError, match="differ by"):
        load_model("mine", copy, Config(), Metrics())


def test_golden_check_refuses_logits_that_are_not_finite(copy: Path) -> None:
    def run(golden: GoldenCheck) -> NDArray[np.float32]:
        return np.full(max(golden.columns) + 1, np.nan, np.float32)

    with pytest.raises(BundleError, match="differ by nan"):
        check_golden(load_bundle("mine", copy), run, "error")


def test_a_golden_check_that_cannot_run_is_refused(copy: Path) -> None:
    change_manifest(copy, lambda manifest: manifest["golden"].update(input_ids=[10**6]))
    with pytest.raises(BundleError, match="golden check failed"):
        load_model("mine", copy, Config(), Metrics())


def test_golden_check_can_warn_instead(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_other_golden(copy)
    model = load_model("mine", copy, Config(golden_check="warn"), Metrics())
    model.engine.stop(0)
    assert "differ by" in caplog.text


def test_a_file_that_is_no_graph_is_refused(copy: Path) -> None:
    (copy / "model.onnx").write_bytes(b"not a graph")
    digest = file_sha256(copy / "model.onnx")
    change_manifest(copy, lambda manifest: manifest["files"].update({"model.onnx": digest}))
    with pytest.raises(BundleError, match="ONNX Runtime cannot load"):
        load_model("mine", copy, Config(kernels="off"), Metrics())


def test_a_file_that_is_written_to_in_place_is_noticed(copy: Path) -> None:
    bundle = load_bundle("mine", copy)
    weights = copy / "model.onnx.data"
    assert bundle.find_overwritten() is None
    weights.write_bytes(weights.read_bytes())
    assert bundle.find_overwritten() is None, "the content is the same"
    assert bundle.stamps["model.onnx.data"].modified_ns == weights.stat().st_mtime_ns
    replacement = copy / "replacement"
    replacement.write_bytes(b"other content")
    replacement.replace(copy / "model.onnx")
    assert bundle.find_overwritten() is None, "the model still has the file that was replaced"
    with weights.open("r+b") as file:
        file.seek(1000)
        file.write(b"overwritten")
    assert bundle.find_overwritten() == "model.onnx.data"
    weights.unlink()
    assert bundle.find_overwritten() is None, "the model still has the file that was deleted"
