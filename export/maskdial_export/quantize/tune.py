"""Tuning of 4-bit weights by distillation: scales whose model answers most like the fp32 one.

Each block's scale is trained; its integers and zero stay as they were chosen. The loss is the
Kullback-Leibler divergence of each token's distribution from that of the fp32 model, as in
quantization-aware distillation (LLM-QAT, Liu et al. 2023, arXiv:2305.17888), and for models that
predict no tokens the relative squared error of their output. The end of the text, an eighth of it
or 2,048 tokens, decides which scales are kept, so that too short a text does no harm.

Activations are not rounded here, and other weights are exact: neither changes what is best.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from maskdial_export.phase import Progress, silent
from maskdial_export.quantize.blocks import Blocks
from maskdial_export.quantize.int4 import as_halves
from maskdial_export.quantize.sensitivity import input_major
from maskdial_export.session import Ids

Read = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""Runs the model with some weights in place of its own over ids (batch, length)."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Of the fp32 model's output and another; one number."""

_RATE = 0.01
"""Of Adam, relative to a scale. It falls to zero as the time runs out."""
_WARM_UP = 10
_BATCH_TOKENS = 1024
_HELD_OUT, _MAX_HELD_OUT = 8, 2048
_COMPARISONS = 2
"""How often the held-out texts are read, after the first time."""
_NOISE = 1e-6
"""Of a loss, in float32: scales whose loss is not lower by more are no better."""
_DIFFERENT = 0.5
_TINY = 1e-30
_SEED = 20240229


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning gave.

    Attributes:
        blocks: by the names of their modules, those with new scales alone.
        before: the loss on the texts held out.
        after: the same with the new scales.
        steps: of training.
    """

    blocks: Mapping[str, Blocks]
    before: float
    after: float
    steps: int


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """The mean Kullback-Leibler divergence of logits from exact ones, in nats."""
    target, found = (functional.log_softmax(each, dim=-1) for each in (exact, other))
    return functional.kl_div(found, target, reduction="none", log_target=True).sum(-1).mean()


def relative_error(exact: Tensor, other: Tensor) -> Tensor:
    """The squared error of an output, relative to its size."""
    return (other - exact).square().mean() / exact.square().mean().clamp_min(_TINY)


def tune(
    model: PreTrainedModel,
    made: Mapping[str, Blocks],
    texts: Sequence[Ids],
    answer: Callable[[Any], Tensor],
    loss: Loss,
    minutes: float,
    show: Progress = silent,
) -> Tuned:
    """Trains the scales of blocks for some minutes.

    Args:
        model: the fp32 model.
        made: the blocks, by the names of their modules with commas in between. Those of modules
            that the model has not got, or with other weights, stay as they are.
        texts: token ids, (length,) each, of the calibration text in its order.
        answer: the tensor to compare, of what the model returns.
        loss: how it is compared.
        minutes: how long to train.
        show: shows the progress.
    """
    matrices = [each for name, blocks in made.items() if (each := _matrix(model, name, blocks))]
    generator = np.random.default_rng(_SEED)
    seen, held = _split(texts)
    if not matrices or not seen:
        return Tuned({}, 0.0, 0.0, 0)
    own = {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}

    def read(weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        output = functional_call(
            model, {**own, **weights}, (), {"input_ids": ids, **more}, tie_weights=False
        )
        return answer(output)

    def measure() -> float:
        with torch.no_grad():
            weights = _weights(matrices)
            batches = list(_batches(held, generator))
            losses = [float(loss(read({}, ids), read(weights, ids))) for ids in batches]
            sizes = [ids.numel() for ids in batches]
        return float(np.average(losses, weights=sizes))

    before = least = measure()
    best = [each.factor.detach().clone() for each in matrices]
    optimizer = torch.optim.Adam([each.factor for each in matrices], betas=(0.9, 0.99))
    batches = _endless(seen, generator)
    start, steps, compared, past = time.monotonic(), 0, 0, 0.0
    while past < 1:
        ids = next(batches)
        optimizer.param_groups[0]["lr"] = _RATE * min(1, (steps + 1) / _WARM_UP) * (1 - past)
        with torch.no_grad():
            exact = read({}, ids)
        optimizer.zero_grad()
        loss(exact, read(_weights(matrices), ids)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        steps += 1
        past = (time.monotonic() - start) / (60 * minutes)
        show(int(min(past, 1) * 60 * minutes), int(60 * minutes), "s")
        if past * _COMPARISONS >= compared + 1:
            compared = int(past * _COMPARISONS)
            if (now := measure()) < least - _NOISE:
                least, best = now, [each.factor.detach().clone() for each in matrices]
    if least == before:
        return Tuned({}, before, before, steps)
    pairs = zip(matrices, best, strict=True)
    return Tuned({each.name: each.scaled(factor) for each, factor in pairs}, before, least, steps)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Blocks, and what their scales are multiplied by.

    Attributes:
        name: of the modules, with commas in between.
        modules: whose outputs follow each other, each with its number of outputs.
        input_first: whether a module's weight is (inputs, outputs).
        blocks: as they were chosen.
        rows: their weights, float32 (outputs, num_blocks, block_size).
        factor: float32 (outputs, num_blocks, 1).
    """

    name: str
    modules: Mapping[str, int]
    input_first: bool
    blocks: Blocks
    rows: Tensor
    factor: Tensor

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The modules' weights, by the names of the parameters."""
        whole = (self.rows * self.factor).flatten(1)[:, : self.blocks.num_inputs]
        parts = torch.split(whole, list(self.modules.values()))
        for module, part in zip(self.modules, parts, strict=True):
            yield f"{module}.weight", part.T if self.input_first else part

    def scaled(self, factor: Tensor) -> Blocks:
        """The blocks with other scales."""
        scale = as_halves(torch.from_numpy(self.blocks.scale) * factor[..., 0])
        return replace(self.blocks, scale=scale.numpy())


