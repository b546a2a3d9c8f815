"""EAGLE-3 heads: checkpoints that draft for another model.

There are two layouts: SafeAILab's (``LlamaForCausalLMEagle3``, whose layer is ``midlayer``), which
SpecForge and ModelOpt write as well, and that of vLLM's speculators package, whose layer is
``layers.0`` and whose configuration has ``transformer_layer_config``.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from maskdial_export.checkpoint.eagle_head import (
    Eagle,
    EagleConfig,
    EagleHead,
    Features,
    layers_of,
)
from maskdial_export.checkpoint.hub import download
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.errors import ExportError, first_line

_QUERY = "layers.0.self_attn.q_proj.weight"
# What the speculators package trains with, and keeps at times
_OF_TRAINING = re.compile(r"^(verifier_|t2d$|layers\.0\.self_attn\.rotary_emb\.)")


def load_eagle(name: str, main: PreTrainedModel, longest: int, *, allow_pickle: bool) -> Eagle:
    """Loads an EAGLE-3 head in float32.

    Args:
        name: its folder, or its Hub id.
        main: the target, the model that it drafts for.
        longest: the tokens of the longest text that the target reads.
        allow_pickle: whether to load a ``.bin`` file, whose weights alone are read.

    Raises:
        ExportError: it is no EAGLE-3 head, or not one of this target; or it is damaged.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = download(name, None, allow_pickle=allow_pickle)
    written = read_json(folder / "config.json")
    if not written:
        raise ExportError(f"{name} is not an EAGLE-3 head: it has no config.json")
    tensors = _read_weights(name, folder, allow_pickle=allow_pickle)
    settings = _layer_settings(name, written, tensors)
    config = _config(name, written, settings, tensors, main)
    config.layer.max_position_embeddings = longest  # not what it was trained up to
    token_ids = _token_ids(name, tensors, config)
    table = _embeddings(name, tensors.pop("embed_tokens.weight", None), config, main)
    try:
        head, features = EagleHead(config, table).eval(), Features(config).eval()
    except Exception as error:  # transformers raises many types
        raise ExportError(f"{name}: config.json: {first_line(error)}") from error
    _fill(name, head, features, tensors)
    return Eagle(config, head, features, token_ids, folder.resolve().name)


def _read_weights(name: str, folder: Path, *, allow_pickle: bool) -> dict[str, Tensor]:
    """Its weights, by the speculators package's names."""
    files = sorted(folder.glob("*.safetensors"))
    pickles = [] if files else sorted(folder.glob("pytorch_model*.bin"))
    if pickles and not allow_pickle:
        raise ExportError(
            f"the weights of {name} are in {pickles[0].name}, a pickle, which can run code when "
            "loaded; convert it to safetensors, or pass --allow-pickle if you trust it"
        )
    if not files and not pickles:
        raise ExportError(f"{name} has no weights: model.safetensors is missing")
    tensors: dict[str, Tensor] = {}
    try:
        for file in files:
            tensors |= safetensors.torch.load_file(file)
        for file in pickles:
            tensors |= torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch and safetensors raise any type
        raise ExportError(f"{name} cannot be loaded: {first_line(error)}") from error
    found = {
        each.removeprefix("model.").replace("midlayer.", "layers.0."): tensor
        for each, tensor in tensors.items()
    }
    return {each: tensor for each, tensor in found.items() if not _OF_TRAINING.match(each)}


