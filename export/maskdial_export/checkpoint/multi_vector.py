"""Models with a vector for each token (ColBERT, arXiv:2004.12832): how they read texts.

Three formats: sentence-transformers' MultiVectorEncoder, PyLate's, whose settings stand in
``config_sentence_transformers.json``, and Stanford's HF_ColBERT with its ``artifact.metadata``.
Defaults are those of sentence-transformers 6, which reads all three.
"""

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn

from maskdial.bundle.manifest import Embedding, MultiVector, SpecialTokens, TokenPooling
from maskdial_export.checkpoint.embedding import read_dense
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.pooling import Dense, Normalize, Pooler
from maskdial_export.checkpoint.sentence import (
    SENTENCE_CONFIG,
    module_folders,
    transformer_settings,
)
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError, first_line

_STANFORD = "HF_ColBERT"
_POOLING = "HierarchicalTokenPooling"
_QUERY_LENGTH = 32
_DOCUMENTS = ("document", "passage", "corpus")


class EveryToken(nn.Module):
    """No pooling: the hidden states as they are."""

    def forward(self, hidden: Tensor, _: Tensor) -> Tensor:
        return hidden.float()


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the files say. ``markers`` are prompts that are tokens of their own."""

    prompts: Mapping[str, str]
    expansion: Mapping[str, Any] | None
    query_length: int | None
    document_length: int | None
    skipped_words: list[str]
    skips_in_queries: bool = False
    markers: bool = False


def read_multi_vector(
    source: Source, columns: int, tokenizer: Tokenizer, tokens: SpecialTokens
) -> Pooler:
    """What follows the hidden states of each token, and how queries and documents are read.

    A token that a prompt begins with is made one of ``tokenizer``.

    Args:
        source: the checkpoint.
        columns: of a hidden state.
        tokenizer: the checkpoint's.
        tokens: its special tokens.

    Raises:
        ExportError: the checkpoint needs a module or a setting that is not supported.
    """
    steps, width = _steps(source, columns)
    settings = _stanford(source) if _is_stanford(source) else _saved(source)
    prompts = {"query": settings.prompts.get("query") or ""}
    given = (settings.prompts[name] for name in _DOCUMENTS if name in settings.prompts)
    prompts["document"] = next(given, "") or ""
    if settings.markers:
        _register(tokenizer, prompts)
    expansion = settings.expansion or {}
    token = expansion.get("token")
    token_id = tokens.mask if token is None else tokenizer.token_to_id(token)
    if token_id is None:
        token_id = next(iter(tokens.eos), None)
    if expansion and token_id is None:
        raise ExportError(f"{source.name} extends queries, but its tokenizer has no mask token")
    skipped = (tokenizer.token_to_id(word) for word in settings.skipped_words)
    multi_vector = MultiVector(
        query_length=expansion["length"] if _is_fixed(expansion) else settings.query_length,
        document_length=settings.document_length,
        expansion_length=expansion.get("length"),
        expansion_token=token_id if expansion else None,
        attends_to_expansion=bool(expansion.get("attend")),
        skipped=tuple(sorted({each for each in skipped if each is not None})),
        skips_in_queries=settings.skips_in_queries,
        pooling=_token_pooling(source),
    )
    embedding = Embedding(
        dimension=width,
        pooling="none",
        normalized=bool(steps) and isinstance(steps[-1], Normalize),
        prompts=prompts,
        default_prompt="document",
        multi_vector=multi_vector,
    )
    return Pooler(EveryToken(), steps, embedding).eval()


def check_expansion(source: Source, pooler: Pooler, *, causal: bool) -> None:
    """Refuses queries that are extended by tokens which a model cannot leave out of its attention.

    Raises:
        ExportError: they are, in a model that reads to the left only.
    """
    settings = pooler.embedding.multi_vector
    assert settings is not None, "of every model with a vector for each token"
    if causal and settings.hides_expansion:
        raise ExportError(
            f"{source.name} extends queries by tokens that are not attended to, which is not "
            "supported for causal models"
        )


def _is_fixed(expansion: Mapping[str, Any]) -> bool:
    return expansion.get("strategy") == "fixed"


def _is_stanford(source: Source) -> bool:
    return _STANFORD in (source.read_json("config.json").get("architectures") or ())


def _is_pylate(source: Source) -> bool:
    return source.read_json(SENTENCE_CONFIG).get("model_type") == "ColBERT"


def _steps(source: Source, columns: int) -> tuple[list[nn.Module], int]:
    """The modules after the model, and the width of the vectors."""
    if _is_stanford(source):
        linear = _stanford_linear(source, columns)
        return [Dense(linear, nn.Identity()), Normalize()], linear.out_features
    steps: list[nn.Module] = []
    width = columns
    pools = False
    for kind, folder in module_folders(source):
        if pools:
            raise ExportError(
                f"{source.name} has a {kind} module behind {_POOLING}, which must be the last one"
            )
        if kind == "Dense":
            settings = read_json(folder / "config.json")
            dense, width = read_dense(source, folder, settings, width, reads="token_embeddings")
            steps.append(dense)
        elif kind == "Normalize":
            steps.append(Normalize())
        elif kind == "Pooling":  # of an ordinary encoder
            break
        elif kind == _POOLING:
            pools = True
        elif kind not in ("Transformer", "ColBERT", "MultiVectorMask", "Dropout"):
            raise ExportError(f"{source.name} has a {kind} module, which is not supported")
    if _is_pylate(source):  # does not list it
        steps.append(Normalize())
    return steps, width


def _token_pooling(source: Source) -> TokenPooling | None:
    """What sentence-transformers' last module makes of the vectors of tokens."""
    for kind, folder in module_folders(source):
        if kind == _POOLING:
            given = read_json(folder / "config.json")
            tasks = given.get("tasks") or ["document"]
            return TokenPooling(
                factor=given.get("pool_factor", 1.0),
                protected=given.get("num_protected_tokens", 1),
                normalizes=given.get("normalize_embeddings", False),
                queries="query" in tasks,
                documents="document" in tasks,
            )
    return None


