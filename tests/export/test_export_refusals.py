"""Refused exports print one sentence and leave nothing behind."""

import argparse
import errno
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

import maskdial_export.writing
from maskdial_export import cli
from maskdial_export.causal import kv_layout
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.parity import CausalParity, MaskedParity
from maskdial_export.survey import survey

New = Callable[[str], Path]


def export_by_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of ``maskdial export`` and the last line that it wrote."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    code = cli.run(parser.parse_args(arguments))
    return code, capsys.readouterr().err.strip().splitlines()[-1]


def assert_refused(
    capsys: pytest.CaptureFixture[str], source: Path | str, why: str, *options: str
) -> None:
    """Exit code 1, one sentence that contains ``why``, and no trace of a bundle."""
    place = Path(os.environ["BUNDLES"])
    code, line = export_by_command(capsys, str(source), str(place / "bundle"), *options)
    assert code == 1
    assert line.startswith("maskdial export: ")
    assert why in line
    assert list(place.iterdir()) == []


@pytest.fixture(autouse=True)
def bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for bundles."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    monkeypatch.setenv("BUNDLES", str(folder))
    return folder


def test_disagreement(capsys: pytest.CaptureFixture[str], checkpoint: New) -> None:
    assert_refused(capsys, checkpoint("bert"), "disagree on a ragged batch", "--tolerance", "1e-12")


@pytest.mark.parametrize(("name", "parity"), [("bert", MaskedParity), ("llama", CausalParity)])
def test_parity_sees_another_weight(
    name: str,
    parity: Any,
    bundle: New,
    checkpoint: New,
    load_reference: Callable[[Path], Any],
) -> None:
    model = load_reference(checkpoint(name))
    graph = bundle(name) / "model.onnx"
    arguments = [model, None, graph, 128]
    if name == "llama":
        arguments = [model, graph, 128, kv_layout(survey(model))]
    parity(*arguments).measure(1e-4)
    with torch.no_grad():
        next(model.parameters())[7] += 0.01
    with pytest.raises(ExportError, match="disagree"):
        parity(*arguments).measure(1e-4)


def test_unknown_architecture(
    capsys: pytest.CaptureFixture[str], new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", model_type="bert5", architectures=["Bert5ForMaskedLM"])
    assert_refused(capsys, source, "has no model type 'bert5'")


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("bart", "with an encoder and a decoder"),
        ("vit", "no task on text"),
        ("whisper", "read more than text"),
    ],
)
def test_models_of_another_kind(
    model_type: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
    new_checkpoint: New,
    add_json: Callable[..., None],
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", model_type=model_type, architectures=["Any"])
    assert_refused(capsys, source, why)


def test_code_of_a_checkpoint_is_not_run(
    capsys: pytest.CaptureFixture[str], new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("bert")
    ran = source / "ran"
    (source / "modeling.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForMaskedLM": "modeling.Model"}
    add_json(source / "config.json", model_type="other", auto_map=auto_map)
    assert_refused(capsys, source, "code in a checkpoint is never run")
    assert not ran.exists()


def test_architecture_without_a_task(
    capsys: pytest.CaptureFixture[str], new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", architectures=["BertForPreTraining"])
    assert_refused(capsys, source, "pass --task fill-mask or --task classify")


def test_task_that_the_model_cannot_do(capsys: pytest.CaptureFixture[str], checkpoint: New) -> None:
    assert_refused(
        capsys, checkpoint("bert"), "bert models do not support generate", "--task", "generate"
    )


def test_head_that_the_checkpoint_lacks(
    capsys: pytest.CaptureFixture[str], checkpoint: New
) -> None:
    assert_refused(capsys, checkpoint("bert"), "lacks", "--task", "classify")


def test_missing_tokenizer(capsys: pytest.CaptureFixture[str], new_checkpoint: New) -> None:
    source = new_checkpoint("llama")
    (source / "tokenizer.json").unlink()
    assert_refused(capsys, source, "tokenizer.json")


def test_tokenizer_of_another_model(
    capsys: pytest.CaptureFixture[str], new_checkpoint: New
) -> None:
    source = new_checkpoint("bert")
    path = source / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["##z"] = 5600
    path.write_text(json.dumps(content))
    assert_refused(capsys, source, "they do not belong together")


def test_missing_weights(capsys: pytest.CaptureFixture[str], new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    (source / "model.safetensors").unlink()
    assert_refused(capsys, source, "has no weights")


def test_damaged_weights(capsys: pytest.CaptureFixture[str], new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    (source / "model.safetensors").write_bytes(b"not weights")
    assert_refused(capsys, source, "cannot be loaded")


def test_weight_that_is_not_there(capsys: pytest.CaptureFixture[str], new_checkpoint: New) -> None:
    path = new_checkpoint("bert") / "model.safetensors"
    weights = load_file(path)
    del weights["bert.encoder.layer.1.output.dense.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    assert_refused(capsys, path.parent, "for example bert.encoder.layer.1.output.dense.weight")


def test_pickles_need_a_flag(
    capsys: pytest.CaptureFixture[str], new_checkpoint: New, bundles: Path
) -> None:
    source = new_checkpoint("distilbert")
    weights = source / "model.safetensors"
    torch.save(load_file(weights), source / "pytorch_model.bin")
    weights.unlink()
    assert_refused(capsys, source, "--allow-pickle")
    code, line = export_by_command(capsys, str(source), str(bundles / "bundle"), "--allow-pickle")
    assert code == 0
    assert "DistilBertForMaskedLM for fill-mask" in line


def test_not_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(capsys, tmp_path / "empty", "no config.json")


def test_hub_id_while_offline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert_refused(capsys, "someone/some-model", "the Hub cannot be reached")


def test_neither_folder_nor_hub_id(capsys: pytest.CaptureFixture[str]) -> None:
    why = "/no/such/checkpoint is neither a folder nor a valid Hub id"
    assert_refused(capsys, "/no/such/checkpoint", why)


def test_revision_of_a_folder(capsys: pytest.CaptureFixture[str], checkpoint: New) -> None:
    why = "--revision applies to Hub ids"
    assert_refused(capsys, checkpoint("bert"), why, "--revision", "main")


def test_file_system_that_takes_no_more(
    capsys: pytest.CaptureFixture[str], checkpoint: New
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # the weights are larger
    try:
        assert_refused(capsys, checkpoint("bert"), "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk(
    capsys: pytest.CaptureFixture[str], checkpoint: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(maskdial_export.writing, "write_manifest", fail)
    assert_refused(capsys, checkpoint("bert"), "No space left on device")


def test_interrupted(checkpoint: New, bundles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(maskdial_export.writing, "load_checkpoint", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(str(checkpoint("bert")), bundles / "bundle")
    assert list(bundles.iterdir()) == []


def test_destination_that_exists(
    capsys: pytest.CaptureFixture[str], checkpoint: New, bundles: Path
) -> None:
    taken = bundles / "bundle"
    taken.mkdir()
    (taken / "precious").touch()
    code, line = export_by_command(capsys, str(checkpoint("bert")), str(taken))
    assert code == 1
    assert "already exists" in line
    assert [file.name for file in taken.iterdir()] == ["precious"]
