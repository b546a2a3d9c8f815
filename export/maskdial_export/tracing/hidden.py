"""The hidden states that a causal graph gives beside its logits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class HiddenStates(nn.Module):
    """The hidden states of all tokens that a causal graph gives.

    Args:
        before: the modules whose inputs they are, in order; none for what the model's head reads.
        projection: makes the output of them, side by side; None for what they are.
    """

    def __init__(
        self, before: Sequence[nn.Module] = (), projection: nn.Module | None = None
    ) -> None:
        super().__init__()
        self._before = tuple(before)  # they are the model's
        self.projection = nn.Identity() if projection is None else projection

    @property
    def of_layers(self) -> bool:
        """Whether they are those of some modules."""
        return bool(self._before)

    @contextmanager
    def noted(self) -> Iterator[dict[int, Tensor]]:
        """Notes the inputs of the modules inside the block, by the modules' places."""
        states: dict[int, Tensor] = {}

        def note(place: int, _module: nn.Module, args: Any, settings: Any) -> None:
            states[place] = args[0] if args else settings["hidden_states"]

        hooks = [
            module.register_forward_pre_hook(partial(note, place), with_kwargs=True)
            for place, module in enumerate(self._before)
        ]
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    def forward(self, noted: dict[int, Tensor], read: Tensor) -> Tensor:
        """float32 (batch * length, columns), of what was noted or, with no modules, of what the
        head reads.
        """
        states = [noted[place].flatten(0, 1) for place in range(len(self._before))]
        made: Tensor = self.projection(torch.cat(states, -1) if states else read)
        return made
