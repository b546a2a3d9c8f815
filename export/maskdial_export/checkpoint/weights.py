"""A checkpoint's weights: loading them, and refusing those that do not fit the model.

transformers loads what it can: weights that are missing start at random, weights that the model
has no place for are left out, and both are no more than a warning.
"""

import re
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from maskdial_export.checkpoint import torchao
from maskdial_export.checkpoint.adapter import merge_adapter, whole_weights
from maskdial_export.checkpoint.block_diffusion import take_canvas_model
from maskdial_export.checkpoint.decision import as_scorer, load_decider
from maskdial_export.checkpoint.dequantize import dequantize
from maskdial_export.checkpoint.gliner import load_finder
from maskdial_export.checkpoint.gliner2 import load_extractor
from maskdial_export.checkpoint.gliner_labels import load_label_encoder
from maskdial_export.checkpoint.mtp import without_mtp
from maskdial_export.checkpoint.source import GLINER, GLINER2, Source
from maskdial_export.checkpoint.text_part import take_text_part, towers_left_out
from maskdial_export.errors import ExportError, first_line
from maskdial_export.phase import finding

# Weights of the body that the tasks here do not need, and buffers of older versions.
_HARMLESS = re.compile(
    r"(^|\.)(pooler\..*|position_ids|token_type_ids|rotary_emb\.inv_freq|"
    r"(attn|attention)\.(masked_)?bias|attn\.causal_mask|embed_positions\.weights)$"
)
# What quantized formats store beside weights
_SCALE = re.compile(
    r"\.(weight_(scale(_inv|_2)?|zero_point|packed|shape)|(in|out)put_scale|activation_scale|"
    r"qweight|qzeros|g_idx|scales|biases|SCB|W_q|_weight_qdata|weight\.(absmax|quant_map|_data|_scale))$"
)
# Trained weights stay far below; float16 ends at 65,504.
_LARGEST_WEIGHT = 1e6
# Beside config.json: modelopt's, and those of old versions of AutoGPTQ and AutoAWQ
_FORMAT_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
_INSTEAD = (
    ", which is not supported; export the checkpoint that it was made from, with --precision int8 "
    "or int4"
)
_MIN_MAPPED_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights.

    Attributes:
        model: of a wrapper, its text part.
        doubt: why it is not known to be the one that was trained.
        left_out: the names of the wrapper's modules that its text part does without.
        media_tokens: the tokens that stand for what these modules read.
    """

    model: PreTrainedModel
    doubt: str | None
    left_out: tuple[str, ...] = ()
    media_tokens: tuple[int, ...] = ()


def load_model(source: Source, *, strict: bool, console: Console) -> LoadedModel:
    """Loads the model for inference, in float32 on the CPU, with eager attention.

    ``strict`` refuses weights that are missing, and weights that the model does not use. Otherwise
    both are shown, and returned: such a model is not known to be the one that was trained.

    Raises:
        ExportError: weights are damaged, or do not fit the model.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    finds = source.architecture in (GLINER, GLINER2)
    model_class = PreTrainedModel if finds else getattr(transformers, source.architecture)
    decides = source.task == "decide"
    wraps = not (decides or finds) and "text_config" in model_class.config_class.sub_configs
    load = partial(load_decider, source) if decides else model_class.from_pretrained
    if finds:
        loader = load_finder if source.finder is None else load_label_encoder
        load = partial(load_extractor if source.architecture == GLINER2 else loader, source)
    try:
        with _text_alone(source, model_class) if wraps else nullcontext():
            model, info = load(
                **({} if finds else _stored(source, model_class)),
                **({} if source.num_labels is None else {"num_labels": source.num_labels}),
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # else the error does not say which weight it is
            )
    except ExportError:
        raise
    except Exception as error:  # transformers raises many types for damaged files
        raise ExportError(f"{source.name} cannot be loaded: {first_line(error)}") from error
    replaced = frozenset() if source.adapter is None else whole_weights(source.adapter)
    _check_shapes(source, [each for each in info["mismatched_keys"] if each[0] not in replaced])
    missing = info["missing_keys"] - replaced
    if source.adapter is not None:
        model = merge_adapter(model, source.adapter)
    model.eval()
    _check_scales(source, info["unexpected_keys"])
    unused = without_mtp(model, info["unexpected_keys"])
    loaded = LoadedModel(model, None)
    if decides:
        missing -= {"proj.bias"}  # that of a readout without one starts at zero
        loaded = _decider_on_text(model, console)
    if wraps:
        denoises = source.task == "block-diffusion"
        part = take_canvas_model(model) if denoises else take_text_part(model, source.task)
        missing, unused = (
            {name for name in names if not part.leaves_out(name)} for names in (missing, unused)
        )
        loaded = LoadedModel(part.model, None, part.left_out, part.media_tokens)
        finding(console, part.summary)
    complaints = (_missing(source, missing), _unused(source, model, unused))
    found = [complaint for complaint in complaints if complaint is not None]
    if found and strict:
        raise ExportError(f"{found[0]}; --no-strict exports the model regardless")
    for complaint in found:
        finding(console, complaint)
    _check_values(source, loaded.model)
    return replace(loaded, doubt="; ".join(found) or None)


