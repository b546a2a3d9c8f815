"""Embeddings: what sentence-transformers' files say about pooling, and pooling in the graph."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from maskdial.bundle import Embedding
from maskdial_export.errors import ExportError
from maskdial_export.source import MODULES, Source, read_json


def read_embedding(source: Source, config: Any) -> Embedding:
    """How a checkpoint makes one vector of a text.

    Without sentence-transformers' modules.json it is the mean of the tokens, as that library takes
    such a checkpoint.

    Raises:
        ExportError: the files ask for something else than is supported.
    """
    pooling, normalized = "mean", False
    for module, settings in _modules(source):
        if module == "Pooling":
            pooling = _pooling(source, settings)
        elif module == "Normalize":
            normalized = True
        elif module != "Transformer":
            raise ExportError(f"{source.name} has a {module} module, which is not supported")
    return Embedding.model_validate(
        {"dimension": config.hidden_size, "pooling": pooling, "normalized": normalized}
    )


def _modules(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each module's class name and its own config.json, in order."""
    path = source.path / MODULES
    if not path.is_file():
        return
    try:
        for module in json.loads(path.read_text(encoding="utf-8")):
            folder = source.path / module["path"]
            yield module["type"].rpartition(".")[2], read_json(folder / "config.json")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{path} is not a list of modules: {error!r}") from error


def _pooling(source: Source, settings: dict[str, Any]) -> str:
    names = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
    mode = settings.get("pooling_mode")  # sentence-transformers 5 and later
    chosen = [mode] if isinstance(mode, str) else []
    chosen += [
        key.removeprefix("pooling_mode_")
        for key, on in settings.items()
        if key.startswith("pooling_mode_") and on
    ]
    chosen = list(dict.fromkeys(names.get(name, name) for name in chosen))
    if len(chosen) != 1 or chosen[0] not in names.values():
        raise ExportError(
            f"{source.name} pools by {' and '.join(chosen) or 'nothing'}; supported is one of "
            "mean, cls and last"
        )
    return chosen[0]


def pool(hidden: Tensor, lengths: Tensor, embedding: Embedding) -> Tensor:
    """One vector (batch, hidden_size) of hidden states (batch, length, hidden_size)."""
    index = (lengths.to(torch.int64) - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
    if embedding.pooling == "cls":
        pooled = hidden[:, 0]
    elif embedding.pooling == "last":
        pooled = hidden.gather(1, index)[:, 0]
    else:
        # A running sum adds in the same order whatever the padding, so the mean is the same to the
        # last bit in every batch.
        pooled = hidden.cumsum(1).gather(1, index)[:, 0] / lengths[:, None]
    return torch.nn.functional.normalize(pooled, dim=-1) if embedding.normalized else pooled
