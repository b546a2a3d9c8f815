"""Mixtures of experts in a form that torch can trace.

transformers looks up the function that runs a layer's experts by name (``ExpertsInterface``). Its
own ones find out at run time which experts are chosen. Ours computes every expert for every token
and weighs the results by the router, so a row's result does not depend on the other rows. It takes
num_experts / num_experts_per_tok times the products of the chosen ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

_NAME = "maskdial"


@contextmanager
def all_computed(model: PreTrainedModel) -> Iterator[None]:
    """Lets the model compute all experts inside the block."""
    ExpertsInterface.register(_NAME, _compute_all)
    config: Any = model.config
    before = config._experts_implementation
    config._experts_implementation = _NAME
    try:
        yield
    finally:
        config._experts_implementation = before


def _compute_all(module: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the experts' results.

    Args:
        module: has the weights of all experts in one tensor each, by transformers' conventions.
        states: (num_tokens, hidden_size).
        chosen: the experts of each token, (num_tokens, num_experts_per_tok).
        weights: their weights, in the same shape.
    """
    total = torch.zeros_like(states)
    for expert in range(module.num_experts):
        hidden = _project(module, "gate_up_proj" if module.has_gate else "up_proj", expert, states)
        hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        output = _project(module, "down_proj", expert, hidden)
        if module.has_post_expert_norm:
            output = module.post_expert_norm(output)
        weight = torch.where(chosen == expert, weights, 0).sum(-1, keepdim=True)
        total = total + output * weight
    return total


def _project(module: Any, name: str, expert: int, states: Tensor) -> Tensor:
    weight = getattr(module, name)[expert]
    output = states @ (weight if module.is_transposed else weight.T)
    return output + getattr(module, f"{name}_bias")[expert] if module.has_bias else output
