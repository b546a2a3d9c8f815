"""Observing what the layers of a torch model read while it runs over texts."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.phase import Progress, silent
from maskdial_export.session import Ids

_DRAWS = 2  # of an answer, for each text
_SEED = 20240229
_TINY = 1e-30
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

    def keep(name: str, module: nn.Module, read: Tensor, output: Tensor) -> None:
        nonlocal last
        source = output if isinstance(module, nn.Embedding) else read
        if last is None or last[0] is not source:
            last = source, some_rows(source).clone()
        seen = observations.setdefault(name, Observation(module))
        seen.parts.append(last[1])

    with torch.no_grad(), _observed(model, names, keep):
        for index, text in enumerate(texts):
            show(index, len(texts), "texts")
            read_text(model, text)
    return observations


def observe_moments(
    model: PreTrainedModel,
    names: Sequence[str],
    texts: Sequence[Ids],
    answer: Callable[[Any], Tensor],
    of_tokens: bool,
    show: Progress = silent,
) -> dict[str, Tensor]:
    """The second moments of what layers read: the mean of its rows' products with themselves.

    A row counts by how much the model's answer depends on what the layers make of it: by the
    squared gradient of the answer's log-likelihood, of tokens that are drawn from the model's own
    distributions (the Fisher information; of other answers, of a random direction, by the Gauss-
    Newton matrix). A plain mean would be that of a few large rows, or of many that attention
    hardly looks at. Where the model's code cannot be differentiated, all rows count alike.

    They are float32 (inputs, inputs), in files without names, since those of a large model take as
    much memory as its weights. Layers of one input share its moments.

    Args:
        model: a torch model, whose parameters get no gradients.
        names: the layers to observe, by module name.
        texts: token ids, (length,) each.
        answer: the tensor that counts, of what the model returns.
        of_tokens: whether that has the logits of distributions.
        show: shows the progress.

    Returns:
        The moments of each layer that was called.
    """
    moments: dict[str, Tensor] = {}
    totals: dict[str, float] = {}
    owners: dict[str, str] = {}
    generator = torch.Generator().manual_seed(_SEED)
    inputs: list[_Input] = []

    def keep(name: str, _module: nn.Module, source: Tensor, output: Tensor) -> None:
        if not inputs or inputs[-1].source is not source:
            inputs.append(_Input(owners.setdefault(name, name), source))
        owners.setdefault(name, inputs[-1].owner)
        if output.requires_grad:
            output.register_hook(inputs[-1].weigh)  # type: ignore[no-untyped-call]

    with _differentiable(model), _observed(model, names, keep):
        for index, text in enumerate(texts):
            show(index, len(texts), "texts")
            inputs.clear()
            try:
                _depend(answer(read_text(model, text)), of_tokens, generator)
            except RuntimeError:  # a model whose own code has no gradients
                inputs.clear()
                with torch.no_grad():
                    read_text(model, text)
            for each in inputs:
                rows = each.source.detach().flatten(0, -2)
                weights = each.weights(len(rows))
                if each.owner not in moments:
                    moments[each.owner] = _in_file(rows.shape[1])
                moments[each.owner].addmm_(rows.T * weights, rows)
                totals[each.owner] = totals.get(each.owner, 0.0) + float(weights.sum())
    for owner, total in totals.items():
        moments[owner].div_(total or 1.0)
    return {name: moments[owner] for name, owner in owners.items()}


@dataclass(slots=True, eq=False)
class _Input:
    """What layers of one input read in a pass.

    Attributes:
        owner: the first of them.
        source: (..., columns).
        squares: of the gradients of what they return, (num_rows,), added up.
    """

    owner: str
    source: Tensor
    squares: Tensor | None = None

    def weigh(self, gradient: Tensor) -> None:
        squares = gradient.flatten(0, -2).square().sum(dim=1)
        self.squares = squares if self.squares is None else self.squares + squares

    def weights(self, num_rows: int) -> Tensor:
        """By how much each row counts, (num_rows,); equal where no gradient tells."""
        if self.squares is None or not bool(self.squares.any()):
            return torch.full((num_rows,), _TINY)
        return self.squares


def _depend(answer: Tensor, of_tokens: bool, generator: torch.Generator) -> None:
    """Sends gradients back from an answer, as `observe_moments` says."""
    for draw in range(_DRAWS):
        if of_tokens:
            logits = answer.flatten(0, -2)
            noise = torch.empty_like(logits).exponential_(generator=generator).log_()
            drawn = (logits.detach() - noise).argmax(dim=1)
            depends = nn.functional.cross_entropy(logits, drawn, reduction="sum")
        else:
            depends = (answer * torch.randn(answer.shape, generator=generator)).sum()
        depends.backward(retain_graph=draw + 1 < _DRAWS)  # type: ignore[no-untyped-call]


@contextmanager
def _differentiable(model: PreTrainedModel) -> Iterator[None]:
    """Gradients reach what layers return, and are kept of no parameter."""

    def begin(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        # A copy, which a model may write to, unlike a leaf
        return output.detach().requires_grad_().clone()

    trained = [each for each in model.parameters() if each.requires_grad]
    for each in trained:
        each.requires_grad_(False)
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    handles = [table.register_forward_hook(begin) for table in tables]
    try:
        with torch.enable_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
        for each in trained:
            each.requires_grad_(True)


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


@contextmanager
def _observed(
    model: PreTrainedModel, names: Sequence[str], observe: Callable[..., None]
) -> Iterator[None]:
    """Calls ``observe`` with a layer's name, the layer, what it reads and what it returns."""

    def hook(name: str) -> Callable[..., None]:
        def call(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            observe(name, module, arguments[0], output)

        return call

    modules = dict(model.named_modules())
    handles = [modules[name].register_forward_hook(hook(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def read_text(model: PreTrainedModel, text: Ids) -> Any:
    """What the model returns for a text."""
    ids = torch.from_numpy(text[None])
    # A decoder writes what its encoder reads: layers get tokens of real text
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    return model(input_ids=ids, **more)


def some_rows(values: Tensor) -> Tensor:
    """At most 64 rows, evenly spread, of (batch, length, columns)."""
    rows = values.flatten(0, -2)
    return rows[:: -(-len(rows) // _ROWS)]
