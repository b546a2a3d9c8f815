"""Layers for multi-token prediction that a checkpoint brings beside its model."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError, first_line

ARCHITECTURES = frozenset({"DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "MellumForCausalLM"})
"""Those whose layer transformers itself runs, with `generate(use_mtp=True)`."""

_UNDECLARED = frozenset({"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"})
"""Those with one layer, of full attention, that their configurations in transformers do not name.
Its weights are stored as those of Mellum's are.
"""


def of_mtp_layers(model: PreTrainedModel) -> re.Pattern[str] | None:
    """Matches the names of a checkpoint's weights for multi-token prediction; None if the model is
    of an architecture whose layers are not known, or of one without.
    """
    config: Any = model.config
    if type(model).__name__ in _UNDECLARED:
        return re.compile(r"^mtp\.")
    if type(model).__name__ not in ARCHITECTURES:
        return None
    layers, count = config.num_hidden_layers, config.num_mtp_layers or 0
    if not count:
        return None
    numbers = "|".join(map(str, range(layers, layers + count)))
    return re.compile(rf"^(model\.layers\.({numbers})|mtp)\.")


def without_mtp(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Names of a checkpoint's weights without those of its layers for multi-token prediction.

    A layer too many, of a configuration that says fewer than there are, has no ``eh_proj``.
    """
    pattern, names = of_mtp_layers(model), set(names)
    own = {name for name in names if pattern is not None and pattern.match(name)}
    brings_one = any(name.startswith("mtp.") or ".eh_proj." in name for name in own)
    return names - own if brings_one else names


def load_mtp(source: Source, model: PreTrainedModel) -> MtpModel | None:
    """The layers for multi-token prediction, in float32; None if the checkpoint has none, or is
    quantized: its weights would have to be restored first.

    Raises:
        ExportError: some of their weights are missing, or damaged.
    """
    pattern = of_mtp_layers(model)
    if pattern is None or source.read_json("config.json").get("quantization_config"):
        return None
    if not any(map(pattern.match, _names(source))):
        return None
    config: Any = model.config
    if type(model).__name__ in _UNDECLARED:
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    config.name_or_path = str(source.path)  # which the text part of a wrapper lacks
    # transformers looks for the numbers of the layers of published checkpoints
    model._keys_to_ignore_on_load_unexpected = [pattern.pattern]
    try:
        mtp = MtpModel.from_pretrained(model)
    except Exception as error:  # transformers raises many types for damaged files
        raise ExportError(
            f"the layers for multi-token prediction of {source.name} cannot be loaded: "
            f"{first_line(error)}"
        ) from error
    return mtp.eval()


def _names(source: Source) -> Iterator[str]:
    """The names of a checkpoint's weights."""
    for file in source.weight_files():
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:
                yield from opened.keys()
