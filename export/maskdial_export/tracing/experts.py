"""Mixtures of experts in a form that torch can trace.

transformers looks up the function that runs a layer's experts by name (``ExpertsInterface``). Its
own ones find out in Python which experts are chosen. Ours finds each expert's tokens in the graph,
and computes these only. A token's results are always added in the experts' order.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from maskdial_export.tracing.products import with_products

_NAME = "maskdial"


@contextmanager
def chosen_computed(model: PreTrainedModel) -> Iterator[None]:
    """Lets the model compute its experts in the graph, inside the block."""
    ExpertsInterface.register(_NAME, _compute_chosen)
    config: Any = model.config
    before = config._experts_implementation
    config._experts_implementation = _NAME
    try:
        with ExitStack() as parts:
            for module in list(model.modules()):
                if hasattr(module, "has_post_expert_norm"):  # transformers' mark of experts
                    parts.enter_context(with_products(module, _products(module)))
            yield
    finally:
        config._experts_implementation = before


def _products(module: Any) -> nn.ModuleList:
    """The module's experts, each with layers of its own over the same weights.

    In the graph each product then has a constant weight, which can be quantized.
    """
    return nn.ModuleList(
        nn.ModuleList(_layer(module, name, expert) for name in (_first(module), "down_proj"))
        for expert in range(module.num_experts)
    )


def _first(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _layer(module: Any, name: str, expert: int) -> nn.Linear:
    weight = getattr(module, name).data[expert]
    weight = weight.T if module.is_transposed else weight
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=module.has_bias, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if module.has_bias:
        bias = getattr(module, f"{name}_bias").data[expert]
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _compute_chosen(module: Any, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the experts' results.

    Args:
        module: the experts, with their products.
        states: (num_tokens, hidden_size).
        chosen: the experts of each token, (num_tokens, num_experts_per_tok).
        weights: their weights, in the same shape.
    """
    shares = weights.new_zeros(states.shape[0], module.num_experts)
    shares = shares.scatter_add(1, chosen, weights).T

    def compute(expert: int, tokens: Tensor, share: Tensor) -> Tensor:
        first, second = module.products[expert]
        hidden = first(states.index_select(0, tokens))
        output = second(module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden))
        if module.has_post_expert_norm:
            output = module.post_expert_norm(output)
        weighted: Tensor = output * share
        return weighted

    return add_chosen(torch.zeros_like(states), shares, compute)


def add_chosen(
    total: Tensor, shares: Tensor, compute: Callable[[int, Tensor, Tensor], Tensor]
) -> Tensor:
    """Adds the experts' results to ``total`` (num_tokens, hidden_size), one expert after the other.

    Args:
        total: what they are added to.
        shares: each expert's weight for each token, (num_experts, num_tokens); 0 if it is not
            chosen.
        compute: an expert's results (n, hidden_size) for the n tokens that chose it, from its
            number, the tokens' indices (n,) and their shares (n, 1).
    """
    added = total.float()  # the operator that adds cannot add float16
    for expert, share in enumerate(shares):
        tokens = share.nonzero()[:, 0]
        results = compute(expert, tokens, share.index_select(0, tokens)[:, None])
        added = added.index_put((tokens,), results.float(), accumulate=True)
    return added.to(total.dtype)
