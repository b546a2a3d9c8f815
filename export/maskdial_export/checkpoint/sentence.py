"""What sentence-transformers' files say of modules, pooling, prompts and the longest text.

Nothing here needs torch.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers

from maskdial_export.checkpoint.files import Files
from maskdial_export.errors import ExportError

MODULES = "modules.json"
"""The list of modules after the model (pooling and normalization)."""
SENTENCE_CONFIG = "config_sentence_transformers.json"
"""Prompts, the kind of model, the truncated dimension."""
POOLINGS = ("cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last")
"""Ways to pool, by name in the manifest, in the order in which older versions of
sentence-transformers concatenate them."""
_NAMES = {
    "cls_token": "cls",
    "lasttoken": "last",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "mean_tokens": "mean",
    "weightedmean": "weighted_mean",
    "weightedmean_tokens": "weighted_mean",
}
LOCATING = frozenset(
    {"trust_remote_code", "local_files_only", "revision", "token", "cache_dir", "code_revision"}
)
"""Arguments that say where a model or a tokenizer is, not what it computes."""


def kept_entries(source: Files, name: str) -> int | None:
    """How many entries of a vector sentence-transformers keeps; None for all."""
    given = source.read_json(SENTENCE_CONFIG).get(name)
    if given is not None and (type(given) is not int or given < 1):
        raise ExportError(
            f"{name} in {SENTENCE_CONFIG} of {source.name} is {given!r}, not a number above 0"
        )
    return given


def longest_text(source: Files, positions: int) -> int:
    """The longest text in tokens: sentence-transformers' limit, at most the positions."""
    settings = transformer_settings(source)
    processing = settings.get("processing_kwargs") or {}
    limits = (
        *((processing.get(part) or {}).get("max_length") for part in ("text", "common")),
        tokenizer_settings(source).get("model_max_length"),
        settings.get("max_seq_length"),
        source.read_json("tokenizer_config.json").get("model_max_length"),
    )
    given = next((limit for limit in limits if limit is not None), positions)
    if not isinstance(given, int | float) or given < 1:
        raise ExportError(
            f"{source.name} limits texts to {given!r} tokens; the limit must be at least 1"
        )
    return int(min(given, positions))


def lower_case(source: Files, tokenizer: Tokenizer) -> None:
    """Lets the tokenizer lower-case texts if sentence-transformers does so before it."""
    if transformer_settings(source).get("do_lower_case"):
        stages = [normalizers.Lowercase()]
        if tokenizer.normalizer is not None:
            stages.append(tokenizer.normalizer)
        tokenizer.normalizer = normalizers.Sequence(stages)


def transformer_settings(source: Files) -> dict[str, Any]:
    """sentence-transformers' tokenizer settings; older file names contain the model type."""
    if not (source.path / MODULES).is_file():
        return {}
    names = ["sentence_bert_config.json"]
    names += sorted(path.name for path in source.path.glob("sentence_*_config.json"))
    return next((settings for name in names if (settings := source.read_json(name))), {})


def tokenizer_settings(source: Files) -> dict[str, Any]:
    """The arguments by which sentence-transformers loads a tokenizer; older names stand for two."""
    settings = transformer_settings(source)
    given = settings.get("processor_kwargs") or settings.get("tokenizer_args") or {}
    return {key: value for key, value in given.items() if key not in LOCATING}


def read_prompts(source: Files) -> tuple[dict[str, str], str | None]:
    """The texts to put before a text, by name, and the one that is put before every text."""
    name = SENTENCE_CONFIG
    settings = source.read_json(name)
    prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    instructions = source.read_json("config.json").get("task_instructions")  # Jina's, by task
    if isinstance(instructions, dict) and isinstance(prompts, dict):
        prompts = instructions | prompts
    if not isinstance(prompts, dict) or not all(isinstance(each, str) for each in prompts.values()):
        raise ExportError(f"prompts in {name} of {source.name} must be texts by name")
    if default is not None and default not in prompts:
        raise ExportError(
            f"default_prompt_name in {name} of {source.name} is {default!r}, which is none of its "
            "prompts"
        )
    return {str(key): text for key, text in prompts.items()}, default


def default_prompt(source: Files) -> str | None:
    """The text that is put before every text, or is the system's message to a reranker."""
    prompts, name = read_prompts(source)
    return None if name is None else prompts[name]


def module_folders(source: Files) -> Iterator[tuple[str, Path]]:
    """The class name and the folder of each module, in order."""
    for kind, folder in module_types(source):
        yield kind.rpartition(".")[2], folder


def module_types(source: Files) -> Iterator[tuple[str, Path]]:
    """The class, by its full name, and the folder of each module, in order."""
    path = source.path / MODULES
    if not path.is_file():
        return
    try:
        for module in json.loads(path.read_text(encoding="utf-8")):
            folder = source.path / module["path"]
            yield str(module["type"]), folder
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{path} is not a list of modules: {error!r}") from error


def pooling_modes(source: Files, settings: Mapping[str, Any]) -> list[str]:
    """The ways to pool, in the order in which their results are concatenated."""
    given = settings.get("pooling_mode")  # sentence-transformers 5 and later
    chosen = [given] if isinstance(given, str) else list(given or ())
    chosen += [
        key.removeprefix("pooling_mode_")
        for key, on in settings.items()
        if key.startswith("pooling_mode_") and on
    ]
    modes = list(dict.fromkeys(_NAMES.get(mode, mode) for mode in chosen))
    if not modes or not set(modes) <= set(POOLINGS):
        raise ExportError(
            f"{source.name} pools by {' and '.join(map(str, chosen)) or 'nothing'}; supported: "
            f"{', '.join(POOLINGS)}"
        )
    if settings.get("include_prompt") is False:
        raise ExportError(
            f"{source.name} leaves the prompt's tokens out of its pooling (include_prompt), which "
            "is not supported"
        )
    # Older versions concatenate in an order of their own, not in that of the settings.
    return modes if given is not None else [mode for mode in POOLINGS if mode in modes]
