"""Llama 4's experts, which do not go through transformers' interface for them.

Its own code computes every expert for every token, in products of three dimensions, whose order of
sums depends on the number of tokens. Ours computes the chosen ones.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.tracing.experts import add_chosen
from maskdial_export.tracing.products import linear, with_products


@contextmanager
def expert_by_expert(model: PreTrainedModel) -> Iterator[None]:
    """Lets the model compute one expert after the other inside the block."""
    with ExitStack() as patches:
        for module in list(model.modules()):
            if type(module).__name__ == "Llama4TextMoe":
                patches.enter_context(with_products(module.experts, _products(module.experts)))
                patches.enter_context(mock.patch.object(module, "forward", _forward(module)))
        yield


def _products(experts: Any) -> nn.ModuleList:
    pairs = zip(experts.gate_up_proj, experts.down_proj, strict=True)
    return nn.ModuleList(nn.ModuleList(map(linear, pair)) for pair in pairs)


def _forward(module: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    experts = module.experts

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        states = hidden_states.flatten(0, 1)
        scores, logits = module.router(states)

        def compute(expert: int, tokens: Tensor, share: Tensor) -> Tensor:
            first, second = experts.products[expert]
            gate, up = first(states.index_select(0, tokens) * share).chunk(2, dim=-1)
            output: Tensor = second(up * experts.act_fn(gate))
            return output

        return add_chosen(module.shared_expert(states), scores.T, compute), logits

    return forward
