"""Static embeddings: a table of vectors, whose mean over a text's tokens is its vector.

In the layouts of sentence-transformers' StaticEmbedding module and of model2vec. The latter may
share vectors among tokens (``mapping``), weigh them (``weights``), and leaves unknown tokens out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, processors
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from maskdial.bundle.manifest import TOKENIZER
from maskdial_export.checkpoint.embedding import read_pooler
from maskdial_export.checkpoint.pooling import Normalize, Pooler
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError, first_line

_DEFAULT_LENGTH = 512  # model2vec's
_LONGEST = 131_072  # in sentence-transformers there is no limit


@dataclass(frozen=True, slots=True)
class StaticTable:
    """A table of vectors as a model, with its tokenizer, its pooling and its longest text."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    pooler: Pooler
    longest: int


class StaticConfig(PreTrainedConfig):  # type: ignore[misc]
    """The size of a table."""

    model_type = "static-embedding"

    vocab_size: int = 1
    hidden_size: int = 1


class StaticEmbedding(PreTrainedModel):  # type: ignore[misc]
    """A model without layers: of each token its vector.

    With an ``unknown`` token, a further column says of each whether it is another one. It is none
    of the table's, whose rows have one scale each in int8: small vectors would be lost beside it.
    """

    config: StaticConfig
    config_class = StaticConfig
    base_model_prefix = "model"

    def __init__(self, table: Tensor, unknown: int | None) -> None:
        columns = table.shape[1] + (unknown is not None)
        super().__init__(StaticConfig(vocab_size=len(table), hidden_size=columns))
        self.post_init()
        self._unknown = unknown
        self.table = nn.Embedding(
            len(table), table.shape[1], _weight=table
        )  # the above fills at random

    def get_input_embeddings(self) -> nn.Module:
        """The table."""
        module: nn.Module = self.table
        return module

    def forward(self, input_ids: Tensor, **_: Any) -> BaseModelOutput:
        """The vectors (batch, length, columns)."""
        vectors = self.table(input_ids)
        if self._unknown is not None:
            known = (input_ids != self._unknown)[..., None].to(vectors.dtype)
            vectors = torch.cat([vectors, known], dim=-1)
        return BaseModelOutput(last_hidden_state=vectors)


class _WithoutUnknown(nn.Module):
    """Makes of the mean over all tokens that over the known ones, whose share is the last column.

    A text of unknown tokens only has the vector zero.
    """

    def forward(self, vectors: Tensor) -> Tensor:
        share = vectors[:, -1:]
        return vectors[:, :-1] / torch.where(share > 0, share, 1.0)


def load_static(source: Source, folder: Path) -> StaticTable:
    """Reads the table of a checkpoint.

    Raises:
        ExportError: a file is missing or damaged, or does not fit the others.
    """
    path = folder / "model.safetensors"
    try:
        stored = load_file(path)
        tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
    except Exception as error:  # neither library has an error class of its own
        raise ExportError(f"{source.name} cannot be read: {first_line(error)}") from error
    is_model2vec = "embeddings" in stored
    table = stored.get("embeddings", stored.get("embedding.weight"))
    if table is None or table.ndim != 2:
        raise ExportError(f"{path} has no table of vectors (embedding.weight or embeddings)")
    if "mapping" in stored:
        mapping = stored["mapping"].long()
        if mapping.numel() and not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
            raise ExportError(f"{path} maps tokens to vectors that it does not have")
        table = table[mapping]
    if max(tokenizer.get_vocab().values()) >= len(table):
        raise ExportError(
            f"{source.name} has {len(table)} vectors, fewer than its tokenizer tokens"
        )
    table = table.float()
    if "weights" in stored:
        if stored["weights"].shape != table.shape[:1]:
            raise ExportError(f"{path} has {len(table)} vectors and other numbers of weights")
        table = table * stored["weights"].float()[:, None]
    if not bool(torch.isfinite(table).all()):
        raise ExportError(f"{path} has vectors that are not finite; the weights are damaged")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    pooler = read_pooler(source, table.shape[1])
    steps = list(pooler.steps)
    settings = source.read_json("config.json") if is_model2vec else {}
    embedding = pooler.embedding
    if settings.get("normalize") and not any(isinstance(step, Normalize) for step in steps):
        steps.append(Normalize())
        embedding = embedding.model_copy(update={"normalized": True})
    unknown = _unknown_id(tokenizer) if is_model2vec else None
    if unknown is not None:
        table[unknown] = 0
        steps = [_WithoutUnknown(), *steps]
    given = settings.get("max_length", _DEFAULT_LENGTH) if is_model2vec else None
    return StaticTable(
        StaticEmbedding(table, unknown).eval(),
        tokenizer,
        Pooler(pooler.pool, steps, embedding).eval(),
        given or _LONGEST,
    )


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    name = getattr(tokenizer.model, "unk_token", None)
    return None if name is None else tokenizer.token_to_id(name)
