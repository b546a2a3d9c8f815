"""GLiNER checkpoints: ``gliner_config.json``, and weights of an encoder with a head.

Zaratiana et al. 2023, "GLiNER: Generalist Model for Named Entity Recognition using Bidirectional
Transformer". The package `gliner` is not needed: the encoder is a model of transformers, and the
heads are a few products (`maskdial_export.checkpoint.entity_heads`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import safetensors.torch
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from maskdial.bundle.manifest import Entities
from maskdial_export.checkpoint.entity_heads import SpanHead, TokenHead, WordContext, WordHead
from maskdial_export.checkpoint.source import GLINER_CONFIG, Source
from maskdial_export.checkpoint.tokenizer_file import let_file_rule
from maskdial_export.errors import ExportError, first_line

_BODY = "token_rep_layer.bert_layer.model."
_OF_LABELS = "token_rep_layer.labels_"
_PROJECTION = "token_rep_layer.projection"
_ENTITY, _SEPARATOR = "<<ENT>>", "<<SEP>>"
_FLERT = "[FLERT]"  # one more token that gliner adds, and never uses
# Relative positions of DeBERTa go on beyond the length of its training.
_UNBOUNDED = 2048
_HEADS = ("span_rep_layer.", "prompt_rep_layer.", "scorer.", "rnn.")


@dataclass(frozen=True, slots=True)
class GlinerConfig:
    """What ``gliner_config.json`` says, with gliner's own defaults."""

    name: str
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, source: Source) -> "GlinerConfig":
        """Raises: ExportError: the checkpoint is of a kind that is not supported."""
        config = cls(source.name, source.read_json(GLINER_CONFIG))
        config.check()
        return config

    def get(self, name: str, default: Any) -> Any:
        """A setting; null stands for its default."""
        value = self.settings.get(name)
        return default if value is None else value

    @property
    def is_span(self) -> bool:
        """Whether spans are scored, not tokens."""
        return bool(self.get("span_mode", "markerV0") != "token_level")

    @property
    def labels_encoder(self) -> str | None:
        """The name of the encoder that reads labels by themselves; None if there is none."""
        name = self.get("labels_encoder", "")
        return str(name) if name else None

    def check(self) -> None:
        """Refuses what this export does not know.

        Raises:
            ExportError: it does not know something.
        """
        supported: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "span_mode": ("markerV0", ("markerV0", "token_level")),
            "words_splitter_type": ("whitespace", ("whitespace",)),
            "subtoken_pooling": ("first", ("first", "last")),
            "fuse_layers": (False, (False,)),
            "precomputed_prompts_mode": (False, (False,)),
            "represent_spans": (False, (False,)),
            "labels_decoder": ("", ("",)),
            "relations_layer": ("", ("",)),
            "span_encoder_config": ({}, ({},)),
        }
        for name, (default, values) in supported.items():
            value = self.get(name, default)
            if value not in values:
                known = " and ".join(repr(each) for each in values if each)
                raise ExportError(
                    f"{self.name} has {name} {value!r} in {GLINER_CONFIG}, which is not supported"
                    + (f"; {known} {'are' if len(values) > 1 else 'is'}" if known else "")
                )
        if self.labels_encoder is not None:
            if not self.is_span:
                raise ExportError(
                    f"{self.name} scores tokens and encodes labels by themselves; such models are "
                    "supported if they score spans (span_mode markerV0)"
                )
            fusion = self.get("post_fusion_schema", "")
            if fusion:
                raise ExportError(
                    f"{self.name} has post_fusion_schema {fusion!r} in {GLINER_CONFIG}: each label "
                    "attends to the text, so it has no vector of its own; this is not supported"
                )

    def encoder(self, kind: Literal["encoder", "labels_encoder"] = "encoder") -> PreTrainedConfig:
        """The configuration of an encoder, from the Hub where the checkpoint has none.

        Raises:
            ExportError: transformers does not know it, or it cannot be found.
        """
        given = self.settings.get(f"{kind}_config")
        if isinstance(given, dict):
            settings = dict(given)
            model_type = settings.pop("model_type", "deberta-v2")
            if model_type not in CONFIG_MAPPING_NAMES:
                raise ExportError(
                    f"transformers {transformers.__version__} has no model type {model_type!r}, "
                    f"which {self.name} has for its encoder"
                )
            return cast(PreTrainedConfig, CONFIG_MAPPING[model_type](**settings))
        of_text = self.get("model_name", "microsoft/deberta-v3-small")
        encoder = of_text if kind == "encoder" else self.labels_encoder
        try:
            return transformers.AutoConfig.from_pretrained(encoder, trust_remote_code=False)
        except Exception as error:  # transformers raises many types
            raise ExportError(
                f"{self.name} has no {kind}_config in {GLINER_CONFIG}, and its encoder {encoder} "
                f"cannot be found ({first_line(error)}); save it again with gliner: "
                f"GLiNER.from_pretrained({self.name!r}).save_pretrained(FOLDER)"
            ) from error