def _decider_on_text(decider: Any, console: Console) -> LoadedModel:
    """A decision model as one that scores tokens; of a body that reads images, its text part."""
    body = decider.model
    if "text_config" not in type(body.config).sub_configs:
        return LoadedModel(as_scorer(decider), None)
    part = take_text_part(body, "embed")
    finding(console, part.summary)
    decider.model = part.model
    return LoadedModel(as_scorer(decider), None, part.left_out, part.media_tokens)


def _text_alone(source: Source, model_class: type[PreTrainedModel]) -> AbstractContextManager[None]:
    config = model_class.config_class.from_pretrained(source.path, local_files_only=True)
    return towers_left_out(config)


def map_widened(source: Source, model: PreTrainedModel, folder: Path) -> None:
    """Moves weights that loading has widened from 16 bits or fewer into a file, and maps it.

    The system may drop such pages while memory is short, as it may those of a checkpoint that is in
    float32 already. The file is in ``folder``; it has no name, so it ends with the model.

    Raises:
        OSError: the file cannot be written.
    """
    parameters = list(model.parameters())
    num_bytes = sum(parameter.nbytes for parameter in parameters)
    stored = sum(file.stat().st_size for file in source.weight_files())
    widened = num_bytes >= max(_MIN_MAPPED_BYTES, 1.5 * stored)
    plain = all(parameter.dtype == torch.float32 for parameter in parameters)
    if not (widened and plain) or sys.platform == "win32":
        return
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for parameter in parameters:
            parameter.detach().contiguous().numpy().tofile(file)
        file.flush()
        mapped = torch.from_file(file.name, size=num_bytes // 4, dtype=torch.float32)
    parts = torch.split(mapped, [parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part.view(parameter.shape)


def _stored(source: Source, model_class: type[PreTrainedModel]) -> dict[str, Any]:
    """The arguments of ``from_pretrained`` that say where the weights are.

    Those of quantized checkpoints are restored first: transformers loads most of them on a GPU
    only.
    """
    has_safetensors = any(file.suffix == ".safetensors" for file in source.weight_files())
    for file in source.weight_files():
        if file.suffix == ".safetensors":
            _check_file(file)
    config_json = source.read_json("config.json")
    settings = config_json.get("quantization_config")
    if settings is None:
        _refuse_other_formats(source, config_json)
    if settings is None:
        return {
            "pretrained_model_name_or_path": source.path,
            "use_safetensors": has_safetensors,
            "local_files_only": True,
        }
    if settings.get("quant_method") == "torchao":
        torchao.check_files(source.name, source.weight_files())
    stored: dict[str, Tensor] = {}
    for file in source.weight_files():
        if file.suffix == ".safetensors":
            stored |= safetensors.torch.load_file(file)
        elif not has_safetensors:
            stored |= torch.load(file, map_location="cpu", weights_only=True)
    restored = dequantize(source.name, settings, stored)
    config = model_class.config_class.from_pretrained(source.path, local_files_only=True)
    del config.quantization_config
    with torch.device("meta"):
        if any(isinstance(module, Conv1D) for module in model_class(config).modules()):
            raise ExportError(
                f"{source.name} is quantized, which is not supported for {config.model_type} models"
            )
    return {"pretrained_model_name_or_path": None, "config": config, "state_dict": restored}


def _refuse_other_formats(source: Source, config: Mapping[str, Any]) -> None:
    """Refuses checkpoints that say elsewhere than usual that they are quantized."""
    for file_name in _FORMAT_FILES:
        content = source.read_json(file_name)
        if not content:
            continue
        settings = content.get("quantization") or content
        kind = content.get("producer", {}).get("name") or settings.get("quant_method") or "a format"
        details = settings.get("quant_algo") or settings.get("bits") or settings.get("w_bit")
        named = kind if details is None else f"{kind} ({details})"
        raise ExportError(f"{source.name} is quantized with {named}, as {file_name} says{_INSTEAD}")
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "bits" in mlx:
        named = f"MLX's {mlx['bits']} bits"
        raise ExportError(f"{source.name} is quantized with {named}, as config.json says{_INSTEAD}")


def _check_file(path: Path) -> None:
    """Reads the header of a file, which does not fit a file that ends early."""
    try:
        with safetensors.safe_open(path, "pt"):
            pass
    except safetensors.SafetensorError as error:
        raise ExportError(
            f"{path} is damaged or incomplete ({first_line(error)}); get it again"
        ) from error


def _check_shapes(source: Source, mismatched: Iterable[tuple[str, Any, Any]]) -> None:
    first = min(mismatched, key=lambda each: each[0], default=None)
    if first is not None:
        name, stored, expected = first
        raise ExportError(
            f"{name} of {source.name} has the shape {tuple(stored)}, but config.json describes a "
            f"model where it has {tuple(expected)}; they do not belong together"
        )


def _check_scales(source: Source, unused: Iterable[str]) -> None:
    """Refuses unused weights by which others would have to be scaled, even with --no-strict."""
    scales = sorted(name for name in unused if _SCALE.search(name))
    if scales:
        raise ExportError(
            f"{source.name} has {_some(scales)} of a quantized model, but config.json names no "
            "format (quantization_config) by which to restore the others; export the checkpoint "
            "that it was made from, with --precision int8 or int4"
        )


def _missing(source: Source, names: Iterable[str]) -> str | None:
    missing = sorted(names)
    if source.task in ("embed", "embed-all", "embed-hybrid"):  # pools the hidden states itself
        missing = [name for name in missing if not name.startswith("pooler.")]
    if not missing:
        return None
    return (
        f"{source.name} lacks {_some(missing)} of a {source.architecture}, which would start at "
        "random"
    )


def _unused(source: Source, model: PreTrainedModel, names: Iterable[str]) -> str | None:
    unused = sorted(name for name in names if _matters(model, name))
    if not unused:
        return None
    why = ", as config.json describes it, has no place"
    kind = source.read_json("config.json").get("position_embedding_type", "absolute")
    if kind != "absolute" and any("distance_embedding" in name for name in unused):
        why = f" in transformers {transformers.__version__} has no place ({kind} was dropped)"
    return f"{source.name} has {_some(unused)} for which {source.architecture}{why}"


def _matters(model: PreTrainedModel, name: str) -> bool:
    """Whether an unused weight belongs to what the model computes, not to another head."""
    if _HARMLESS.search(name):
        return False
    body = name.startswith(f"{model.base_model_prefix}.")
    module: nn.Module = model
    *path, _ = name.split(".")
    for depth, part in enumerate(path):
        children = dict(module.named_children())
        if part not in children:
            return body or (depth > 0 and model.base_model is model)
        module = children[part]
    return True  # a parameter more in a module of the model


def _some(names: list[str]) -> str:
    if len(names) == 1:
        return f"the weight {names[0]}"
    return f"{len(names)} weights (for example {names[0]})"


def _check_values(source: Source, model: PreTrainedModel) -> None:
    """Refuses weights that no training leaves behind."""
    for name, parameter in model.named_parameters():
        if parameter.numel() == 0:
            continue
        lowest, highest = (float(value) for value in torch.aminmax(parameter.detach()))
        if not max(-lowest, highest) <= _LARGEST_WEIGHT:  # also if it is NaN
            found = lowest if not -lowest <= _LARGEST_WEIGHT else highest
            raise ExportError(
                f"{name} of {source.name} contains {found:.3g}: the weights are damaged"
            )
