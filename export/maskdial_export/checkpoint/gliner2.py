"""GLiNER2 checkpoints: weights of an encoder with heads for spans, labels and counts.

Zaratiana et al. 2025, "GLiNER2: An Efficient Multi-Task Information Extraction System with
Schema-Driven Interface". The package `gliner2` is not needed, nor is `gliner`.
"""

from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from maskdial.bundle.manifest import SCHEMA_MARKERS, Extraction
from maskdial_export.checkpoint.count_head import COUNTING_LAYERS, CountHead
from maskdial_export.checkpoint.entity_heads import Weights, WordContext, WordHead
from maskdial_export.checkpoint.gliner import as_finder, load_body, stored_linear, stored_weights
from maskdial_export.checkpoint.source import Source, read_json
from maskdial_export.errors import ExportError, first_line

_BODY = "encoder."
_ENCODER_CONFIG = "encoder_config/config.json"
_HEADS = ("span_rep_layer.", "classifier.", "count_pred.", "count_embed.")


class SchemaHead(nn.Module):
    """Columns (start, end, label, counts, hidden) of each word or marker."""

    def __init__(self, stored: Weights) -> None:
        super().__init__()
        self.of_word = WordHead(stored)
        self.of_label = _two_layers(stored, "classifier")
        self.counts = _two_layers(stored, "count_pred")

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat(
            [self.of_word(hidden), self.of_label(hidden), self.counts(hidden), hidden], dim=-1
        )


def load_extractor(source: Source, **_: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a GLiNER2 checkpoint, and what `from_pretrained` would say of its weights.

    Raises:
        ExportError: it is of a kind that is not supported, or lacks weights.
    """
    _check(source)
    settings = dict(read_json(source.path / _ENCODER_CONFIG))
    model_type = settings.pop("model_type", None)
    if model_type not in CONFIG_MAPPING_NAMES:
        raise ExportError(
            f"transformers {transformers.__version__} has no model type {model_type!r}, which "
            f"{_ENCODER_CONFIG} of {source.name} has"
        )
    stored = _stored(source)
    body, info = load_body(CONFIG_MAPPING[model_type](**settings), stored, _BODY)
    finder = as_finder(body)
    finder.projection = nn.Identity()
    finder.words = WordContext({}, 0)
    try:
        finder.head = SchemaHead(stored)
        finder.count_head = CountHead(stored, source.read_json("config.json")["counting_layer"])
    except KeyError as error:
        raise ExportError(f"{source.name} lacks the weight {error.args[0]}") from error
    info["unexpected_keys"] |= {name for name in stored if not name.startswith((_BODY, *_HEADS))}
    return cast(PreTrainedModel, finder), info


def _check(source: Source) -> None:
    """Refuses what this export does not know."""
    config = source.read_json("config.json")
    spans = config.get("span_head") or {}
    supported: dict[str, tuple[object, tuple[str, ...]]] = {
        "architecture": (config.get("architecture") or "span", ("span",)),
        "token_pooling": (config.get("token_pooling") or "first", ("first",)),
        "counting_layer": (config.get("counting_layer"), tuple(COUNTING_LAYERS)),
        "span_mode": (spans.get("span_mode", "markerV0"), ("markerV0",)),
    }
    for name, (value, values) in supported.items():
        if value not in values:
            raise ExportError(
                f"{source.name} has {name} {value!r} in config.json, which is not supported; "
                f"{' and '.join(map(repr, values))} {'are' if len(values) > 1 else 'is'}"
            )


def _stored(source: Source) -> dict[str, Tensor]:
    """All stored weights, under GLiNER's names where it has the same layers."""
    own, shared = "span_rep.", "span_rep_layer."
    return {
        f"{shared}{name.removeprefix(own)}" if name.startswith(own) else name: each
        for name, each in stored_weights(source).items()
    }


def _two_layers(stored: Weights, name: str) -> nn.Sequential:
    first, last = (stored_linear(stored, f"{name}.{place}") for place in (0, 2))
    if first is None or last is None:
        raise KeyError(f"{name}.0.weight")
    return nn.Sequential(first, nn.ReLU(), last)


def gliner2_tokenizer(source: Source) -> Any:
    """transformers' tokenizer of a checkpoint as gliner2 sets it up.

    Raises:
        ExportError: it cannot be loaded.
    """

    def load(**settings: Any) -> Any:
        return transformers.AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=False, local_files_only=True, **settings
        )

    try:
        try:
            made = load()
        except AttributeError:  # an older form of this field
            made = load(extra_special_tokens={})
    except Exception as error:  # transformers raises many types
        raise ExportError(
            f"the tokenizer of {source.name} cannot be loaded: {first_line(error)}"
        ) from error
    made.add_special_tokens({"additional_special_tokens": [*SCHEMA_MARKERS]})
    return made


def read_extraction(source: Source, model: Any) -> Extraction:
    """How the model reads a schema and a text."""
    config = source.read_json("config.json")
    width = (config.get("span_head") or {}).get("max_width") or config.get("max_width") or 8
    return Extraction(
        hidden_size=model.config.hidden_size,
        max_width=int(width),
        max_count=model.head.counts[-1].out_features,
    )
