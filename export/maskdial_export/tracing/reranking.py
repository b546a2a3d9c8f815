"""Rerankers that are causal language models: how much likelier "yes" is than "no" after a prompt.

What they read, and which tokens answer, is `maskdial_export.checkpoint.reranking`'s to say.
"""

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto as auto

from maskdial.bundle.manifest import PairTemplate
from maskdial_export.checkpoint.reranking import answers, last_tokens
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError, first_line
from maskdial_export.tracing.graph import trunk

_TOLERANCE = 1e-3  # of the largest logit


def make_scorer(
    source: Source,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    pad: int | None,
    template: PairTemplate,
) -> PreTrainedModel:
    """The same model with one logit for a text: that of a match, minus that of none.

    Args:
        source: the checkpoint.
        model: a causal language model.
        tokenizer: the checkpoint's.
        pad: its padding token, by which the last token of a text is found.
        template: what the model reads.

    Raises:
        ExportError: transformers has no classifier of this type, or the logits are more than a
            product of hidden states and weights.
    """
    name = auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model.config.model_type)
    if name is None:
        raise ExportError(f"transformers has no classifier for {model.config.model_type} models")
    match, other = answers(source, tokenizer)
    config: Any = model.config
    config.num_labels = 1
    config.pad_token_id = pad if config.pad_token_id is None else config.pad_token_id
    ids = last_tokens(source, template, tokenizer, config.pad_token_id)
    with torch.device("meta"):
        scorer: Any = getattr(transformers, name)(config)
    rows = model.get_output_embeddings().weight.data
    weight = rows[match] if other is None else rows[match] - rows[other]
    setattr(scorer, scorer.base_model_prefix, trunk(model))
    scorer.score = nn.Linear(len(weight), 1, bias=False)
    scorer.score.weight.data = weight[None].clone()
    scorer.eval()
    _compare(source, model, scorer, torch.tensor([ids]), (match, other))
    assert isinstance(scorer, PreTrainedModel)
    return scorer


def _compare(
    source: Source, model: Any, scorer: Any, ids: torch.Tensor, tokens: tuple[int, int | None]
) -> None:
    match, other = tokens
    try:
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
            score = float(scorer(ids).logits[0, 0])
    except Exception as error:  # a tensor is left on the meta device
        raise ExportError(
            f"{source.name} cannot become a classifier: {first_line(error)}"
        ) from error
    expected = float(logits[match] if other is None else logits[match] - logits[other])
    if not abs(score - expected) <= _TOLERANCE * float(logits.abs().max()):
        raise ExportError(
            f"the logits of {source.architecture} are not the product of hidden states and "
            f"weights (their difference is {expected:.4g}, not {score:.4g}), so two of them make "
            "no classifier"
        )
