"""Adapters merged at export, against PEFT's own output."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForSequenceClassification

from maskdial.bundle.bundle import load_bundle
from maskdial.extras import how_to_install
from maskdial_export.checkpoint.source import Source, find
from maskdial_export.checkpoint.weights import load_model
from maskdial_export.export import export
from maskdial_export.session import CausalSession

New = Callable[[str], Path]
Refuse = Callable[..., None]
Load = Callable[[Path], Any]
# Of peft 0.21 with transformers 5.23
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")

IDS = torch.tensor([[2, 7, 30, 44, 12, 9, 80, 55]])


def train(model: Any, folder: Path, **settings: Any) -> Any:
    """An adapter with random weights, as if trained; returns the adapted model."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **settings)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize("kind", ["use_rslora", "use_dora"])
def test_lora_equals_peft(checkpoint: New, load_reference: Load, tmp_path: Path, kind: str) -> None:
    source = checkpoint("llama")
    plain = load_reference(source)
    with torch.no_grad():
        before = plain(IDS).logits[0].numpy()
        adapted = train(plain, tmp_path / "lora", task_type="CAUSAL_LM", **{kind: True})
        expected = adapted(IDS).logits[0].numpy()
    assert np.abs(expected - before).max() > 0.1
    manifest = export(str(source), tmp_path / "bundle", adapter=tmp_path / "lora")
    assert manifest.kv is not None
    assert manifest.source == "llama + lora"
    assert manifest.source_sha256 != plain_source(source).sha256()
    graph = load_bundle("mine", tmp_path / "bundle").graph
    (logits,) = CausalSession(graph, manifest.kv, 1, 16).run(0, [IDS[0].numpy()])
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def plain_source(folder: Path, task: str = "auto") -> Source:
    return find(str(folder), task, revision=None, allow_pickle=False)


def test_head_of_the_adapter(checkpoint: New, tmp_path: Path) -> None:
    """A classifier trained on a model without one: its head comes with the adapter."""
    source = checkpoint("bert-embed")
    model = AutoModelForSequenceClassification.from_pretrained(source, attn_implementation="eager")
    adapted = train(model, tmp_path / "lora", task_type="SEQ_CLS")
    found = replace(plain_source(source, "classify"), adapter=tmp_path / "lora")
    merged = load_model(found, strict=True, console=Console(quiet=True)).model
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, adapted(IDS).logits, atol=1e-5, rtol=1e-5)


def test_adapters_that_cannot_be_merged(
    assert_refused: Refuse, checkpoint: New, load_reference: Load, tmp_path: Path
) -> None:
    source = checkpoint("llama")
    folder = tmp_path / "lora"
    train(load_reference(source), folder, task_type="CAUSAL_LM")
    options = ("--adapter", str(folder))
    assert_refused(checkpoint("gpt2"), f"the adapter {folder} does not fit the model: ", *options)
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"r": 8}))
    assert_refused(source, "does not fit the model: Error(s) in loading state_dict", *options)
    path.write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    assert_refused(source, "a pickle, which can run code", *options)
    (folder / "adapter_model.bin").unlink()
    assert_refused(source, "adapter_model.safetensors is missing", *options)
    path.unlink()
    assert_refused(source, f"{folder} is not a PEFT adapter", *options)


def test_prompt_that_is_no_weight(
    assert_refused: Refuse, checkpoint: New, load_reference: Load, tmp_path: Path
) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    source = checkpoint("llama")
    peft.get_peft_model(load_reference(source), config).save_pretrained(tmp_path / "prompt")
    why = "is a PROMPT_TUNING adapter, which cannot be merged"
    assert_refused(source, why, "--adapter", str(tmp_path / "prompt"))


def test_peft_is_not_installed(
    assert_refused: Refuse,
    checkpoint: New,
    load_reference: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = checkpoint("llama")
    train(load_reference(source), tmp_path / "lora")
    monkeypatch.setitem(sys.modules, "peft", None)
    assert_refused(source, how_to_install("adapter"), "--adapter", str(tmp_path / "lora"))
