"""From a GGUF file, or the parts of one, to a checkpoint as transformers saves it."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console

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
from maskdial_export.checkpoint.gguf.weights import (
    Weight,
    count_kinds,
    match_weights,
    read_values,
)
from maskdial_export.errors import ExportError, first_line
from maskdial_export.phase import finding

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_SUFFIX = ".gguf"
_TEMPLATE = "tokenizer.chat_template"
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}")
_SPLIT_COUNT, _SPLIT_NUMBER = "split.count", "split.no"
_DENSE = ("dense_2.weight", "dense_3.weight")
_WRITERS = ("ForCausalLM", "LMHeadModel")
_MAX_LAYERS = 2**10
_MAX_SURPLUS = 2**20  # parameters of the model that the file may lack
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


def convert(parts: Sequence[Path], folder: Path, console: Console | None = None) -> None:
    """Writes a checkpoint of float32 weights into an empty folder.

    Raises:
        ExportError: a file is damaged, or its model or its tokenizer is not supported.
        OSError: a file cannot be read or written.
    """
    contents = read_contents(parts)
    settings = _settings(contents.file)
    tokenizer = read_tokenizer(settings)
    _check_shapes(contents)
    _write_config(contents.model, folder)
    writes = contents.model.architecture.endswith(_WRITERS) and contents.model.pooling is None
    _write_tokenizer(settings, tokenizer, folder, writes=writes)
    if contents.model.pooling is not None:
        _write_pooling(contents, folder)
    kinds = count_kinds(list(contents.weights))
    total = sum(kinds.values())
    shares = ", ".join(f"{kind} {count / total:.1%}" for kind, count in kinds.items())
    finding(
        console or Console(quiet=True),
        f"GGUF of {settings.architecture} with {total:,} weights: {shares}; restored to float32",
    )
    _write_weights(contents.weights, folder / "model.safetensors")


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


def _check_shapes(contents: Contents) -> None:
    """Compares weights with the model that the metadata describes, before it takes memory."""
    transformers.utils.logging.set_verbosity_error()
    model_class = getattr(transformers, contents.model.architecture)
    try:
        config = model_class.config_class(**contents.model.config)
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # transformers raises many types for settings that do not fit
        raise ExportError(
            f"the metadata of {contents.file.path} describes no {contents.model.architecture}: "
            f"{first_line(error)}"
        ) from error
    expected = {name: tuple(each.shape) for name, each in model.named_parameters()}
    stored = 0
    for weight in contents.weights:
        shape = _shape(weight)
        stored += int(np.prod(shape))
        if expected.get(weight.name, shape) != shape:
            raise ExportError(
                f"{weight.pieces[0].tensor.name} of {contents.file.path} has the shape {shape}, "
                f"but the metadata describes a model where it has {expected[weight.name]}"
            )
    described = sum(each.numel() for each in model.parameters())
    if described > 2 * stored + _MAX_SURPLUS:
        raise ExportError(
            f"the metadata of {contents.file.path} describes a model of {described:,} parameters, "
            f"and the file has {stored:,}"
        )


def _shape(weight: Weight) -> tuple[int, ...]:
    """Of the weight in transformers."""
    num_rows = weight.padding + sum(piece.num_rows for piece in weight.pieces)
    if weight.is_vector:
        return (num_rows,)
    columns = weight.pieces[0].tensor.shape[-1]
    if weight.squeezed:
        return (num_rows, 1, columns)
    return (columns, num_rows) if weight.transposed else (num_rows, columns)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_config(model: Model, folder: Path) -> None:
    content = {"architectures": [model.architecture], **model.config}
    _write_json(folder / "config.json", content)


def _write_tokenizer(
    settings: Settings, tokenizer: ReadTokenizer, folder: Path, *, writes: bool
) -> None:
    """Writes the tokenizer, and of a model that writes how it samples."""
    tokenizer.backend.save(str(folder / TOKENIZER))
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    _write_json(
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
        _write_json(folder / GENERATION_CONFIG, generation)
    if settings.find(_TEMPLATE) is not None:
        (folder / CHAT_TEMPLATE).write_text(settings.text(_TEMPLATE), encoding="utf-8")
    for key in settings.file.metadata:
        name = key.removeprefix(f"{_TEMPLATE}.")
        if name != key and _TEMPLATE_NAME.fullmatch(name):
            (folder / ADDITIONAL_TEMPLATES).mkdir(exist_ok=True)
            path = folder / ADDITIONAL_TEMPLATES / f"{name}.jinja"
            path.write_text(settings.text(key), encoding="utf-8")


def _write_pooling(contents: Contents, folder: Path) -> None:
    """sentence-transformers' modules; the vectors are normalized, as llama.cpp's server does."""
    modules = ["Transformer", "Pooling"]
    width = contents.model.config["hidden_size"]
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    mode = f"pooling_mode_{contents.model.pooling}"
    _write_json(pooling / "config.json", {"word_embedding_dimension": width, mode: True})
    for name in _DENSE:
        tensor = contents.file.tensors.get(name)
        if tensor is not None and not tensor.is_vector:
            dense = folder / f"{len(modules)}_Dense"
            dense.mkdir()
            outputs, inputs = tensor.shape
            linear = {"in_features": inputs, "out_features": outputs, "bias": False}
            activation = "torch.nn.modules.linear.Identity"
            _write_json(dense / "config.json", linear | {"activation_function": activation})
            _write_tensors(
                {"linear.weight": (outputs, inputs)},
                [read_values(tensor)],
                dense / "model.safetensors",
            )
            modules.append("Dense")
    modules.append("Normalize")
    _write_json(
        folder / "modules.json",
        [
            {
                "idx": index,
                "name": str(index),
                "path": "" if index == 0 else f"{index}_{module}",
                "type": f"sentence_transformers.models.{module}",
            }
            for index, module in enumerate(modules)
        ],
    )


def _write_weights(weights: Sequence[Weight], path: Path) -> None:
    shapes = {weight.name: _shape(weight) for weight in weights}
    _write_tensors(shapes, (weight.values() for weight in weights), path)


def _write_tensors(shapes: Any, values: Any, path: Path) -> None:
    """Writes a safetensors file of float32, one tensor after the other.

    The library's own writer wants all of them in memory.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for each in values:
            file.write(memoryview(each).cast("B"))