def _stanford_linear(source: Source, columns: int) -> nn.Linear:
    path = source.path / "model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            weight: Tensor = file.get_tensor("linear.weight")
    except Exception as error:  # a missing file, and the library's own class
        raise ExportError(f"{path} has no projection: {first_line(error)}") from error
    if weight.ndim != 2 or weight.shape[1] != columns:
        raise ExportError(
            f"linear.weight of {source.name} has the shape {tuple(weight.shape)}; it must have "
            f"{columns} columns"
        )
    with torch.device("meta"):
        linear = nn.Linear(columns, weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.float(), requires_grad=False)
    return linear


def _stanford(source: Source) -> _Settings:
    metadata = read_json(source.path / "artifact.metadata")
    return _Settings(
        prompts={
            "query": (metadata.get("query_token_id") or "[unused0]") + " ",
            "document": (metadata.get("doc_token_id") or "[unused1]") + " ",
        },
        expansion={
            "strategy": "fixed",
            "length": metadata.get("query_maxlen") or _QUERY_LENGTH,
            "attend": metadata.get("attend_to_mask_tokens"),
        },
        query_length=None,
        document_length=metadata.get("doc_maxlen"),
        skipped_words=list(string.punctuation) if metadata.get("mask_punctuation", True) else [],
        markers=True,
    )


def _saved(source: Source) -> _Settings:
    """The settings of sentence-transformers, or of PyLate, which has more of them in one file."""
    config = source.read_json(SENTENCE_CONFIG)
    prompts = dict(config.get("prompts") or {})
    if _is_pylate(source):
        for role in ("query", "document"):
            prefix = config.get(f"{role}_prefix") or ""
            prompts[role] = prefix + (prompts.get(role) or "").removeprefix(prefix)
        words = config.get("skiplist_words")
        return _Settings(
            prompts=prompts,
            expansion=_pylate_expansion(config),
            query_length=config.get("query_length"),
            document_length=config.get("document_length"),
            skipped_words=list(string.punctuation) if words is None else words,
            markers=True,
        )
    settings = transformer_settings(source)
    masks = [
        read_json(path / "config.json")
        for kind, path in module_folders(source)
        if kind == "MultiVectorMask"
    ]
    mask = masks[0] if masks else {}
    if mask.get("keep_only_token_ids"):
        raise ExportError(f"{source.name} keeps the vectors of images only, which is not supported")
    skipping = mask.get("skiplist_tasks") or ["document"]
    if mask.get("skiplist_words") and "document" not in skipping:
        raise ExportError(f"{source.name} skips words in queries only, which is not supported")
    return _Settings(
        prompts=prompts,
        expansion=settings.get("query_expansion"),
        query_length=settings.get("query_length"),
        document_length=settings.get("document_length"),
        skipped_words=mask.get("skiplist_words") or [],
        skips_in_queries="query" in skipping,
    )


def _pylate_expansion(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    if "query_expansion" in config:
        given: Mapping[str, Any] | None = config["query_expansion"]
        return given
    if config.get("do_query_expansion") is False:
        return None
    return {
        "strategy": "fixed",
        "length": config.get("query_length") or _QUERY_LENGTH,
        "attend": config.get("attend_to_expansion_tokens"),
    }


def _register(tokenizer: Tokenizer, prompts: Mapping[str, str]) -> None:
    """Makes the tokenizer read the markers as the tokens that training put there."""
    for prompt in prompts.values():
        candidates = [prompt, *prompt.split()[:1]]
        known = next((each for each in candidates if tokenizer.token_to_id(each) is not None), None)
        if known and tokenizer.encode(known, add_special_tokens=False).tokens != [known]:
            tokenizer.add_special_tokens([AddedToken(known, normalized=False, special=True)])
