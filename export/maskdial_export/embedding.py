"""Embeddings: reading sentence-transformers' settings, and pooling in the graph."""

import json
from collections.abc import Iterator
from typing import Any

import torch
from tokenizers import Tokenizer, normalizers
from torch import Tensor

from maskdial.models.bundle import Embedding
from maskdial_export.errors import ExportError
from maskdial_export.source import MODULES, Source, read_json


def read_embedding(source: Source, config: Any) -> Embedding:
    """How a checkpoint turns a text into one vector.

    Without modules.json it is the mean over the tokens, sentence-transformers' own default.

    Raises:
        ExportError: the checkpoint needs a module, a prompt or a pooling that is not supported.
    """
    pooling, normalized = "mean", False
    _check_prompt(source)
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


def longest_text(source: Source, positions: int) -> int:
    """The longest text in tokens: sentence-transformers' limit, at most the positions."""
    limits = (
        _transformer_settings(source).get("max_seq_length"),
        source.read_json("tokenizer_config.json").get("model_max_length"),
    )
    given = next((limit for limit in limits if limit is not None), positions)
    if not isinstance(given, int | float) or given < 1:
        raise ExportError(
            f"{source.name} limits texts to {given!r} tokens; the limit must be at least 1"
        )
    return int(min(given, positions))


def lower_case(source: Source, tokenizer: Tokenizer) -> None:
    """Lets the tokenizer lower-case texts if sentence-transformers does so before it."""
    if _transformer_settings(source).get("do_lower_case"):
        stages = [normalizers.Lowercase()]
        if tokenizer.normalizer is not None:
            stages.append(tokenizer.normalizer)
        tokenizer.normalizer = normalizers.Sequence(stages)


def _transformer_settings(source: Source) -> dict[str, Any]:
    """sentence-transformers' tokenizer settings; older file names contain the model type."""
    if not (source.path / MODULES).is_file():
        return {}
    names = ["sentence_bert_config.json"]
    names += sorted(path.name for path in source.path.glob("sentence_*_config.json"))
    return next((settings for name in names if (settings := source.read_json(name))), {})


def _check_prompt(source: Source) -> None:
    """Refuses a default prompt, which the server would not add."""
    settings = source.read_json("config_sentence_transformers.json")
    name = settings.get("default_prompt_name")
    if name is not None and (settings.get("prompts") or {}).get(name):
        raise ExportError(
            f"{source.name} puts its prompt {name!r} before every text, which is not supported; "
            "remove default_prompt_name from config_sentence_transformers.json and add the prompt "
            "to the texts yourself"
        )


def _modules(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """The class name and config.json of each module, in order."""
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
            f"{source.name} pools by {' and '.join(chosen) or 'nothing'}; supported: one of mean, "
            "cls and last"
        )
    return chosen[0]


def pool(hidden: Tensor, lengths: Tensor, embedding: Embedding) -> Tensor:
    """Pools hidden states (batch, length, hidden_size) to float32 (batch, hidden_size)."""
    halved = hidden.dtype == torch.float16
    hidden = hidden.float()
    index = (lengths.to(torch.int64) - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
    if embedding.pooling == "cls":
        pooled = hidden[:, 0]
    elif embedding.pooling == "last":
        pooled = hidden.gather(1, index)[:, 0]
    elif halved:
        # float16 is for CUDA, whose CumSum takes time quadratic in the length. TF32 products of
        # float16's 11 bits are exact.
        valid = torch.arange(hidden.shape[1])[None, None, :] < lengths[:, None, None]
        pooled = (valid.float() @ hidden)[:, 0] / lengths[:, None]
    else:
        # A running sum adds in the same order whatever the padding, so the mean is batch-invariant.
        pooled = hidden.cumsum(1).gather(1, index)[:, 0] / lengths[:, None]
    return torch.nn.functional.normalize(pooled, dim=-1) if embedding.normalized else pooled
