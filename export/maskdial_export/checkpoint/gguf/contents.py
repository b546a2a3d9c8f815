"""What the parts of a GGUF file hold: a model's description, its weights and its tokenizer.

Nothing here needs torch.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maskdial.bundle.manifest import (
    ADDITIONAL_TEMPLATES,
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    TOKENIZER,
)
from maskdial_export.checkpoint.gguf.architectures import read_model
from maskdial_export.checkpoint.gguf.file import GGUFFile, read_file
from maskdial_export.checkpoint.gguf.model import Model
from maskdial_export.checkpoint.gguf.settings import Settings
from maskdial_export.checkpoint.gguf.tokenizer import ReadTokenizer, read_tokenizer
from maskdial_export.checkpoint.gguf.weights import Weight, match_weights
from maskdial_export.errors import ExportError

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_SUFFIX = ".gguf"
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}")
_SPLIT_COUNT, _SPLIT_NUMBER = "split.count", "split.no"
_WRITERS = ("ForCausalLM", "LMHeadModel")
_MAX_LAYERS = 2**10
# general.sampling -> generation_config.json, with what llama.cpp takes where a file has none
_SAMPLING: dict[str, tuple[str, float]] = {
    "temp": ("temperature", 0.8),
    "top_k": ("top_k", 40),
    "top_p": ("top_p", 0.95),
    "min_p": ("min_p", 0.05),
}


def gguf_files(path: Path) -> list[Path]:
    """The GGUF files of a model: of a file it and its other parts, of a folder the only ones.

    None of a folder that has weights in another format, and of what is neither file nor folder.

    Raises:
        ExportError: there is no such file, parts are missing, or a folder has several models.
    """
    if path.is_file():
        return find_parts(path)
    if not path.is_dir():
        if path.suffix == _SUFFIX:
            raise ExportError(
                f"there is no file {path}; if it is one of a Hub repository, download it first: "
                f"hf download REPOSITORY {path.name} --local-dir FOLDER"
            )
        return []
    if any(path.glob("*.safetensors")) or any(path.glob("pytorch_model*.bin")):
        return []
    files = sorted(file for file in path.glob(f"*{_SUFFIX}") if "mmproj" not in file.name)
    models = {find_parts(file)[0] for file in files}
    if len(models) > 1:
        names = ", ".join(sorted(file.name for file in models))
        raise ExportError(f"{path} has {len(models)} GGUF models ({names}); pass one of them")
    return find_parts(files[0]) if files else []


def find_parts(path: Path) -> list[Path]:
    """The files of a model that is split into several, in order; otherwise the file alone.

    Raises:
        ExportError: parts are missing.
    """
    named = _PART.fullmatch(path.name)
    if named is None:
        return [path]
    stem, count = named[1], int(named[3])
    if not 1 <= count <= 10_000:
        raise ExportError(f"{path.name} is named as a part of {count:,}, which cannot be")
    parts = [path.with_name(f"{stem}-{each:05}-of-{named[3]}.gguf") for each in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ExportError(
            f"{path.name} is one of {count} parts, of which {len(missing)} are not beside it "
            f"({missing[0]}); get them, too"
        )
    return parts


@dataclass(frozen=True, slots=True)
class Contents:
    """What GGUF files hold: the model's description, and where each of its weights is."""

    file: GGUFFile
    model: Model
    weights: Sequence[Weight]

    @property
    def settings(self) -> Settings:
        """The metadata."""
        return _settings(self.file)


def read_contents(parts: Sequence[Path]) -> Contents:
    """Reads the headers of a model's files.

    Raises:
        ExportError: one is damaged, or the model is not supported.
        OSError: one cannot be read.
    """
    file = _joined([read_file(part) for part in parts])
    settings = _settings(file)
    model = read_model(settings)
    weights = match_weights(file, model)
    _check_layers(file, model)
    return Contents(file, model, weights)


def _settings(file: GGUFFile) -> Settings:
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ExportError(f"{file.path} is no model, but a GGUF of the type {kind!r}")
    architecture = Settings(file, "").text("general.architecture")
    if architecture == "clip":
        raise ExportError(
            f"{file.path} is what a model reads images or sound with (mmproj); pass the file of "
            "the model"
        )
    return Settings(file, architecture)


def _joined(files: Sequence[GGUFFile]) -> GGUFFile:
    """One file of all parts. The first one has the metadata."""
    first = files[0]
    count = first.metadata.get(_SPLIT_COUNT, 1)
    if count not in (0, len(files)):
        raise ExportError(
            f"{first.path} is one of {count} parts; name them as they were: "
            "NAME-00001-of-0000N.gguf, and so on"
        )
    tensors = dict(first.tensors)
    for number, file in enumerate(files[1:], 1):
        if file.metadata.get(_SPLIT_NUMBER) != number:
            raise ExportError(f"{file.path} is not part {number + 1} of {first.path.name}")
        twice = tensors.keys() & file.tensors.keys()
        if twice:
            raise ExportError(f"{file.path} has {min(twice)!r} again, which another part has")
        tensors |= file.tensors
    return GGUFFile(first.path, first.metadata, tensors)


def _check_layers(file: GGUFFile, model: Model) -> None:
    described = int(model.config.get("num_hidden_layers") or model.config.get("n_layer") or 0)
    found = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    further = file.metadata.get(f"{file.metadata['general.architecture']}.nextn_predict_layers", 0)
    described = described + further if type(further) is int else described
    if described != len(found) or described > _MAX_LAYERS:
        raise ExportError(
            f"{file.path} describes {described:,} layers, and has tensors of {len(found):,}"
        )


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_settings(contents: Contents, folder: Path) -> None:
    """Writes config.json and the tokenizer's files, and of a model that writes how it samples.

    Raises:
        ExportError: the tokenizer is not supported, or damaged.
        OSError: a file cannot be written.
    """
    model, settings = contents.model, contents.settings
    tokenizer = read_tokenizer(settings)
    write_json(folder / "config.json", {"architectures": [model.architecture], **model.config})
    writes = model.architecture.endswith(_WRITERS) and model.pooling is None
    _write_tokenizer(settings, tokenizer, folder, writes=writes)


def _write_tokenizer(
    settings: Settings, tokenizer: ReadTokenizer, folder: Path, *, writes: bool
) -> None:
    """Writes the tokenizer, and of a model that writes how it samples."""
    tokenizer.backend.save(str(folder / TOKENIZER))
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_input_names": inputs if tokenizer.has_types else [inputs[0], inputs[2]],
            **{f"{role}_token": text for role, text in tokenizer.tokens.items()},
        },
    )
    generation: dict[str, Any] = {}
    if "bos" in tokenizer.roles:
        generation["bos_token_id"] = tokenizer.roles["bos"]
    if tokenizer.ends:
        generation["eos_token_id"] = list(tokenizer.ends)
    for ours, (theirs, otherwise) in _SAMPLING.items() if writes else ():
        given = settings.find(f"general.sampling.{ours}")
        generation[theirs] = otherwise if given is None else given
    if generation:
        write_json(folder / GENERATION_CONFIG, generation)
    if settings.find(_TEMPLATE) is not None:
        (folder / CHAT_TEMPLATE).write_text(settings.text(_TEMPLATE), encoding="utf-8")
    for key in settings.file.metadata:
        name = key.removeprefix(f"{_TEMPLATE}.")
        if name != key and _TEMPLATE_NAME.fullmatch(name):
            (folder / ADDITIONAL_TEMPLATES).mkdir(exist_ok=True)
            path = folder / ADDITIONAL_TEMPLATES / f"{name}.jinja"
            path.write_text(settings.text(key), encoding="utf-8")
