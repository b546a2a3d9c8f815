"""Rerankers that are causal language models: how much likelier "yes" is than "no" after a prompt.

sentence-transformers has the tokens in its LogitScore module, and the prompt in a chat template
for messages of the roles query and document. vLLM reads the tokens from ``classifier_from_token``
in config.json. Qwen's own checkpoints say neither, only their model card does (arXiv:2506.05176).
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.utils.chat_template_utils import render_jinja_template

from maskdial.bundle.manifest import PairTemplate
from maskdial_export.checkpoint.files import chat_template
from maskdial_export.checkpoint.sentence import (
    default_prompt,
    module_folders,
    transformer_settings,
)
from maskdial_export.checkpoint.source import Source
from maskdial_export.errors import ExportError, first_line
from maskdial_export.tracing.graph import trunk

QWEN = PairTemplate(
    before="<|im_start|>system\nJudge whether the Document meets the requirements based on the "
    'Query and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: ",
    between="\n<Document>: ",
    after="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
_QWEN_TOKENS = ("no", "yes")
_TOLERANCE = 1e-3  # of the largest logit
_PROBES = (("\ue000", "\ue001"), (" \ue002 b\n", "c \ue003 "))
_INSTRUCTION = "\ue004"


def read_template(source: Source) -> PairTemplate:
    """The prompt that a reranker reads, from the chat template, or Qwen's.

    Raises:
        ExportError: there is none that takes a query and a document as they are.
    """
    template = chat_template(source)
    found = None if template is None else _split(source, template)
    if found is not None:
        return found
    if source.read_json("config.json").get("model_type") == "qwen3":
        return QWEN
    raise ExportError(
        f"{source.name} has no chat template that writes messages of the roles query and document "
        "as they are, in this order; add one as chat_template.jinja"
    )


def _split(source: Source, template: str) -> PairTemplate | None:
    """The parts of a template around its texts; None if it does not just insert them."""
    for structured in (False, True):
        prompt = default_prompt(source)
        parts = [_parts(source, template, prompt, probe, structured) for probe in _PROBES]
        if parts[0] is not None and parts[0] == parts[1]:
            other = _parts(source, template, _INSTRUCTION, _PROBES[0], structured)
            return _with_instruction(parts[0], other)
    return None


def _with_instruction(parts: PairTemplate, other: PairTemplate | None) -> PairTemplate:
    """The template with its instruction: what stands where another one stood in ``other``."""
    if other is None or (other.between, other.after) != (parts.between, parts.after):
        return parts
    start, _, end = other.before.partition(_INSTRUCTION)
    rest = parts.before.removeprefix(start)
    instruction = rest[: len(rest) - len(end)]
    fits = start + instruction + end == parts.before
    if not fits or not instruction or parts.before.count(instruction) != 1:
        return parts
    return parts.model_copy(update={"instruction": instruction})


def _parts(
    source: Source, template: str, prompt: str | None, probe: tuple[str, str], structured: bool
) -> PairTemplate | None:
    texts = dict(zip(("query", "document"), probe, strict=True))
    if prompt:
        texts = {"system": prompt} | texts
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": text}] if structured else text}
        for role, text in texts.items()
    ]
    try:
        rendered = render_jinja_template(
            [messages], chat_template=template, **_special_tokens(source), **_arguments(source)
        )[0][0]
    except Exception:  # templates raise any type at roles or contents that they do not know
        return None
    before, _, rest = rendered.partition(probe[0])
    between, document, after = rest.partition(probe[1])
    return PairTemplate(before=before, between=between, after=after) if document else None


def _arguments(source: Source) -> dict[str, Any]:
    """What sentence-transformers hands the template."""
    processing = transformer_settings(source).get("processing_kwargs") or {}
    given = processing.get("chat_template") or {}
    return {key: each for key, each in given.items() if key != "restore_suffix"}


def _special_tokens(source: Source) -> dict[str, str]:
    """The texts of the special tokens that templates name."""
    settings = source.read_json("tokenizer_config.json")
    names = ("bos_token", "eos_token")
    given = [settings.get(name) or "" for name in names]
    texts = (each["content"] if isinstance(each, dict) else each for each in given)
    return dict(zip(names, texts, strict=True))


def _answers(source: Source, tokenizer: Tokenizer) -> tuple[int, int | None]:
    """The ids of the tokens for a match and, where it counts, for none."""
    for kind, folder in module_folders(source):
        if kind == "LogitScore":
            settings = _read(folder / "config.json")
            return settings["true_token_id"], settings.get("false_token_id")
    config = source.read_json("config.json")
    given = config.get("classifier_from_token")
    if given is None and config.get("model_type") == "qwen3":
        given = _QWEN_TOKENS
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise ExportError(
            f"{source.name} does not say which tokens stand for a match and for none; add "
            '"classifier_from_token": ["no", "yes"] to config.json, with its own tokens'
        )
    wrong, right = (tokenizer.token_to_id(str(token)) for token in given)
    if wrong is None or right is None:
        raise ExportError(
            f"the tokenizer of {source.name} has no tokens {given[0]!r} and {given[1]!r}"
        )
    return right, wrong


def _read(path: Path) -> dict[str, Any]:
    settings = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(settings.get("true_token_id"), int):
        raise ExportError(f"{path} has no true_token_id")
    return dict(settings)


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
    match, other = _answers(source, tokenizer)
    ids = tokenizer.encode(f"a{template.after}", add_special_tokens=False).ids
    config: Any = model.config
    config.num_labels = 1
    config.pad_token_id = pad if config.pad_token_id is None else config.pad_token_id
    if config.pad_token_id is not None and ids[-1] == config.pad_token_id:
        raise ExportError(f"the prompt of {source.name} ends with the padding token")
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
