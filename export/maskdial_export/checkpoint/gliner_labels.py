"""The encoder of labels in a GLiNER checkpoint that has one: a model of its own, for `embed`.

A label's vector is the mean over its tokens and goes through the head, which makes a query and a
bias of it (`maskdial_export.checkpoint.entity_heads`).
"""

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from maskdial.bundle.manifest import Embedding
from maskdial_export.checkpoint.entity_heads import LabelHead
from maskdial_export.checkpoint.gliner import (
    GlinerConfig,
    load_body,
    stored_linear,
    stored_weights,
)
from maskdial_export.checkpoint.hub import download
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.pooling import Pooler, TokenPooling
from maskdial_export.checkpoint.source import GLINER_CONFIG, Source
from maskdial_export.errors import ExportError

_BODY = "token_rep_layer.labels_encoder.model."
_PROJECTION = "token_rep_layer.labels_projection"
_TOKENIZER = "labels_tokenizer"


def label_source(source: Source) -> Source | None:
    """The encoder of labels as a checkpoint of its own; None if the model has none.

    Its tokenizer is in the folder ``labels_tokenizer``, or where gliner takes it from otherwise.

    Raises:
        ExportError: the tokenizer cannot be found, or the model is not supported.
    """
    if source.task != "entities":
        return None
    name = GlinerConfig.read(source).labels_encoder
    if name is None:
        return None
    path = source.path / _TOKENIZER
    if not path.is_dir():
        path = Path(name)
    if not path.is_dir():
        path = download(name, None, allow_pickle=False)
    return Source(source.name, path, source.architecture, "embed", finder=source.path)


def load_label_encoder(source: Source, **_: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The encoder of labels, and what `from_pretrained` would say of its weights."""
    return load_body(_config(source).encoder("labels_encoder"), stored_weights(source), _BODY)


def label_pooler(source: Source) -> Pooler:
    """From what the encoder returns for a label's tokens to its query and bias.

    Raises:
        ExportError: the checkpoint lacks a weight of the head.
    """
    stored = stored_weights(source)
    try:
        head = LabelHead(stored)
    except KeyError as error:
        raise ExportError(f"{source.name} lacks the weight {error.args[0]}") from error
    # Before or after a mean, a product with a bias is the same
    steps: list[nn.Module] = [stored_linear(stored, _PROJECTION) or nn.Identity(), head]
    embedding = Embedding(dimension=head.num_columns, pooling="mean", normalized=False)
    return Pooler(TokenPooling(["mean"]), steps, embedding)


def _config(source: Source) -> GlinerConfig:
    assert source.finder is not None, "`label_source` has set it"
    return GlinerConfig(source.name, read_json(source.finder / GLINER_CONFIG))
