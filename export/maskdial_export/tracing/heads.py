"""Heads that transformers calls in a way of their own, hooked to take and give what the others do.

The hooks are on the torch model, so tracing, parity and calibration all see the same inputs and
logits.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial.bundle.manifest import TaskName

# config.json has none. The first two are those of BERT's authors.
NEXT_SENTENCE_LABELS = ("isNext", "notNext")
REPLACED_TOKEN_LABELS = ("ORIGINAL", "REPLACED")


def adapt_head(model: PreTrainedModel, task: TaskName) -> None:
    """Hooks a model whose head differs from what `maskdial.bundle.bundle` says of its task."""
    if model.config.model_type == "longformer" and task in _GLOBAL_TOKENS:
        model.register_forward_pre_hook(_GLOBAL_TOKENS[task], with_kwargs=True)
    if task == "multiple-choice":
        model.register_forward_pre_hook(_offer_one_choice, with_kwargs=True)
    if task == "token-classify" and detects_replaced_tokens(type(model).__name__):
        model.register_forward_hook(_score_both_labels)


def detects_replaced_tokens(architecture: str) -> bool:
    """Whether a token tagger is ELECTRA's discriminator, with a single logit for each token."""
    return architecture.endswith("ForPreTraining")


def labels_of(architecture: str, config: Any) -> tuple[str, ...]:
    """The names of a classifier's logits."""
    if architecture.endswith("ForNextSentencePrediction"):
        return NEXT_SENTENCE_LABELS
    if detects_replaced_tokens(architecture):
        return REPLACED_TOKEN_LABELS
    return tuple(str(config.id2label[index]) for index in range(config.num_labels))


def _offer_one_choice(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes every text the only choice of its question: the head scores each by itself."""
    tensors = {name: each for name, each in kwargs.items() if isinstance(each, Tensor)}
    return args, kwargs | {name: each[:, None] for name, each in tensors.items()}


def _make_question_global(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Marks the tokens before the first separator, as Longformer does in texts with three of them.

    Its own code cannot be traced, and refuses other texts; one without a separator has no question.
    """
    place, end = _places_and_first(kwargs["input_ids"], module.config.sep_token_id)
    return args, kwargs | {"global_attention_mask": (place < end).long()}


def _make_choice_global(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Marks the tokens after the question's separator and the next one, as Longformer does."""
    place, end = _places_and_first(kwargs["input_ids"], module.config.sep_token_id)
    return args, kwargs | {"global_attention_mask": (place > end + 1).long()}


def _places_and_first(input_ids: Tensor, token_id: int) -> tuple[Tensor, Tensor]:
    """The place of each token, and that of the first one with this id; 0 if there is none."""
    first = (input_ids == token_id).int().argmax(dim=1, keepdim=True)
    return torch.arange(input_ids.shape[1])[None, :], first


_GLOBAL_TOKENS: Mapping[TaskName, Callable[..., Any]] = {
    "question-answering": _make_question_global,
    "multiple-choice": _make_choice_global,
}


def _score_both_labels(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Adds a logit of 0 for original tokens: the softmax is then the sigmoid of the other one."""
    replaced: Tensor = output.logits  # (batch, length)
    output["logits"] = torch.stack([torch.zeros_like(replaced), replaced], dim=-1)
    return output
