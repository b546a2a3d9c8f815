"""Observing the inputs and outputs of a torch model's layers while it runs over texts."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.session import Ids

_ROWS = 64  # per text; using all of them takes as long as the model itself

Observe = Callable[[str, nn.Module, Tensor, Tensor], None]


def observe_layers(
    model: PreTrainedModel, names: Sequence[str], texts: Sequence[Ids], observe: Observe
) -> None:
    """Runs the model over the texts, one at a time, and shows what its layers compute.

    Args:
        model: a torch model.
        names: the layers to observe, by module name.
        texts: token ids, (length,) each.
        observe: called for each layer and text with the layer's name and module, its first input
            and its output.
    """
    modules = dict(model.named_modules())

    def hook(name: str) -> Callable[..., None]:
        def show(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            observe(name, module, arguments[0], output)

        return show

    handles = [modules[name].register_forward_hook(hook(name)) for name in names]
    try:
        with torch.no_grad():
            for text in texts:
                ids = torch.from_numpy(text[None])
                # A decoder writes what its encoder reads: layers get tokens of real text
                more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
                model(input_ids=ids, **more)
    finally:
        for handle in handles:
            handle.remove()


def some_rows(values: Tensor) -> Tensor:
    """At most 64 rows, evenly spread, of (batch, length, columns)."""
    rows = values.flatten(0, -2)
    return rows[:: -(-len(rows) // _ROWS)]
