"""Refused exports print one sentence and leave nothing behind."""

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
from safetensors.torch import load_file

import maskdial_export.writing
from maskdial_export.causal import kv_layout
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.parity import CausalParity, MaskedParity

New = Callable[[str], Path]
Refuse = Callable[..., None]
Command = Callable[..., tuple[int, str]]


def test_disagreement(assert_refused: Refuse, checkpoint: New) -> None:
    assert_refused(
        checkpoint("bert"), "disagree on a ragged batch", "--tolerance", "1e-12", late=True
    )


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
        arguments = [model, graph, 128, kv_layout(model.config)]
    parity(*arguments).measure(1e-4)
    with torch.no_grad():
        next(model.parameters())[7] += 0.01
    with pytest.raises(ExportError, match="disagree"):
        parity(*arguments).measure(1e-4)


def test_unknown_architecture(
    assert_refused: Refuse, new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", model_type="mpnet", architectures=["MPNetForMaskedLM"])
    assert_refused(source, "model type 'mpnet' is not supported; supported: bert,")


def test_code_of_a_checkpoint_is_not_run(
    assert_refused: Refuse, new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("bert")
    ran = source / "ran"
    (source / "modeling.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "modeling.Config", "AutoModelForMaskedLM": "modeling.Model"}
    add_json(source / "config.json", model_type="other", auto_map=auto_map)
    assert_refused(source, "code in a checkpoint is never run")
    assert not ran.exists()


def test_architecture_without_a_task(
    assert_refused: Refuse, new_checkpoint: New, add_json: Callable[..., None]
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", architectures=["BertForPreTraining"])
    assert_refused(source, "pass --task fill-mask or --task classify")


def test_task_that_the_model_cannot_do(assert_refused: Refuse, checkpoint: New) -> None:
    assert_refused(checkpoint("bert"), "bert models do not support generate", "--task", "generate")


def test_head_that_the_checkpoint_lacks(assert_refused: Refuse, checkpoint: New) -> None:
    assert_refused(checkpoint("bert"), "lacks", "--task", "classify")


def test_tokenizer_of_another_model(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    path = source / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["##z"] = 5600
    path.write_text(json.dumps(content))
    assert_refused(source, "they do not belong together")


def test_missing_weights(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    (source / "model.safetensors").unlink()
    assert_refused(source, "has no weights")


def test_damaged_weights(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    (source / "model.safetensors").write_bytes(b"not weights")
    assert_refused(source, "cannot be loaded")


def test_pickles_need_a_flag(
    assert_refused: Refuse, export_by_command: Command, new_checkpoint: New, bundles: Path
) -> None:
    source = new_checkpoint("distilbert")
    weights = source / "model.safetensors"
    torch.save(load_file(weights), source / "pytorch_model.bin")
    weights.unlink()
    assert_refused(source, "--allow-pickle")
    code, line = export_by_command(str(source), str(bundles / "bundle"), "--allow-pickle")
    assert code == 0
    assert "DistilBertForMaskedLM for fill-mask" in line


def test_not_a_checkpoint(assert_refused: Refuse, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(tmp_path / "empty", "no config.json")


def test_hub_id_while_offline(
    assert_refused: Refuse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert_refused("someone/some-model", "the Hub cannot be reached")


def test_neither_folder_nor_hub_id(assert_refused: Refuse) -> None:
    why = "/no/such/checkpoint is neither a folder nor a valid Hub id"
    assert_refused("/no/such/checkpoint", why)


def test_revision_of_a_folder(assert_refused: Refuse, checkpoint: New) -> None:
    why = "--revision applies to Hub ids"
    assert_refused(checkpoint("bert"), why, "--revision", "main")


def test_file_system_that_takes_no_more(assert_refused: Refuse, checkpoint: New) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # the weights are larger
    try:
        assert_refused(checkpoint("bert"), "File too large", late=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk(
    assert_refused: Refuse, checkpoint: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(maskdial_export.writing, "write_manifest", fail)
    assert_refused(checkpoint("bert"), "No space left on device", late=True)


def test_interrupted(checkpoint: New, bundles: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(maskdial_export.writing, "load_checkpoint", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(str(checkpoint("bert")), bundles / "bundle")
    assert list(bundles.iterdir()) == []


def test_destination_that_exists(
    export_by_command: Command, checkpoint: New, bundles: Path
) -> None:
    taken = bundles / "bundle"
    taken.mkdir()
    (taken / "precious").touch()
    code, line = export_by_command(str(checkpoint("bert")), str(taken))
    assert code == 1
    assert "already exists" in line
    assert [file.name for file in taken.iterdir()] == ["precious"]
