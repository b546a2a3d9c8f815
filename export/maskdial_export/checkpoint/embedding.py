"""Embeddings: what sentence-transformers' files say of pooling, prompts and the longest text."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, normalizers
from torch import nn

from maskdial.bundle.manifest import Embedding
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.pooling import (
    POOLINGS,
    Dense,
    LargestWeights,
    Leading,
    Normalize,
    Pooler,
    SpladePooling,
    TokenPooling,
)
from maskdial_export.checkpoint.source import MODULES, SENTENCE_CONFIG, Source
from maskdial_export.errors import ExportError, first_line

_POOLINGS = {
    "cls_token": "cls",
    "lasttoken": "last",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "mean_tokens": "mean",
    "weightedmean": "weighted_mean",
    "weightedmean_tokens": "weighted_mean",
}
LOCATING = frozenset(
    {"trust_remote_code", "local_files_only", "revision", "token", "cache_dir", "code_revision"}
)
"""Arguments that say where a model or a tokenizer is, not what it computes."""
_TEXT_MODELS = ("Transformer", "MLMTransformer", "StaticEmbedding")


def read_pooler(source: Source, columns: int) -> Pooler:
    """How a checkpoint turns a text into one vector.

    Without modules.json it is the mean over the tokens, sentence-transformers' own default; for the
    task embed-sparse the largest weight of each vocabulary entry, as SPLADE's authors have it.

    Args:
        source: the checkpoint.
        columns: what the model returns for each token: hidden states, or logits for embed-sparse.

    Raises:
        ExportError: the checkpoint needs a module, a prompt or a pooling that is not supported.
    """
    sparse = source.task == "embed-sparse"
    pool: nn.Module = SpladePooling(largest=True) if sparse else TokenPooling(["mean"])
    name, width = ("splade-max" if sparse else "mean"), columns
    steps: list[nn.Module] = []
    for kind, folder in module_folders(source):
        settings = read_json(folder / "config.json")
        if kind in _TEXT_MODELS:
            continue
        if kind == "Pooling" and not sparse:
            modes = _pooling(source, settings)
            pool, name, width = TokenPooling(modes), "+".join(modes), columns * len(modes)
        elif kind == "SpladePooling" and sparse:
            pool, name = _splade(source, settings)
        elif kind == "Normalize":
            steps.append(Normalize())
        elif kind == "Dense" and not sparse:
            dense, width = read_dense(source, folder, settings, width)
            steps.append(dense)
        elif kind == "LayerNorm" and not sparse:
            steps.append(_layer_norm(source, folder, width))
        elif kind != "Dropout":
            raise ExportError(f"{source.name} has a {kind} module, which is not supported")
    kept = _count(source, "max_active_dims" if sparse else "truncate_dim")
    if kept is not None and kept < width:
        steps.append(LargestWeights(kept) if sparse else Leading(kept))
        width = width if sparse else kept
    prompts, default = read_prompts(source)
    embedding = Embedding(
        dimension=width,
        pooling=name,
        normalized=bool(steps) and isinstance(steps[-1], Normalize),
        prompts=prompts,
        default_prompt=default,
    )
    return Pooler(pool, steps, embedding).eval()


def _count(source: Source, name: str) -> int | None:
    """How many entries of a vector sentence-transformers keeps; None for all."""
    given = source.read_json(SENTENCE_CONFIG).get(name)
    if given is not None and (type(given) is not int or given < 1):
        raise ExportError(
            f"{name} in {SENTENCE_CONFIG} of {source.name} is {given!r}, not a number above 0"
        )
    return given


def longest_text(source: Source, positions: int) -> int:
    """The longest text in tokens: sentence-transformers' limit, at most the positions."""
    settings = transformer_settings(source)
    processing = settings.get("processing_kwargs") or {}
    limits = (
        *((processing.get(part) or {}).get("max_length") for part in ("text", "common")),
        tokenizer_settings(source).get("model_max_length"),
        settings.get("max_seq_length"),
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
    if transformer_settings(source).get("do_lower_case"):
        stages = [normalizers.Lowercase()]
        if tokenizer.normalizer is not None:
            stages.append(tokenizer.normalizer)
        tokenizer.normalizer = normalizers.Sequence(stages)


def transformer_settings(source: Source) -> dict[str, Any]:
    """sentence-transformers' tokenizer settings; older file names contain the model type."""
    if not (source.path / MODULES).is_file():
        return {}
    names = ["sentence_bert_config.json"]
    names += sorted(path.name for path in source.path.glob("sentence_*_config.json"))
    return next((settings for name in names if (settings := source.read_json(name))), {})


def tokenizer_settings(source: Source) -> dict[str, Any]:
    """The arguments by which sentence-transformers loads a tokenizer; older names stand for two."""
    settings = transformer_settings(source)
    given = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    return {key: value for key, value in given.items() if key not in LOCATING}


def read_prompts(source: Source) -> tuple[dict[str, str], str | None]:
    """The texts to put before a text, by name, and the one that is put before every text."""
    name = SENTENCE_CONFIG
    settings = source.read_json(name)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    instructions = source.read_json("config.json").get("task_instructions")  # Jina's, by task
    if isinstance(instructions, dict) and isinstance(prompts, dict):
        prompts = instructions | prompts
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
        raise ExportError(f"prompts in {name} of {source.name} must be texts by name")
    if default is not None and default not in prompts:
        raise ExportError(
            f"default_prompt_name in {name} of {source.name} is {default!r}, which is none of its "
            "prompts"
        )
    return {str(key): text for key, text in prompts.items()}, default


def default_prompt(source: Source) -> str | None:
    """The text that is put before every text, or is the system's message to a reranker."""
    prompts, name = read_prompts(source)
    return None if name is None else prompts[name]


def module_folders(source: Source) -> Iterator[tuple[str, Path]]:
    """The class name and the folder of each module, in order."""
    path = source.path / MODULES
    if not path.is_file():
        return
    try:
        for module in json.loads(path.read_text(encoding="utf-8")):
            folder = source.path / module["path"]
            yield module["type"].rpartition(".")[2], folder
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{path} is not a list of modules: {error!r}") from error


def _pooling(source: Source, settings: Mapping[str, Any]) -> list[str]:
    """The ways to pool, in the order in which their results are concatenated."""
    given = settings.get("pooling_mode")  # sentence-transformers 5 and later
    chosen = [given] if isinstance(given, str) else list(given or ())
    chosen += [
        key.removeprefix("pooling_mode_")
        for key, on in settings.items()
        if key.startswith("pooling_mode_") and on
    ]
    modes = list(dict.fromkeys(_POOLINGS.get(mode, mode) for mode in chosen))
    if not modes or not set(modes) <= set(POOLINGS):
        raise ExportError(
            f"{source.name} pools by {' and '.join(map(str, chosen)) or 'nothing'}; supported: "
            f"{', '.join(POOLINGS)}"
        )
    if settings.get("include_prompt") is False:
        raise ExportError(
            f"{source.name} leaves the prompt's tokens out of its pooling (include_prompt), which "
            "is not supported"
        )
    # Older versions concatenate in an order of their own, not in that of the settings.
    return modes if given is not None else [mode for mode in POOLINGS if mode in modes]


def _splade(source: Source, settings: Mapping[str, Any]) -> tuple[SpladePooling, str]:
    strategy = settings.get("pooling_strategy", "max")
    activation = settings.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise ExportError(
            f"{source.name} pools by {strategy} of {activation}; supported: max or sum, of relu or "
            "log1p_relu"
        )
    num_logs = 2 if activation == "log1p_relu" else 1
    pooling = SpladePooling(largest=strategy == "max", num_logs=num_logs)
    return pooling, f"splade-{strategy}" + ("-log1p" if num_logs == 2 else "")


def read_dense(
    source: Source,
    folder: Path,
    settings: Mapping[str, Any],
    width: int,
    reads: str = "sentence_embedding",
) -> tuple[Dense, int]:
    """A Dense module and its width; ``reads`` names what it may read and write.

    Raises:
        ExportError: a weight or a setting is missing, or not supported.
    """
    where = f"the Dense module of {source.name} ({folder.name})"
    weights = _weights(where, folder)
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, reads):
            raise ExportError(f"{where} reads or writes {settings[key]!r}, which is not supported")
    linear = _linear(where, weights, "linear", width)
    num_outputs = linear.out_features
    has_residual = bool(settings.get("use_residual"))
    residual = None
    if has_residual and num_outputs != width:
        residual = _linear(where, weights, "residual", width)
    activation = _activation(where, settings.get("activation_function"))
    dense = Dense(linear, activation, has_residual=has_residual, residual=residual)
    return dense, num_outputs