class _Finder:
    """The forward function of an encoder with such a head: columns for every token."""

    model: PreTrainedModel
    head: nn.Module
    projection: nn.Module
    words: nn.Module

    def forward(self, input_ids: Tensor, **settings: Any) -> TokenClassifierOutput:
        """The head's columns, (batch, length, num_columns)."""
        hidden = self.model(input_ids=input_ids, **settings).last_hidden_state
        return TokenClassifierOutput(
            logits=self.head(self.words(self.projection(hidden), input_ids))
        )


def load_finder(source: Source, **_: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model of a GLiNER checkpoint, and what `from_pretrained` would say of its weights.

    Raises:
        ExportError: the weights do not fit the configuration.
    """
    config = GlinerConfig.read(source)
    stored = stored_weights(source)
    encoder = config.encoder()
    body, info = load_body(encoder, stored, _BODY)
    if getattr(encoder, "position_biased_input", True) is False and encoder.relative_attention:
        body.config.max_position_embeddings = _UNBOUNDED
    finder = as_finder(body)
    finder.projection = stored_linear(stored, _PROJECTION) or nn.Identity()
    two = config.labels_encoder is not None
    head = WordHead if two else SpanHead if config.is_span else TokenHead
    try:
        finder.head = head(stored)
        # gliner applies the LSTM to words that were read with their labels only
        finder.words = WordContext(stored, 0 if two else int(config.get("num_rnn_layers", 1)))
    except KeyError as error:
        raise ExportError(
            f"{source.name} lacks the weight {error.args[0]} of a GLiNER model with "
            f"{config.get('span_mode', 'markerV0')}"
        ) from error
    known = (_BODY, _PROJECTION, *_HEADS, *([_OF_LABELS] if two else []))
    info["unexpected_keys"] |= {name for name in stored if not name.startswith(known)}
    return cast(PreTrainedModel, finder), info


def load_body(
    encoder: PreTrainedConfig, stored: Mapping[str, Tensor], prefix: str
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """An encoder with the weights of a prefix, and what `from_pretrained` would say of these."""
    own = {n.removeprefix(prefix): each for n, each in stored.items() if n.startswith(prefix)}
    tables = ("word_embeddings", "tok_embeddings")
    table = next((own[n] for part in tables for n in own if part in n), None)
    if table is not None:
        encoder.vocab_size = len(table)
    encoder._attn_implementation = "eager"
    body = transformers.AutoModel.from_config(encoder, trust_remote_code=False).float().eval()
    expected = body.state_dict()
    mismatched = [
        (f"{prefix}{name}", each.shape, expected[name].shape)
        for name, each in own.items()
        if name in expected and each.shape != expected[name].shape
    ]
    if not mismatched:
        body.load_state_dict(own, strict=False)
    return body, {
        "mismatched_keys": mismatched,
        "missing_keys": set(expected) - set(own),
        "unexpected_keys": {f"model.{name}" for name in set(own) - set(expected)},
    }


def as_finder(body: Any) -> Any:
    """A model of an encoder, which is to get a head, a projection and a context of words.

    It is in a class of the encoder's own file, whose functions the tracing replaces.
    """
    family = next(each for each in type(body).__mro__ if each.__name__.endswith("PreTrainedModel"))
    names = {"__module__": type(body).__module__, "base_model_prefix": "model"}
    finder: Any = type(f"{type(body).__name__}ForEntities", (_Finder, family), names)(body.config)
    finder.model = body
    return finder.eval()


def stored_weights(source: Source) -> dict[str, Tensor]:
    """All stored weights, in float32."""
    stored: dict[str, Tensor] = {}
    files = source.weight_files()
    has_safetensors = any(file.suffix == ".safetensors" for file in files)
    for file in files:
        try:
            if file.suffix == ".safetensors":
                stored |= safetensors.torch.load_file(file)
            elif not has_safetensors:
                stored |= torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # neither library has an error class of its own
            raise ExportError(f"{file} cannot be read: {first_line(error)}") from error
    return {name: each.float() for name, each in stored.items() if each.is_floating_point()}


def stored_linear(stored: Mapping[str, Tensor], name: str) -> nn.Linear | None:
    """A layer of a checkpoint; None if it has none of this name."""
    if f"{name}.weight" not in stored:
        return None
    weight, bias = stored[f"{name}.weight"], stored[f"{name}.bias"]
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(bias)
    return linear


def gliner_tokenizer(source: Source) -> Any:
    """transformers' tokenizer of a checkpoint as gliner sets it up, from the Hub where the folder
    has none.

    Raises:
        ExportError: it cannot be found.
    """
    config = GlinerConfig(source.name, source.read_json(GLINER_CONFIG))
    has_own = (source.path / "tokenizer_config.json").is_file()
    place: str | Path = source.path if has_own else config.get("model_name", "")
    try:
        made = transformers.AutoTokenizer.from_pretrained(
            place, trust_remote_code=False, local_files_only=has_own
        )
        let_file_rule(made, place, local_files_only=has_own)
    except Exception as error:  # transformers raises many types
        raise ExportError(
            f"the tokenizer of {source.name}, {place}, cannot be loaded: {first_line(error)}"
        ) from error
    for role in ("bos", "eos"):
        if hasattr(made, f"add_{role}_token") and getattr(made, f"{role}_token_id") is not None:
            setattr(made, f"add_{role}_token", True)
    if not has_own and config.labels_encoder is None:
        markers = [config.get("ent_token", _ENTITY), config.get("sep_token", _SEPARATOR)]
        made.add_tokens([_FLERT, *markers], special_tokens=True)
    return made


def read_entities(source: Source, tokenizer: Tokenizer, model: Any) -> Entities:
    """How the model reads labels and words.

    Raises:
        ExportError: the tokenizer does not have the token that stands for a label.
    """
    config = GlinerConfig.read(source)
    settings: dict[str, Any] = {
        "scores": "span" if config.is_span else "token",
        "max_words": int(config.get("max_len", 384)),
        "max_width": int(config.get("max_width", 12)),
        "subtoken": config.get("subtoken_pooling", "first"),
        "num_columns": model.head.num_columns,
    }
    if config.labels_encoder is not None:
        return Entities(**settings)
    entity, separator = config.get("ent_token", _ENTITY), config.get("sep_token", _SEPARATOR)
    label_token = tokenizer.token_to_id(entity)
    given = config.get("class_token_index", -1)
    if label_token is None or given not in (-1, label_token):
        raise ExportError(
            f"{source.name} has the class_token_index {given} in {GLINER_CONFIG}, but its "
            f"tokenizer has the id {label_token} for {entity}; they do not belong together"
        )
    ids = tokenizer.encode([separator], is_pretokenized=True, add_special_tokens=False).ids
    return Entities(
        label_token=label_token,
        separator=tuple(ids),
        markers=(entity, separator),
        reads_label=not config.get("embed_ent_token", True),
        **settings,
    )
