"""Observing what the layers of a torch model read while it runs over texts."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.phase import Progress, silent
from maskdial_export.session import Ids

_ROWS = 64  # per text; comparing all of them takes longer than the model itself


@dataclass(slots=True)
class Observation:
    """Some rows that a layer reads (an embedding: returns).

    ``parts`` are (num_rows, columns) for each call, at most 64 rows, evenly spread over a text.
    """

    module: nn.Module
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
    observations: dict[str, Observation] = {}
    last: tuple[Tensor, Tensor] | None = None  # layers of one input share its rows

    def keep(name: str, module: nn.Module, source: Tensor) -> None:
        nonlocal last
        if last is None or last[0] is not source:
            last = source, some_rows(source).clone()
        seen = observations.setdefault(name, Observation(module))
        seen.parts.append(last[1])

    _run(model, names, texts, keep, show)
    return observations


def observe_moments(
    model: PreTrainedModel,
    names: Sequence[str],
    texts: Sequence[Ids],
    show: Progress = silent,
) -> dict[str, Tensor]:
    """The second moments of what layers read: the mean of its rows' products with themselves.

    They are float32 (inputs, inputs), in files without names, since those of a large model take as
    much memory as its weights. Layers of one input share its moments.

    Args and what is observed are those of `observe_layers`.
    """
    moments: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    owners: dict[str, str] = {}
    last: tuple[Tensor, str] | None = None

    def add(name: str, _module: nn.Module, source: Tensor) -> None:
        nonlocal last
        if last is not None and last[0] is source:
            owner = owners.setdefault(name, last[1])
            if owner == last[1]:
                return
        owner = owners.setdefault(name, name)
        rows = source.flatten(0, -2)
        if owner not in moments:
            moments[owner] = _in_file(rows.shape[1])
        moments[owner].addmm_(rows.T, rows)
        counts[owner] = counts.get(owner, 0) + len(rows)
        last = source, owner

    _run(model, names, texts, add, show)
    for owner, count in counts.items():
        moments[owner].div_(max(count, 1))
    return {name: moments[owner] for name, owner in owners.items()}


def _in_file(size: int) -> Tensor:
    """A square matrix of zeros in a file without a name.

    They are written before the file is mapped, for its room on the disk: a page that finds none
    later would end the process by a signal.

    Raises:
        OSError: the disk is full.
    """
    with tempfile.TemporaryFile() as file:
        row = bytes(size * np.dtype(np.float32).itemsize)
        for _ in range(size):
            file.write(row)
        file.flush()
        shape = size, size
        return torch.from_numpy(np.memmap(file, dtype=np.float32, mode="r+", shape=shape))


def _run(
    model: PreTrainedModel,
    names: Sequence[str],
    texts: Sequence[Ids],
    observe: Callable[[str, nn.Module, Tensor], None],
    show: Progress,
) -> None:
    """Calls ``observe`` with what each of some layers reads (an embedding: returns)."""
    modules = dict(model.named_modules())

    def hook(name: str) -> Callable[..., None]:
        def call(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            observe(name, module, output if isinstance(module, nn.Embedding) else arguments[0])

        return call

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


def some_rows(values: Tensor) -> Tensor:
    """At most 64 rows, evenly spread, of (batch, length, columns)."""
    rows = values.flatten(0, -2)
    return rows[:: -(-len(rows) // _ROWS)]