def _layer_norm(source: Source, folder: Path, width: int) -> nn.LayerNorm:
    where = f"the LayerNorm module of {source.name} ({folder.name})"
    weights = _weights(where, folder)
    norm = nn.LayerNorm(width)
    _set(where, norm, {key: weights.get(f"norm.{key}") for key in ("weight", "bias")})
    return norm


def _linear(where: str, weights: Mapping[str, torch.Tensor], name: str, width: int) -> nn.Linear:
    weight, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
    if weight is None or weight.ndim != 2:
        raise ExportError(f"{where} has no matrix {name}.weight")
    linear = nn.Linear(width, weight.shape[0], bias=bias is not None)
    _set(where, linear, {"weight": weight} | ({} if bias is None else {"bias": bias}))
    return linear


def _set(where: str, module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> None:
    for name, parameter in module.named_parameters():
        value = values.get(name)
        if value is None or value.shape != parameter.shape:
            given = "nothing" if value is None else f"the shape {tuple(value.shape)}"
            raise ExportError(
                f"{where} needs a {name} of the shape {tuple(parameter.shape)}, and has {given}"
            )
        parameter.data = value.float()


def _weights(where: str, folder: Path) -> dict[str, torch.Tensor]:
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ExportError(
            f"{where} has no model.safetensors; load and save the checkpoint with a current "
            "sentence-transformers, which writes one"
        )
    try:
        weights: dict[str, torch.Tensor] = load_file(path)
        return weights
    except Exception as error:  # the library has no error class of its own
        raise ExportError(f"{path} cannot be read: {first_line(error)}") from error


def _activation(where: str, name: object) -> nn.Module:
    """A module of torch by its full name; sentence-transformers' default is tanh."""
    if name is None:
        return nn.Tanh()
    path, _, short = str(name).rpartition(".")
    found = getattr(nn, short, None)
    if not path.startswith("torch.nn.modules.") or not isinstance(found, type):
        raise ExportError(f"{where} has the activation {name!r}, which is not supported")
    try:
        module = found()
    except TypeError as error:
        raise ExportError(f"{where} has the activation {name!r}, which needs settings") from error
    assert isinstance(module, nn.Module)
    return module
