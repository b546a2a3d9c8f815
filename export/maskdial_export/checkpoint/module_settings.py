"""Settings that sentence-transformers saves: each is applied where it belongs, or refused here.

sentence-transformers refuses a setting of a module that it does not know; so does this. Of
config_sentence_transformers.json and config.json it reads certain names only.
"""

from collections.abc import Mapping
from typing import Any

from maskdial_export.checkpoint.files import Files
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.sentence import (
    LOCATING,
    SENTENCE_CONFIG,
    default_prompt,
    module_folders,
    transformer_settings,
)
from maskdial_export.errors import ExportError

_OLDER = "sbert_ce_default_activation_function"  # in config.json, before version 4
_WIDTHS = ("embedding_dimension", "word_embedding_dimension")
_OF_TRANSFORMER = (
    *("max_seq_length", "do_lower_case", "transformer_task", "modality_config"),
    *("module_output_name", "processing_kwargs", "unpad_inputs", "tokenizer_name_or_path"),
    *("query_length", "document_length", "query_expansion"),
    *("model_args", "model_kwargs", "config_args", "config_kwargs"),
    *("tokenizer_args", "processor_kwargs"),
)
_KNOWN: Mapping[str, tuple[str, ...]] = {
    "Pooling": (*_WIDTHS, "pooling_mode", "include_prompt"),
    "SpladePooling": (*_WIDTHS, "pooling_strategy", "activation_function"),
    "Dense": (
        *("in_features", "out_features", "bias", "activation_function"),
        *("module_input_name", "module_output_name", "use_residual"),
    ),
    "Normalize": ("module_input_name", "module_output_name"),
    "LayerNorm": ("dimension",),
    "Dropout": ("dropout",),
    "LogitScore": ("true_token_id", "false_token_id", "module_input_name"),
    "HierarchicalTokenPooling": (
        *("pool_factor", "num_protected_tokens", "normalize_embeddings", "tasks"),
    ),
    "MultiVectorMask": ("skiplist_words", "skiplist_tasks", "keep_only_token_ids"),
}
# What transformers returns of a text, and what the module calls it
_RETURNS = ("last_hidden_state", "logits")
_CALLED = ("token_embeddings", "scores", "causal_logits")
_TASKS = (
    *("feature-extraction", "fill-mask", "sequence-classification", "text-generation"),
    "any-to-any",
)
# Arguments that say where a model is, and in which precision and by which kernels it runs
_LOADING = LOCATING | {
    *("torch_dtype", "dtype", "attn_implementation", "device_map", "low_cpu_mem_usage"),
    *("use_safetensors", "add_pooling_layer", "use_cache"),
}
_MODEL = ("model_args", "model_kwargs", "config_args", "config_kwargs")
_TRUNCATIONS = (True, "longest_first")


def check_modules(source: Files) -> None:
    """Refuses settings of sentence-transformers that no part of the export applies.

    Raises:
        ExportError: there is one; the message names it.
    """
    for kind, folder in module_folders(source):
        if kind == "Pooling" and source.task == "embed-all":
            break  # of an ordinary encoder, whose tokens' vectors are taken before it
        settings = read_json(folder / "config.json")
        known = _KNOWN.get(kind, tuple(settings))  # others are refused by their kind
        for name in settings:
            if name not in known and not (kind == "Pooling" and name.startswith("pooling_mode_")):
                _refuse(source, f"{name!r} of its {kind} module")
        for name, expected in _names(source, kind).items():
            if settings.get(name, expected) != expected:
                _refuse(source, f"{name} {settings[name]!r} of its {kind} module")
    _check_transformer(source, transformer_settings(source))
    dimension = source.read_json(SENTENCE_CONFIG).get("truncate_dim")
    if source.task == "embed-hybrid" and dimension is not None:
        _refuse(source, f"truncate_dim {dimension}, of vectors that are read together with others")
    if source.task == "classify" and is_cross_encoder(source):
        _check_cross_encoder(source)


def is_cross_encoder(source: Files) -> bool:
    """Whether sentence-transformers saved a classifier to score pairs of texts."""
    config = source.read_json("config.json")
    kind = source.read_json(SENTENCE_CONFIG).get("model_type")
    return kind == "CrossEncoder" or "sentence_transformers" in config or _OLDER in config


def _refuse(source: Files, setting: str) -> None:
    raise ExportError(
        f"{source.name} has a setting of sentence-transformers that is not supported: {setting}"
    )


def _names(source: Files, kind: str) -> dict[str, str]:
    """What a module reads and writes, where it must be the usual."""
    if kind == "LogitScore":
        return {"module_input_name": "causal_logits"}
    if kind != "Normalize":
        return {}
    read = "token_embeddings" if source.task == "embed-all" else "sentence_embedding"
    return {"module_input_name": read, "module_output_name": read}


def _check_transformer(source: Files, settings: Mapping[str, Any]) -> None:
    for name, value in settings.items():
        if name not in _OF_TRANSFORMER:
            _refuse(source, f"{name!r} of its Transformer module")
        if name in _MODEL:
            for key in (value or {}).keys() - _LOADING:
                _refuse(source, f"{key!r} in {name}")
    if settings.get("transformer_task", _TASKS[0]) not in _TASKS:
        _refuse(source, f"transformer_task {settings['transformer_task']!r}")
    if settings.get("tokenizer_name_or_path") is not None:
        _refuse(source, f"tokenizer_name_or_path {settings['tokenizer_name_or_path']!r}")
    if source.task != "embed-all":
        for name in ("query_length", "document_length", "query_expansion"):
            if settings.get(name) is not None:
                _refuse(source, f"{name} {settings[name]!r}")
    if source.task != "rerank" and "modality_config" in settings:
        text = settings["modality_config"].get("text") or {}
        called = settings.get("module_output_name", _CALLED[0])
        if (
            text.get("method") != "forward"
            or text.get("method_output_name") not in _RETURNS
            or called not in _CALLED
        ):
            _refuse(source, f"modality_config {text!r} of texts as {called!r}")
    for part, given in (settings.get("processing_kwargs") or {}).items():
        if part == "chat_template" and source.task == "rerank":
            continue  # arguments of the template
        for name, value in (
            (given or {}).items() if part in ("common", "text", "chat_template") else ()
        ):
            usual = name in ("padding", "max_length", "return_tensors")
            if part == "chat_template" or not (
                usual or (name == "truncation" and value in _TRUNCATIONS)
            ):
                _refuse(source, f"{name} {value!r} in processing_kwargs")


def _check_cross_encoder(source: Files) -> None:
    prompt = default_prompt(source)
    if prompt:
        _refuse(
            source, f"default_prompt_name, which puts {prompt!r} before the first text of a pair"
        )
    config = source.read_json("config.json")
    saved = config.get("sentence_transformers")
    places = (
        source.read_json(SENTENCE_CONFIG).get("activation_fn"),
        saved.get("activation_fn") if isinstance(saved, dict) else None,
        config.get(_OLDER),
    )
    given = next((each for each in places if each is not None), "Sigmoid")
    if str(given).rpartition(".")[2] not in ("Sigmoid", "Identity", "Softmax"):
        _refuse(
            source,
            f"activation_fn {given}; scores are the sigmoid of the logits or, with raw_scores, the "
            "logits: leave it out if these will do",
        )
