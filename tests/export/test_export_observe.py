"""Second moments of what layers read, in which rows count by the Fisher information."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from maskdial_export.checkpoint.source import find
from maskdial_export.model import load_checkpoint
from maskdial_export.quantize import observe
from maskdial_export.quantize.observe import observe_moments
from maskdial_export.quantize.quantize import projections

LAYER = "model.layers.0.mlp.down_proj"


def test_rows_count_by_the_fisher_information(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is summed over all tokens here that could be drawn, at each position."""
    monkeypatch.setattr(observe, "_DRAWS", 400)
    source = find(str(checkpoint("llama")), "auto", revision=None, allow_pickle=False)
    llama = load_checkpoint(source)
    trained = [each.requires_grad for each in llama.model.parameters()]
    text = np.arange(5, 17)
    names = projections(llama.model)
    found = observe_moments(llama.model, names, [text], llama.answer, of_tokens=True)
    assert [each.requires_grad for each in llama.model.parameters()] == trained
    assert found.keys() == {*names}
    queries, keys = (found[f"model.layers.0.self_attn.{each}_proj"] for each in "qk")
    assert queries is keys  # of one input

    read: list[torch.Tensor] = []
    handle = llama.model.get_submodule(LAYER).register_forward_hook(
        lambda _module, arguments, output: read.extend((arguments[0], output))
    )
    logits = llama.answer(llama.model(input_ids=torch.from_numpy(text[None])))[0]
    handle.remove()
    rows, output = read
    chances = logits.log_softmax(dim=1)
    weights = torch.zeros(len(text))
    for position in chances:
        for chance in position:
            (gradient,) = torch.autograd.grad(chance, output, retain_graph=True)
            weights += float(chance.detach().exp()) * gradient[0].square().sum(dim=1)
    rows, weights = rows[0].detach(), weights / weights.sum()
    expected = rows.T @ (rows * weights[:, None])
    plain = rows.T @ rows / len(rows)
    off = (found[LAYER] - expected).norm() / expected.norm()
    assert off < 0.1
    assert off < 0.3 * (plain - expected).norm() / expected.norm()


def test_rows_count_alike_where_there_are_no_gradients(checkpoint: Callable[[str], Path]) -> None:
    source = find(str(checkpoint("llama")), "auto", revision=None, allow_pickle=False)
    llama = load_checkpoint(source)
    text = np.arange(5, 17)
    read: list[torch.Tensor] = []
    layer = llama.model.get_submodule(LAYER)
    layer.register_forward_hook(lambda _module, arguments, _output: read.append(arguments[0]))

    def answer(output: object) -> torch.Tensor:
        return llama.answer(output).detach()

    found = observe_moments(llama.model, [LAYER], [text], answer, of_tokens=True)
    rows = read[0][0].detach()
    torch.testing.assert_close(found[LAYER], rows.T @ rows / len(rows))
