"""Embeddings: what sentence-transformers' files say of pooling, prompts and the longest text."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from maskdial.bundle.manifest import Embedding
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.pooling import (
    Dense,
    LargestWeights,
    Leading,
    Normalize,
    Pooler,
    SpladePooling,
    TokenPooling,
)
from maskdial_export.checkpoint.sentence import (
    kept_entries,
    module_folders,
    pooling_modes,
    read_prompts,
)
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError, first_line

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
            modes = pooling_modes(source, settings)
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
    kept = kept_entries(source, "max_active_dims" if sparse else "truncate_dim")
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
