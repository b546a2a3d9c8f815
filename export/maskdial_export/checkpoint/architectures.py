"""Architectures: which transformers class loads a checkpoint, and which task its head is for.

transformers' own auto classes say what they can load, so nothing here lists model types, but for
replaced-token detection and EmbeddingGemma 2, which have no auto class of their own, and Mistral 4,
which has a wrong one.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from maskdial.bundle.manifest import TaskName
from maskdial_export.errors import ExportError

_Names = Mapping[str, Any]

_DETECTORS: _Names = {"electra": "ElectraForPreTraining"}
_DECIDER = "jev"  # the only type with a head of its own; of other types, it lies beside the weights
# Models that read images or sound beside texts; of those with a text part, that is exported
_WRAPPERS: _Names = {
    **auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    **auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}
_TWO_PARTS: _Names = {
    model_type: name
    for model_type, name in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items()
    if model_type not in _WRAPPERS
}
# Writes canvases of tokens; transformers lists it among those that write token by token
_DENOISERS: _Names = {"diffusion_gemma": "DiffusionGemmaForBlockDiffusion"}
# Reads texts only, but transformers lists it among those that read images
_TEXT_ALONE: _Names = {"mistral4": "Mistral4ForCausalLM"}
# Encoders without any other head, so that no auto class tells that they read texts
_ENCODERS: _Names = {
    name: auto.MODEL_MAPPING_NAMES[name] for name in ("embedding_gemma2", "embedding_gemma2_text")
}
# By preference, where a class or a task has several entries. A base model's hidden states are
# pooled; XLM's fill-mask class also stands among the causal ones.
_TASKS: tuple[tuple[TaskName, _Names], ...] = (
    ("fill-mask", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ("classify", auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    ("classify", auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES),
    ("token-classify", auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES),
    ("token-classify", _DETECTORS),
    ("question-answering", auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES),
    ("multiple-choice", auto.MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES),
    ("generate", auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ("generate", _TWO_PARTS),
    ("generate", _TEXT_ALONE),
    ("embed", auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES),
    ("embed", _ENCODERS),
    ("embed", auto.MODEL_MAPPING_NAMES),
)
# The heads of a class with both, such as BertForPreTraining: each has a class of its own, whose
# weights have the same names.
_BOTH_HEADS: tuple[tuple[TaskName, _Names], ...] = (
    ("fill-mask", auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ("classify", auto.MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING_NAMES),
)
_OTHER_INPUTS: tuple[_Names, ...] = (
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)


def settle(config: Mapping[str, Any], task: str) -> tuple[str, TaskName]:
    """The class to load and its task, from config.json and the requested task or ``auto``.

    Raises:
        ExportError: transformers does not know the model type, or it has no class for the task.
    """
    if task == "embed-sparse":
        return settle(config, "fill-mask")[0], "embed-sparse"
    if task == "embed-all":
        return settle(config, "embed")[0], "embed-all"
    if task == "embed-hybrid":
        return settle(config, "embed")[0], "embed-hybrid"
    if task == "rerank":
        return settle(config, "generate")[0], "rerank"
    model_type = config.get("model_type")
    if task == "decide" or (task == "auto" and model_type == _DECIDER):
        return auto.MODEL_FOR_DECISION_MAPPING_NAMES[_DECIDER], "decide"
    if model_type is None and "auto_map" not in config:
        raise ExportError(
            'config.json names no model type, as those of before 2020; add "model_type", such as '
            '"bert", and "architectures", such as ["BertForSequenceClassification"]'
        )
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        remote = " (code in a checkpoint is never run)" if "auto_map" in config else ""
        raise ExportError(
            f"transformers {transformers.__version__} has no model type {model_type!r}{remote}"
        )
    classes = dict(_classes(model_type))
    if "fill-mask" in classes.values() and not config.get("is_decoder"):
        classes = {name: known for name, known in classes.items() if known != "generate"}
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if named == auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES.get(model_type) and named not in classes:
        heads: dict[str, str] = {
            known: names[model_type] for known, names in _BOTH_HEADS if model_type in names
        }
        named = heads.get("fill-mask" if task == "auto" else task, named)
    if named in classes and task in ("auto", classes[named]):
        return named, classes[named]
    for name, known in classes.items():
        if task == known:
            return name, known
    if not classes:
        raise ExportError(_reason(model_type))
    tasks = list(dict.fromkeys(classes.values()))
    if task == "auto" and model_type in _TWO_PARTS:
        raise ExportError(
            f"{named!r} in config.json has an encoder and a decoder; of such models those that "
            f"generate or classify are supported, such as {_TWO_PARTS[model_type]}"
        )
    if task == "auto":
        options = " or ".join(f"--task {known}" for known in tasks)
        raise ExportError(
            f"cannot tell the task from the architecture {named!r} in config.json; if the "
            f"checkpoint has the head for it, pass {options}"
        )
    raise ExportError(
        f"{model_type} models do not support {task}; supported tasks: {', '.join(tasks)}"
    )


def has_two_parts(architecture: str) -> bool:
    """Whether a class has an encoder and a decoder."""
    return architecture in _TWO_PARTS.values()


def text_class(task: TaskName, model_type: str) -> str | None:
    """transformers' class for a task on the text part of a wrapper; None if there is none."""
    for known, names in _TASKS:
        if known == task and isinstance(names.get(model_type), str):
            return str(names[model_type])
    return None


def _classes(model_type: str) -> Iterator[tuple[str, TaskName]]:
    """The classes of a model type that read or write one text, and their tasks."""
    seen: set[str] = set()
    if model_type in _DENOISERS:
        yield _DENOISERS[model_type], "block-diffusion"
        return
    if _has_text_part(model_type):
        seen.add(_WRAPPERS[model_type])
        yield _WRAPPERS[model_type], "generate"
    elif _reads_more(model_type):
        return
    for task, names in _TASKS:
        if names is auto.MODEL_MAPPING_NAMES and not seen:
            return  # a model type without any head for texts reads something else
        given = names.get(model_type, ())
        for name in (given,) if isinstance(given, str) else given:
            if name not in seen and _reads_one_text(model_type, name, names):
                seen.add(name)
                yield name, task


def _reads_one_text(model_type: str, name: str, names: _Names) -> bool:
    if name == _TWO_PARTS.get(model_type):
        return names is _TWO_PARTS  # BART's also stands among those for fill-mask
    if name.endswith("ForConditionalGeneration"):
        return False
    if model_type in _TWO_PARTS:  # its encoder or decoder alone may, and both may classify
        alone = (
            auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
            auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        )
        return any(names.get(model_type) == name for names in alone)
    return True


def _has_text_part(model_type: str) -> bool:
    """Whether models of a type read images or sound beside texts, and have a model of texts."""
    known = model_type in _WRAPPERS and model_type not in _TEXT_ALONE
    return known and "text_config" in CONFIG_MAPPING[model_type].sub_configs


def _reads_more(model_type: str) -> bool:
    """Whether models of a type read images or sound beside texts."""
    return model_type not in _TEXT_ALONE and any(model_type in names for names in _OTHER_INPUTS)


def _reason(model_type: str) -> str:
    if _reads_more(model_type):
        return f"{model_type} models read more than text, which is not supported"
    return f"{model_type} models have no task on text"
