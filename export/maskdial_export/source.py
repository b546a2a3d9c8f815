"""Hugging Face checkpoints: finding, checking and loading them without running their code."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
import transformers
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import PreTrainedModel

from maskdial.models.bundle import Family, Task, file_sha256
from maskdial_export.architectures import settle
from maskdial_export.errors import ExportError, first_line

Mask = Literal["full", "causal"]

_DOWNLOADED = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
_PICKLES = ("*.bin",)
_NOT_DOWNLOADED = ("*/*.bin", "*/*.safetensors", "*/*.txt", "*/*.model")

# sentence-transformers' list of modules after the model: pooling and normalization.
MODULES = "modules.json"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint folder, with the class to load and the task to export for.

    ``both_ways``: whether the full mask takes the place of a causal model's own.
    """

    name: str
    path: Path
    architecture: str
    task: Task
    both_ways: bool = False

    @property
    def family(self) -> Family:
        return "causal" if self.task == "generate" else "masked"

    def under(self, mask: Mask) -> "Source":
        """The same model under another attention mask.

        Raises:
            ExportError: the architecture does not support the mask.
        """
        if self.task == "generate":
            return self if mask == "causal" else replace(self, task="fill-mask", both_ways=True)
        if mask == "full":
            return self
        raise ExportError(
            f"{self.architecture} only supports its own mask; --mask causal and --mask both are "
            "for models that generate"
        )

    @property
    def provenance(self) -> str:
        """For the manifest: Hub id and commit, or the name of a local folder."""
        path = self.path.resolve()
        return path.name if Path(self.name).is_dir() else f"{self.name}@{path.name}"

    def read_json(self, file_name: str) -> dict[str, Any]:
        """A JSON object next to the weights; empty if the file is missing."""
        return read_json(self.path / file_name)

    def weight_files(self) -> list[Path]:
        return sorted([*self.path.glob("*.safetensors"), *self.path.glob("pytorch_model*.bin")])

    def sha256(self) -> str:
        """One SHA-256 over the names and contents of config.json and the weight files."""
        digest = hashlib.sha256()
        for file in (self.path / "config.json", *self.weight_files()):
            digest.update(f"{file.name} {file_sha256(file)}\n".encode())
        return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file is missing.

    Raises:
        ExportError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ExportError(f"{path} is not a JSON object")
    return content


def find(source: str, task: str, *, revision: str | None, allow_pickle: bool) -> Source:
    """Finds a checkpoint, downloads it if ``source`` is a Hub id, and determines its task.

    Raises:
        ExportError: there is no such checkpoint, or it is not supported.
    """
    path = Path(source)
    if not path.is_dir():
        path = _download(source, revision, allow_pickle)
    elif revision is not None:
        raise ExportError("--revision applies to Hub ids, and the source is a local folder")
    config = read_json(path / "config.json")
    if not config:
        raise ExportError(f"{source} is not a Hugging Face checkpoint: it has no config.json")
    if task == "auto" and _pools(path):
        task = "embed"
    architecture, settled = settle(config, task)
    found = Source(source, path, architecture, settled)
    _check_weights(found, allow_pickle)
    return found


def _pools(path: Path) -> bool:
    """Whether sentence-transformers pools the output; a cross-encoder's modules do not."""
    modules = path / MODULES
    return modules.is_file() and "Pooling" in modules.read_text(encoding="utf-8", errors="replace")


def _download(source: str, revision: str | None, allow_pickle: bool) -> Path:
    patterns = [*_DOWNLOADED, *(_PICKLES if allow_pickle else ())]
    try:
        folder = huggingface_hub.snapshot_download(
            source, revision=revision, allow_patterns=patterns, ignore_patterns=[*_NOT_DOWNLOADED]
        )
    except HFValidationError as error:
        raise ExportError(f"{source} is neither a folder nor a valid Hub id") from error
    except LocalEntryNotFoundError as error:
        raise ExportError(
            f"there is no folder {source}, and the Hub cannot be reached; to work offline, pass "
            "the path of a checkpoint folder"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise ExportError(
            f"the Hub refuses to serve {source} (HTTP {status}); check the id and the revision"
        ) from error
    return Path(folder)


def _check_weights(source: Source, allow_pickle: bool) -> None:
    files = source.weight_files()
    if any(file.suffix == ".safetensors" for file in files):
        return
    if not files:
        raise ExportError(f"{source.name} has no weights: model.safetensors is missing")
    if not allow_pickle:
        raise ExportError(
            f"the weights of {source.name} are in {files[0].name}, a pickle, which can run code "
            "when loaded; convert it to safetensors, or pass --allow-pickle if you trust it"
        )


def load_model(source: Source) -> PreTrainedModel:
    """Loads the model for inference, in float32 on the CPU, with eager attention.

    Raises:
        ExportError: weights are missing, damaged, or do not have the shapes of config.json.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model_class = getattr(transformers, source.architecture)
    has_safetensors = any(file.suffix == ".safetensors" for file in source.weight_files())
    try:
        model, info = model_class.from_pretrained(
            source.path,
            dtype=torch.float32,
            attn_implementation="eager",
            use_safetensors=has_safetensors,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many types for damaged files
        raise ExportError(f"{source.name} cannot be loaded: {first_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if source.task == "embed":  # pools the hidden states itself
        missing = [name for name in missing if not name.startswith("pooler.")]
    if missing:
        raise ExportError(
            f"{source.name} lacks {len(missing)} weights of a {source.architecture}, for example "
            f"{missing[0]}"
        )
    model.eval()
    return model
