"""The longest text of a bundle, which bounds its rotary tables."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from rich.console import Console
from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

from maskdial.bundle.bundle import load_bundle
from maskdial_export.checks.parity import Judge
from maskdial_export.choices import LONGEST
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.tracing.length import bound_positions

New = Callable[[str], Path]
Refuse = Callable[..., None]
TINY = {
    "vocab_size": 10,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
}


def test_tables_have_a_row_per_token(checkpoint: New, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    assert export(str(checkpoint("llama")), folder, max_length=64).max_length == 64
    assert load_bundle("mine", folder).manifest.max_length == 64
    shapes = [tuple(each.dims) for each in onnx.load(folder / "model.onnx").graph.initializer]
    assert shapes.count((64, 8)) == 2
    assert (128, 8) not in shapes


def test_million_positions(tmp_path: Path) -> None:
    model = LlamaModel(LlamaConfig(**TINY, max_position_embeddings=2**20))
    told = io.StringIO()
    bound_positions(model, None, Console(file=told, width=200))
    assert model.config.max_position_embeddings == LONGEST
    assert "texts of up to 131,072 of 1,048,576 tokens" in told.getvalue()
    asked = LlamaModel(LlamaConfig(**TINY, max_position_embeddings=2**20))
    bound_positions(asked, 2**19, Console(quiet=True))
    assert asked.config.max_position_embeddings == 2**19


def test_learned_positions_are_weights(tmp_path: Path) -> None:
    model = BertModel(BertConfig(**TINY, max_position_embeddings=32))
    bound_positions(model, 16, Console(quiet=True))
    assert model.config.max_position_embeddings == 32


def test_longer_than_the_model(assert_refused: Refuse, checkpoint: New) -> None:
    why = "reads at most 128 tokens, fewer than --max-length 129"
    assert_refused(checkpoint("llama"), why, "--max-length", "129")
    assert_refused(checkpoint("bert"), why, "--max-length", "129")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 6e24])
def test_logits_that_no_model_has(value: float) -> None:
    """A tolerance that scales with them would accept any difference."""
    logits = torch.zeros(3, 4).numpy()
    logits[1, 2] = value
    with pytest.raises(ExportError, match="torch's own logits reach"), np.errstate(all="ignore"):
        Judge(1e-4, [logits])
