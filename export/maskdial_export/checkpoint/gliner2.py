"""GLiNER2 checkpoints: weights of an encoder with heads for spans, labels and counts.

Zaratiana et al. 2025, "GLiNER2: An Efficient Multi-Task Information Extraction System with
Schema-Driven Interface". Its architecture `boundary` is GLiNER2.5. The package `gliner2` is not
needed, nor is `gliner`.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from maskdial.bundle.manifest import SCHEMA_MARKERS, Extraction
from maskdial_export.checkpoint.boundary_head import BoundaryHead, BoundarySettings
from maskdial_export.checkpoint.count_head import COUNTING_LAYERS, CountHead
from maskdial_export.checkpoint.entity_heads import Weights, WordContext, WordHead
from maskdial_export.checkpoint.gliner import as_finder, load_body, stored_linear, stored_weights
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.source import Source
from maskdial_export.checkpoint.tokenizer_file import let_file_rule
from maskdial_export.errors import ExportError, first_line

_BODY = "encoder."
_ENCODER_CONFIG = "encoder_config/config.json"
_HEADS = ("span_rep_layer.", "classifier.", "count_pred.", "count_embed.")
_BOUNDARY_HEADS = ("boundary_head.", "classifier.", "record_decoder.", "relation_scorer.")
_ABSENCE = "boundary_head.null_projection"
_CERTAIN = 1e4  # a logit


class SchemaHead(nn.Module):
    """Columns (start, end, label, counts, hidden) of each word or marker, of `span`."""

    def __init__(self, stored: Weights) -> None:
        super().__init__()
        self.of_word = WordHead(stored)
        self.of_label = _two_layers(stored, "classifier")
        self.counts = _two_layers(stored, "count_pred")

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat(
            [self.of_word(hidden), self.of_label(hidden), self.counts(hidden), hidden], dim=-1
        )


class MarkerHead(nn.Module):
    """Columns (label, absent, hidden) of each word or marker, of `boundary`.

    ``label`` is a label's logit, and a field has no spans if ``absent`` is positive.
    """

    def __init__(self, stored: Weights, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.of_label = _two_layers(stored, "classifier")
        temperature = float(settings.get("classification_temperature", 1))
        for parameter in self.of_label[2].parameters():
            parameter.data /= temperature
        self.absent = None
        if settings.get("enable_abstention", True):
            self.absent = stored_linear(stored, _ABSENCE)
            if self.absent is None:
                raise KeyError(f"{_ABSENCE}.weight")
            threshold = torch.tensor(float(settings.get("abstention_threshold", 0.5)))
            self.absent.bias.data -= threshold.logit().clamp(-_CERTAIN, _CERTAIN)

    def forward(self, hidden: Tensor) -> Tensor:
        absent = torch.zeros_like(hidden[..., :1]) if self.absent is None else self.absent(hidden)
        return torch.cat([self.of_label(hidden), absent, hidden], dim=-1)


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
    heads = _BOUNDARY_HEADS if _pairs_boundaries(source) else _HEADS
    try:
        finder.head, finder.field_head = _heads(source, stored)
    except KeyError as error:
        raise ExportError(f"{source.name} lacks the weight {error.args[0]}") from error
    except RuntimeError as error:
        raise ExportError(
            f"the weights of {source.name} do not fit its config.json: {first_line(error)}"
        ) from error
    info["unexpected_keys"] |= {name for name in stored if not name.startswith((_BODY, *heads))}
    return cast(PreTrainedModel, finder), info


def _pairs_boundaries(source: Source) -> bool:
    """Whether a checkpoint is of GLiNER2.5."""
    return bool(source.read_json("config.json").get("architecture") == "boundary")


def _heads(source: Source, stored: Weights) -> tuple[nn.Module, nn.Module]:
    """What makes columns of a token's hidden state, and what reads a schema's fields."""
    config = source.read_json("config.json")
    if not _pairs_boundaries(source):
        return SchemaHead(stored), CountHead(stored, config["counting_layer"])
    settings = config.get("boundary_head") or {}
    return MarkerHead(stored, settings), BoundaryHead(stored, BoundarySettings.read(settings))


def _check(source: Source) -> None:
    """Refuses what this export does not know."""
    config = source.read_json("config.json")
    spans, pairs = config.get("span_head") or {}, config.get("boundary_head") or {}
    supported: dict[str, tuple[object, tuple[object, ...]]] = {
        "architecture": (config.get("architecture") or "span", ("span", "boundary")),
        "token_pooling": (config.get("token_pooling") or "first", ("first",)),
    }
    if _pairs_boundaries(source):
        supported |= {
            "candidate_pool": (pairs.get("candidate_pool", "per_query"), ("per_query", "shared")),
            "overlap_policy": (pairs.get("overlap_policy", "flat"), ("flat", "disallow")),
            "adaptive_threshold": (pairs.get("adaptive_threshold", False), (False,)),
            "content_soft_max_pool": (pairs.get("content_soft_max_pool", False), (False,)),
        }
    else:
        supported |= {
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
    # GLiNER2.5 has its dropout before the last one
    places = (0, 3 if f"{name}.3.weight" in stored else 2)
    first, last = (stored_linear(stored, f"{name}.{place}") for place in places)
    if first is None or last is None:
        raise KeyError(f"{name}.0.weight")
    return nn.Sequential(first, nn.ReLU(), last)


def gliner2_tokenizer(source: Source) -> Any:
    """transformers' tokenizer of a checkpoint as gliner2 sets it up.

    Raises:
        ExportError: it cannot be loaded.
    """

    def load(**settings: Any) -> Any:
        made = transformers.AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=False, local_files_only=True, **settings
        )
        let_file_rule(made, source.path, local_files_only=True, **settings)
        return made

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
    if _pairs_boundaries(source):
        return Extraction(scores="boundary", hidden_size=model.config.hidden_size)
    config = source.read_json("config.json")
    width = (config.get("span_head") or {}).get("max_width") or config.get("max_width") or 8
    return Extraction(
        hidden_size=model.config.hidden_size,
        max_width=int(width),
        max_count=model.head.counts[-1].out_features,
    )
