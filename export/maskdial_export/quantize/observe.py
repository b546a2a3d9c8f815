"""Observing what the layers of a torch model read while it runs over texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.phase import Progress, silent
from maskdial_export.session import Ids

_ROWS = 64  # per text; comparing all of them takes longer than the model itself


@dataclass(slots=True)
class Observation:
    """Some rows that a layer reads (an embedding: returns), and the largest magnitude in all.

    ``parts`` are (num_rows, columns) for each call, at most 64 rows, evenly spread over a text.
    """

    module: nn.Module
    peak: float = 0.0
    parts: list[Tensor] = field(default_factory=list)


def observe_layers(
    model: PreTrainedModel,
    names: Sequence[str],
    texts: Sequence[Ids],
    show: Progress = silent,
) -> dict[str, Observation]:
    """Runs the model over the texts, one at a time, and keeps some of what its layers read.

    Args:
        model: a torch model.
        names: the layers to observe, by module name.
        texts: token ids, (length,) each.
        show: shows the progress.

    Returns:
        The observation of each layer that was called.
    """
    modules = dict(model.named_modules())
    observations: dict[str, Observation] = {}
    last: tuple[Tensor, Tensor] | None = None  # layers of one input share its rows

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            nonlocal last
            source = output if isinstance(module, nn.Embedding) else arguments[0]
            if last is None or last[0] is not source:
                last = source, some_rows(source).clone()
            seen = observations.setdefault(name, Observation(module))
            seen.peak = max(seen.peak, float(source.abs().max()))
            seen.parts.append(last[1])

        return keep

    handles = [modules[name].register_forward_hook(hook(name)) for name in names]
    try:
        with torch.no_grad():
            for index, text in enumerate(texts):
                show(index, len(texts), "texts")
                ids = torch.from_numpy(text[None])
                # A decoder writes what its encoder reads: layers get tokens of real text
                more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
                model(input_ids=ids, **more)
    finally:
        for handle in handles:
            handle.remove()
    return observations


def some_rows(values: Tensor) -> Tensor:
    """At most 64 rows, evenly spread, of (batch, length, columns)."""
    rows = values.flatten(0, -2)
    return rows[:: -(-len(rows) // _ROWS)]
