"""Embeddings: what sentence-transformers' files say about pooling, and pooling in the graph."""

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
    """How a checkpoint makes one vector of a text.

    Without sentence-transformers' modules.json it is the mean of the tokens, as that library takes
    such a checkpoint.

    Raises:
        ExportError: the files ask for something else than is supported.
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
    """The longest text in tokens: where sentence-transformers cuts, or as the positions allow."""
    limits = (
        _transformer_settings(source).get("max_seq_length"),
        source.read_json("tokenizer_config.json").get("model_max_length"),
    )
    given = next((limit for limit in limits if limit is not None), positions)
    if not isinstance(given, int | float) or given < 1:
        raise ExportError(f"{source.name} takes texts of at most {given!r} tokens, which is none")
    return int(min(given, positions))


def lower_case(source: Source, tokenizer: Tokenizer) -> None:
    """Makes the tokenizer lower its texts' case, where sentence-transformers does it for it."""
    if _transformer_settings(source).get("do_lower_case"):
        stages = [normalizers.Lowercase()]
        if tokenizer.normalizer is not None:
            stages.append(tokenizer.normalizer)
        tokenizer.normalizer = normalizers.Sequence(stages)


def _transformer_settings(source: Source) -> dict[str, Any]:
    """What sentence-transformers knows of the tokenizer; the file's older names have the type."""
    if not (source.path / MODULES).is_file():
        return {}
    names = ["sentence_bert_config.json"]
    names += sorted(path.name for path in source.path.glob("sentence_*_config.json"))
    return next((settings for name in names if (settings := source.read_json(name))), {})


def _check_prompt(source: Source) -> None:
    """A prompt before every text is no module; nothing would add it."""
    settings = source.read_json("config_sentence_transformers.json")
    name = settings.get("default_prompt_name")
    if name is not None and (settings.get("prompts") or {}).get(name):
        raise ExportError(
            f"{source.name} begins every text with its prompt {name!r}, which is not supported; "
            "take default_prompt_name out of config_sentence_transformers.json to write prompts "
            "into the texts yourself"
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
    """One vector (batch, hidden_size), float32, of hidden states (batch, length, hidden_size)."""
    halved = hidden.dtype == torch.float16
    hidden = hidden.float()
    index = (lengths.to(torch.int64) - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
    if embedding.pooling == "cls":
        pooled = hidden[:, 0]
    elif embedding.pooling == "last":
        pooled = hidden.gather(1, index)[:, 0]
    elif halved:
        # For CUDA, whose CumSum takes time quadratic in the length. Its TF32 multiplies float16's
        # 11 bits exactly.
        valid = torch.arange(hidden.shape[1])[None, None, :] < lengths[:, None, None]
        pooled = (valid.float() @ hidden)[:, 0] / lengths[:, None]
    else:
        # A running sum adds in the same order whatever the padding, so the mean is the same to the
        # last bit in every batch.
        pooled = hidden.cumsum(1).gather(1, index)[:, 0] / lengths[:, None]
    return torch.nn.functional.normalize(pooled, dim=-1) if embedding.normalized else pooled
