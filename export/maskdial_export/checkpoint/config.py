"""Entries of config.json that would fail only at the end of an export, or in the server."""

from collections.abc import Mapping
from typing import Any, get_args

from maskdial.bundle.manifest import ProblemType
from maskdial_export.errors import ExportError

_PROBLEM_TYPES = get_args(ProblemType)


def check_config(name: str, config: Mapping[str, Any]) -> None:
    """Checks the architectures, the labels, the problem type and the mask of a checkpoint.

    Raises:
        ExportError: one of them is malformed, the mask is that of a prefix-LM or chosen by an
            indexer, the model pools neighboring tokens.
    """
    if config.get("model_type") == "funnel":
        raise ExportError(
            f"{name} is a Funnel model, which pools neighboring tokens, padding among them, so a "
            "text's results would depend on the longest one of its batch; use an encoder without "
            "pooling, such as ELECTRA"
        )
    text_config = config.get("text_config")
    for each in (config, text_config if isinstance(text_config, dict) else {}):
        if each.get("index_topk") is not None and _indexes(each):
            raise ExportError(
                f"{name} has an indexer that chooses {each['index_topk']} tokens for each one to "
                "attend to (index_topk in config.json, as in DeepSeek V3.2), which is not supported"
            )
    architectures = config.get("architectures")
    if architectures is not None and not _is_texts(architectures):
        raise ExportError(
            f"architectures in config.json of {name} is {architectures!r}; it must be a list of "
            "class names"
        )
    problem_type = config.get("problem_type")
    if problem_type is not None and problem_type not in _PROBLEM_TYPES:
        raise ExportError(
            f"problem_type in config.json of {name} is {problem_type!r}; it must be one of "
            f"{', '.join(_PROBLEM_TYPES)}"
        )
    labels = config.get("id2label")
    if labels is not None:
        _check_labels(name, labels)
    attention = config.get("attn_config")
    if isinstance(attention, dict) and attention.get("prefix_lm"):
        raise ExportError(
            f"{name} is a prefix-LM (attn_config.prefix_lm in config.json): a prompt's tokens are "
            "to see each other both ways, but transformers reads it as a causal model, so there is "
            "nothing to compare an export with"
        )


def prefix_note(config: Mapping[str, Any]) -> str | None:
    """What is to be said of a model that was trained to read prompts both ways; None of others.

    Of token ids alone transformers makes the causal mask, so the export is equal to ``generate``.
    """
    text_config = config.get("text_config")
    kind = config.get("model_type")
    inner = text_config.get("prefix_lm") if isinstance(text_config, dict) else False
    if kind == "paligemma" or inner or config.get("prefix_lm", kind == "hrm_text"):
        return (
            "the model was trained to read prompts both ways (prefix-LM); it is exported causally, "
            "as transformers reads token ids without token types"
        )
    return None


def _indexes(config: Mapping[str, Any]) -> bool:
    """Whether a model with an indexer uses it; only dots 3 may have one that it does not use."""
    if not str(config.get("model_type")).startswith("dots3_note") or config.get("use_dsa"):
        return True
    kinds = config.get("layer_types") or ()
    return config.get("use_dsa") is None and (
        "per_layer_config" not in config or "indexed_attention" in kinds
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _check_labels(name: str, labels: Any) -> None:
    if not isinstance(labels, dict):
        raise ExportError(f"id2label in config.json of {name} is not an object of ids and labels")
    expected = {str(index) for index in range(len(labels))}
    wrong = sorted(set(labels) - expected)
    if wrong:
        raise ExportError(
            f"id2label in config.json of {name} has the id {wrong[0]}, but its {len(labels)} "
            f"labels need the ids 0 to {len(labels) - 1}"
        )
    for index, label in labels.items():
        if not isinstance(label, str | int):
            raise ExportError(
                f"id2label in config.json of {name} gives {index} the label {label!r}; it must "
                "be a text"
            )
