"""Weights that do not fit the model end the export with the name of one of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

New = Callable[[str], Path]
Refuse = Callable[..., None]
Command = Callable[..., tuple[int, str]]
Add = Callable[..., None]


def change(source: Path, **weights: Tensor | None) -> None:
    """Adds weights to a checkpoint, or replaces them; None removes one."""
    path = source / "model.safetensors"
    changed = load_file(path) | weights
    left = {name: weight for name, weight in changed.items() if weight is not None}
    save_file(left, path, metadata={"format": "pt"})


def test_missing_weight(assert_refused: Refuse, new_checkpoint: New) -> None:
    source = new_checkpoint("bert")
    name = "bert.encoder.layer.1.output.dense.weight"
    change(source, **{name: None})
    assert_refused(source, f"lacks the weight {name} of a BertForMaskedLM")


def test_fewer_layers_than_weights(
    assert_refused: Refuse,
    export_by_command: Command,
    new_checkpoint: New,
    add_json: Add,
    bundles: Path,
) -> None:
    source = new_checkpoint("bert")
    add_json(source / "config.json", num_hidden_layers=1)
    why = "16 weights (for example bert.encoder.layer.1.attention.output.LayerNorm.bias)"
    assert_refused(source, why)
    code, _ = export_by_command(str(source), str(bundles / "bundle"), "--no-strict")
    assert code == 0


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


def test_other_heads_and_old_buffers_are_left_out(
    export_by_command: Command, new_checkpoint: New, bundles: Path
) -> None:
    """What bert-base-uncased and the checkpoints of older versions have."""
    source = new_checkpoint("bert")
    more = {
        "bert.pooler.dense.weight": torch.zeros(32, 32),
        "bert.embeddings.position_ids": torch.arange(128),
        "cls.seq_relationship.weight": torch.zeros(2, 32),
    }
    change(source, **more)
    for options in ([], ["--task", "embed"]):
        bundle = bundles / "-".join(["bundle", *options])
        code, _ = export_by_command(str(source), str(bundle), *options)
        assert code == 0


@pytest.mark.parametrize(("value", "shown"), [("nan", "nan"), ("-inf", "-inf"), ("3e28", "3e+28")])
def test_values_that_no_training_leaves(
    value: str, shown: str, assert_refused: Refuse, new_checkpoint: New
) -> None:
    source = new_checkpoint("llama")
    norm = torch.ones(32)
    norm[3] = float(value)
    change(source, **{"model.norm.weight": norm})
    assert_refused(source, f"model.norm.weight of {source} contains {shown}", "--no-strict")