def _layer_settings(
    name: str, written: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Mapping[str, Any]:
    """What the configuration says of the layer."""
    settings: Any = written.get("transformer_layer_config", written)
    if not isinstance(settings, dict):
        raise ExportError(f"{name}: transformer_layer_config in config.json is not an object")
    query, fc = tensors.get(_QUERY), tensors.get("fc.weight")
    size = settings.get("hidden_size")
    if query is None or fc is None or query.shape[-1:] != (2 * len(fc),) or len(fc) != size:
        raise ExportError(
            f"{name} is not an EAGLE-3 head: that has a projection fc, and a layer whose queries "
            "read embeddings and features, twice hidden_size columns"
        )
    others = {each for each in tensors if re.match(r"layers\.[1-9]", each)}
    if others or written.get("num_hidden_layers", 1) != 1:
        raise ExportError(f"{name} has several layers, and heads of one layer are supported")
    if not all(tensor.is_floating_point() for each, tensor in tensors.items() if each != "d2t"):
        raise ExportError(
            f"{name} is quantized, which is not supported; pass the head that it was made from"
        )
    return settings


def _config(
    name: str,
    written: Mapping[str, Any],
    settings: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    main: PreTrainedModel,
) -> EagleConfig:
    """Its shape, which must fit the target."""
    of_main: Any = main.config
    given = written.get("eagle_config")
    own = {**(given if isinstance(given, dict) else {}), **written}
    try:
        layer = LlamaConfig(**_without_names(settings))
    except Exception as error:  # transformers raises many types
        raise ExportError(f"{name}: config.json: {first_line(error)}") from error
    layer.num_hidden_layers, layer.pad_token_id = 1, None
    layer.vocab_size = of_main.vocab_size
    layer._attn_implementation = "eager"
    places = _places(name, written, len(layers_of(main)))
    columns = tensors["fc.weight"].shape[1]
    if columns != len(places) * of_main.hidden_size:
        raise ExportError(
            f"{name} does not fit the model: it reads {columns} columns, and {len(places)} layers "
            f"of {type(main).__name__} have {len(places) * of_main.hidden_size}; is it the head of "
            "another model?"
        )
    draft = tensors.get("lm_head.weight")
    return EagleConfig(
        layer,
        layer.vocab_size if draft is None else len(draft),
        of_main.hidden_size,
        places,
        norm_before_residual=bool(own.get("norm_before_residual")),
        norm_before_fc=bool(own.get("norm_before_fc")) or "input_norm.weight" in tensors,
        fc_norm=bool(own.get("fc_norm")) or "fc_norm.0.weight" in tensors,
        norm_output=bool(own.get("norm_output")),
        fc_bias="fc.bias" in tensors,
    )


def _without_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without what says which class they are for."""
    left_out = {"architectures", "auto_map", "model_type", "layer_types", "eagle_config", "dtype"}
    return {key: each for key, each in settings.items() if key not in left_out}


def _places(name: str, written: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers of the target before which hidden states are read.

    On the top level, where vLLM's package writes them, the numbers are these; in ``eagle_config``,
    where SpecForge and ModelOpt do, they are of the layers after which, one less (as SGLang reads
    them). Without numbers, those of the paper's authors.
    """
    key, nested = "eagle_aux_hidden_state_layer_ids", written.get("eagle_config")
    found, shift = written.get(key), 0
    if found is None and isinstance(nested, dict):
        found, shift = nested.get(key), 1
    if found is None:
        found = [2, num_layers // 2, num_layers - 3]
        if not 0 <= found[-1] < num_layers:
            raise ExportError(
                f"{name} names no layers to read ({key}), and the usual ones, 2, a half and all "
                f"but 3, are not there in a model of {num_layers}"
            )
    if not isinstance(found, list) or not found or not all(type(each) is int for each in found):
        raise ExportError(f"{name}: {key} in config.json is not a list of layers")
    places = tuple(each + shift for each in found)
    if not all(0 <= each < num_layers for each in places):
        raise ExportError(
            f"{name} does not fit the model: {key} in config.json names the layers {found}, and "
            f"the model has {num_layers}"
        )
    return places


def _token_ids(
    name: str, tensors: dict[str, Tensor], config: EagleConfig
) -> NDArray[np.int64] | None:
    """The target's tokens that the columns of its logits stand for; None for all of them."""
    shifts, size = tensors.pop("d2t", None), config.draft_vocab_size
    num_tokens: int = config.layer.vocab_size
    if shifts is None:
        if size != num_tokens:
            raise ExportError(
                f"{name} does not fit the model: it predicts {size} tokens and has no d2t, which "
                f"would say which of the model's {num_tokens} they are"
            )
        return None
    numbers = np.arange(len(shifts))
    token_ids: NDArray[np.int64] = shifts.to(torch.int64).flatten().numpy() + numbers
    if len(token_ids) != size or token_ids.min() < 0 or token_ids.max() >= num_tokens:
        raise ExportError(
            f"{name} does not fit the model: d2t does not map its {size} columns to tokens of the "
            f"model, which has {num_tokens}"
        )
    is_all = len(token_ids) == num_tokens and np.array_equal(token_ids, numbers)
    return None if is_all else token_ids


def _embeddings(
    name: str, table: Tensor | None, config: EagleConfig, main: PreTrainedModel
) -> nn.Embedding:
    """The embeddings that it reads: its own, or the target's."""
    of_main: Any = main.get_input_embeddings()
    num_tokens, size = config.layer.vocab_size, config.layer.hidden_size
    if table is None:
        if of_main.weight.shape != (num_tokens, size):
            raise ExportError(
                f"{name} brings no embeddings, and those of the model have "
                f"{of_main.weight.shape[1]} columns instead of its {size}"
            )
        return _table(of_main.weight)
    if table.shape != (num_tokens, size):
        raise ExportError(
            f"{name} does not fit the model: it has embeddings for {len(table)} tokens, and the "
            f"model has {num_tokens}"
        )
    return _table(table.float())


def _table(weight: Tensor) -> nn.Embedding:
    num_tokens, size = weight.shape
    return nn.Embedding(num_tokens, size, _weight=weight, _freeze=True)


def _fill(name: str, head: EagleHead, features: Features, tensors: Mapping[str, Tensor]) -> None:
    """Gives the modules their weights."""
    of_head = {_written(each): own for each, own in head.named_parameters()}
    parameters = {**of_head, **dict(features.named_parameters())}
    parameters.pop(_written("model.embed_tokens.weight"))
    missing, unknown = parameters.keys() - tensors.keys(), tensors.keys() - parameters.keys()
    if missing:
        raise ExportError(f"{name} lacks weights of an EAGLE-3 head: {_some(missing)}")
    if unknown:
        raise ExportError(f"{name} has weights that no EAGLE-3 head has: {_some(unknown)}")
    for each, parameter in parameters.items():
        tensor = tensors[each]
        if tensor.shape != parameter.shape:
            raise ExportError(
                f"{name}: {each} has the shape {tuple(tensor.shape)}, and its config.json means "
                f"{tuple(parameter.shape)}"
            )
        parameter.data = tensor.float()


def _written(name: str) -> str:
    """A parameter's name in checkpoints, by that in `EagleHead`."""
    return name.removeprefix("model.").removeprefix("eagle.").replace("eagle_head.", "lm_head.")


def _some(names: Collection[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
