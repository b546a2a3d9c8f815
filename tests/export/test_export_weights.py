"""Weights that do not fit the model end the export with the name of one of them."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from maskdial_export.checkpoint.source import find
from maskdial_export.checkpoint.weights import load_model
from maskdial_export.model import load_checkpoint

New = Callable[[str], Path]
Refuse = Callable[..., None]
Add = Callable[..., None]


def change(source: Path, **weights: Tensor | None) -> None:
    """Adds weights to a checkpoint, or replaces them; None removes one."""
    path = source / "model.safetensors"
    changed = load_file(path) | weights
    left = {name: weight for name, weight in changed.items() if weight is not None}
    save_file(left, path, metadata={"format": "pt"})


def load(
    folder: Path, task: str = "auto", *, strict: bool = True, console: Console | None = None
) -> None:
    found = find(str(folder), task, revision=None, allow_pickle=False)
    load_model(found, strict=strict, console=console or Console(quiet=True))


def test_missing_weight(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    name = "bert.encoder.layer.1.output.dense.weight"
    change(source, **{name: None})
    assert_refused(source, f"lacks the weight {name} of a BertForMaskedLM")


def test_fewer_layers_than_weights(
    assert_refused: Refuse, new_checkpoint: New, add_json: Add
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", num_hidden_layers=1)
    why = "16 weights (for example bert.encoder.layer.1.attention.output.LayerNorm.bias)"
    assert_refused(source, why)
    told = io.StringIO()
    load(source, strict=False, console=Console(file=told, width=400))
    assert why in told.getvalue()


def test_wrong_shape(assert_refused: Refuse, new_checkpoint: New, add_json: Add) -> None:
    source = new_checkpoint("llama")
    add_json(source / "config.json", intermediate_size=64)
    why = (
        f"model.layers.0.mlp.down_proj.weight of {source} has the shape (32, 48), but config.json "
        "describes a model where it has (32, 64)"
    )
    assert_refused(source, why, "--no-strict")


def test_attention_that_transformers_dropped(
    assert_refused: Refuse, new_checkpoint: New, add_json: Add
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", position_embedding_type="relative_key")
    name = "bert.encoder.layer.0.attention.self.distance_embedding.weight"
    change(source, **{name: torch.zeros(255, 8)})
    assert_refused(source, f"{name} for which BertForMaskedLM in transformers")


def test_bias_that_the_model_does_not_add(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("llama")
    change(source, **{"lm_head.bias": torch.zeros(101)})
    assert_refused(source, "has the weight lm_head.bias for which LlamaForCausalLM")


@pytest.mark.parametrize("task", ["fill-mask", "embed"])
def test_other_heads_and_old_buffers_are_left_out(task: str, new_checkpoint: New) -> None:
    """What bert-base-uncased and the checkpoints of older versions have."""
    source = new_checkpoint("bert")
    more = {
        "bert.pooler.dense.weight": torch.zeros(32, 32),
        "bert.embeddings.position_ids": torch.arange(128),
        "cls.seq_relationship.weight": torch.zeros(2, 32),
    }
    change(source, **more)
    load(source, task)


@pytest.mark.parametrize(("value", "shown"), [("nan", "nan"), ("-inf", "-inf"), ("3e28", "3e+28")])
def test_values_that_no_training_leaves(
    value: str, shown: str, assert_refused: Refuse, new_checkpoint: New
) -> None:
    source = new_checkpoint("llama")
    norm = torch.ones(32)
    norm[3] = float(value)
    change(source, **{"model.norm.weight": norm})
    assert_refused(source, f"model.norm.weight of {source} contains {shown}", "--no-strict")


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be mapped again")
def test_weights_of_16_bits_are_mapped(
    new_checkpoint: New,
    load_reference: Callable[[Path], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("maskdial_export.checkpoint.weights._MIN_MAPPED_BYTES", 0)
    source = new_checkpoint("llama")
    folder = tmp_path / "out"
    folder.mkdir()

    def load_mapped() -> Any:
        found = find(str(source), "auto", revision=None, allow_pickle=False)
        return load_checkpoint(found, folder=folder).model

    as_it_is = load_mapped()
    change(source, **{k: v.bfloat16() for k, v in load_file(source / "model.safetensors").items()})
    widened, reference = load_mapped(), load_reference(source)
    storages = [
        {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        for model in (as_it_is, widened)
    ]
    assert len(storages[0]) > 1  # float32 is in the checkpoint's own pages
    assert len(storages[1]) == 1
    assert not list(folder.iterdir())
    expected = dict(reference.named_parameters())
    for name, parameter in widened.named_parameters():
        assert torch.equal(parameter, expected[name].float()), name
