"""Scales of 4-bit blocks, tuned until a model answers most like the fp32 one."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from maskdial_export.checkpoint.sample import read_calibration
from maskdial_export.quantize.blocks import Blocks
from maskdial_export.quantize.int4 import INT4, to_blocks
from maskdial_export.quantize.quantize import projections
from maskdial_export.quantize.sensitivity import input_major
from maskdial_export.quantize.tune import divergence, relative_error, tune
from maskdial_export.tracing.masked import head_logits

New = Callable[[str], Path]


def texts(seed: int, count: int) -> list[Any]:
    """Of two lengths, the last one alone with its own."""
    generator = np.random.default_rng(seed)
    return [generator.integers(5, 30, 24 if index < count - 1 else 11) for index in range(count)]


def rounded(model: Any) -> dict[str, Blocks]:
    """The blocks of a model's layers; the query, key and value of BERT's first are one matrix."""
    names: dict[str, tuple[str, ...]] = {name: (name,) for name in projections(model)}
    packed = [f"bert.encoder.layer.0.attention.self.{each}" for each in ("query", "key", "value")]
    if packed[0] in names:
        names = {key: each for key, each in names.items() if key not in packed}
        names[",".join(packed)] = (*packed,)
    blocks = {}
    with torch.no_grad():
        for name, modules in names.items():
            parts = [input_major(model.get_submodule(each)) for each in modules]
            blocks[name] = to_blocks(torch.cat(parts, 1).numpy(), INT4["int4"])
    return blocks


@pytest.mark.parametrize(
    ("name", "loss"),
    [("bert", divergence), ("gpt2", divergence), ("bert-classify", relative_error)],
)
def test_other_texts_lose_less_with_tuned_scales(
    name: str,
    loss: Any,
    checkpoint: New,
    load_reference: Callable[[Path], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(monotonic=partial(next, count(0, step=0.06)))
    monkeypatch.setattr(sys.modules[tune.__module__], "time", clock)
    model = load_reference(checkpoint(name))
    before = {key: each.detach().clone() for key, each in model.named_parameters()}
    made = rounded(model)
    strangers = {"not.there": next(iter(made.values()))}
    other = next(reversed(made))
    strangers[other] = replace(made[other], integers=15 - made[other].integers)
    own = {key: each for key, each in made.items() if key not in strangers}
    tuned = tune(model, made | strangers, texts(0, 65), head_logits, loss, minutes=0.04)
    assert tuned.steps == 40  # of 0.06 s
    assert tuned.after < 0.9 * tuned.before
    assert set(tuned.blocks) == set(own)
    for key, blocks in tuned.blocks.items():
        assert blocks.integers is made[key].integers
        assert blocks.zero is made[key].zero
        np.testing.assert_array_equal(blocks.scale, blocks.scale.astype(np.float16))
    for key, each in model.named_parameters():
        assert torch.equal(each, before[key])
        assert each.grad is None

    def lost(blocks: dict[str, Blocks]) -> float:
        ids = torch.from_numpy(np.stack(texts(1, 40)[:-1]))
        with torch.no_grad():
            exact = head_logits(model(input_ids=ids))
            changed = load_reference(checkpoint(name))
            for key, each in blocks.items():
                weights = torch.from_numpy(each.weight())
                modules = [changed.get_submodule(module) for module in key.split(",")]
                for module in modules:
                    part, weights = weights.split_with_sizes(
                        [width := input_major(module).shape[1], weights.shape[1] - width], dim=1
                    )
                    input_major(module).copy_(part)
            return float(loss(exact, head_logits(changed(input_ids=ids))))

    assert lost(own | dict(tuned.blocks)) < 0.9 * lost(own)


def test_scales_that_lose_more_are_not_used(
    checkpoint: New, load_reference: Callable[[Path], Any]
) -> None:
    """The texts held out are unlike those before, and exact scales cannot get better."""
    model = load_reference(checkpoint("gpt2"))
    made = rounded(model)
    for key, each in made.items():
        input_major(model.get_submodule(key)).data.copy_(torch.from_numpy(each.weight()))
    tuned = tune(model, made, texts(0, 20), head_logits, divergence, minutes=0.01)
    assert not tuned.blocks
    assert tuned.after == tuned.before < 1e-9


def test_a_text_too_short_to_hold_some_out(
    checkpoint: New, load_reference: Callable[[Path], Any]
) -> None:
    model = load_reference(checkpoint("gpt2"))
    tuned = tune(model, rounded(model), texts(0, 1), head_logits, divergence, minutes=1)
    assert not tuned.blocks
    assert tuned.steps == 0


def test_parts_are_the_text(tmp_path: Path) -> None:
    """And only the text to calibrate with is read beyond what evaluations need."""
    file = tmp_path / "text.txt"
    text = "A sentence of some words. " * 4000 + "x" * 20_000
    file.write_text(text)
    parts = [part.text for part in read_calibration(file, None).parts()]
    assert "".join(parts) == text
    assert max(map(len, parts)) <= 2**13
    assert all(part.endswith(" ") for part in parts[:12])
    assert len(read_calibration(None, file).text) == 2**16