def _matrix(model: PreTrainedModel, name: str, blocks: Blocks) -> _Matrix | None:
    """What to train of some blocks; None if they are not those of the model's modules."""
    found = {each: _find(model, each) for each in name.split(",")}
    modules = {each: module for each, module in found.items() if module is not None}
    if len(modules) < len(found):
        return None
    weight = torch.cat([input_major(module).detach() for module in modules.values()], dim=1)
    rounded = torch.from_numpy(blocks.weight())
    if weight.shape != rounded.shape or relative_error(weight, rounded) > _DIFFERENT:
        return None
    rows = blocks.integers.astype(np.float32) - blocks.zero[..., None]
    rows *= blocks.scale[..., None]
    return _Matrix(
        name,
        {each: input_major(module).shape[1] for each, module in modules.items()},
        isinstance(next(iter(modules.values())), Conv1D),
        blocks,
        torch.from_numpy(rows),
        torch.ones(*blocks.scale.shape, 1, requires_grad=True),
    )


def _find(model: PreTrainedModel, name: str) -> nn.Module | None:
    try:
        module = model.get_submodule(name)
    except AttributeError:  # experts' products are layers while the model is traced
        return None
    return module if isinstance(module, nn.Linear | Conv1D) else None


def _weights(matrices: Sequence[_Matrix]) -> dict[str, Tensor]:
    return dict(pair for matrix in matrices for pair in matrix.weights())


def _split(texts: Sequence[Ids]) -> tuple[Sequence[Ids], Sequence[Ids]]:
    """Texts to train on, and those at the end to be held out, at least one."""
    num_held, room = 1, min(_MAX_HELD_OUT, sum(map(len, texts)) // _HELD_OUT)
    while num_held < len(texts) and sum(map(len, texts[-num_held - 1 :])) <= room:
        num_held += 1
    return texts[:-num_held], texts[-num_held:]


def _endless(texts: Sequence[Ids], generator: np.random.Generator) -> Iterator[Tensor]:
    while True:
        yield from _batches(texts, generator)


def _batches(texts: Sequence[Ids], generator: np.random.Generator) -> Iterator[Tensor]:
    """Each text once, in random order, as ids (batch, length) of texts of one length."""
    waiting: dict[int, list[Ids]] = {}
    for index in generator.permutation(len(texts)):
        text = texts[index]
        together = waiting.setdefault(len(text), [])
        together.append(text)
        if (len(together) + 1) * len(text) > _BATCH_TOKENS:
            yield torch.from_numpy(np.stack(waiting.pop(len(text))))
    for together in waiting.values():
        yield torch.from_numpy(np.stack(together))
