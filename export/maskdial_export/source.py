"""Hugging Face checkpoints: finding and checking them without running their code."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from maskdial.models.bundle import Family, Task, file_sha256
from maskdial_export.config import check_config
from maskdial_export.errors import ExportError

Mask = Literal["full", "causal"]

_DOWNLOADED = ("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors")
_PICKLES = ("*.bin",)
_NOT_DOWNLOADED = ("*/*.bin", "*/*.safetensors", "*/*.txt", "*/*.model")

# sentence-transformers' list of modules after the model: pooling and normalization.
MODULES = "modules.json"


def _encoder(prefix: str, *more: str) -> dict[str, Task]:
    return {
        f"{prefix}ForMaskedLM": "fill-mask",
        f"{prefix}ForSequenceClassification": "classify",
        f"{prefix}ForTokenClassification": "token-classify",
        f"{prefix}ForQuestionAnswering": "question-answering",
        f"{prefix}Model": "embed",
        **{f"{prefix}{name}": "classify" for name in more},
    }


# model_type in config.json -> transformers class -> task of its head
_CLASSES: Mapping[str, Mapping[str, Task]] = {
    "bert": _encoder("Bert", "ForNextSentencePrediction"),
    "roberta": _encoder("Roberta"),
    "albert": _encoder("Albert"),
    "distilbert": _encoder("DistilBert"),
    "electra": _encoder("Electra"),
    "xlm-roberta": _encoder("XLMRoberta"),
    "modernbert": _encoder("ModernBert"),
    "deberta-v2": _encoder("DebertaV2"),
    "gpt2": {"GPT2LMHeadModel": "generate"},
    "opt": {"OPTForCausalLM": "generate"},
    "gpt_neox": {"GPTNeoXForCausalLM": "generate"},
    "llama": {"LlamaForCausalLM": "generate"},
    "mistral": {"MistralForCausalLM": "generate"},
    "qwen2": {"Qwen2ForCausalLM": "generate"},
    "qwen3": {"Qwen3ForCausalLM": "generate"},
    "phi3": {"Phi3ForCausalLM": "generate"},
    "gemma2": {"Gemma2ForCausalLM": "generate"},
}

_CAUSAL = frozenset(
    architecture
    for classes in _CLASSES.values()
    for architecture, task in classes.items()
    if task == "generate"
)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint folder, with the class to load and the task to export for."""

    name: str
    path: Path
    architecture: str
    task: Task

    @property
    def family(self) -> Family:
        return "causal" if self.task == "generate" else "masked"

    @property
    def mask(self) -> Mask:
        """The attention mask of the architecture."""
        return "causal" if self.architecture in _CAUSAL else "full"

    @property
    def reads_both_ways(self) -> bool:
        """Whether this is a causal architecture under the full mask."""
        return self.mask == "causal" and self.family == "masked"

    def under(self, mask: Mask) -> "Source":
        """The same model under another attention mask.

        Raises:
            ExportError: the causal mask is asked of an encoder.
        """
        if mask == self.mask:
            return self
        if self.mask == "full":
            raise ExportError(
                f"{self.architecture} only supports the full mask; --mask causal and --mask both "
                "are for causal models"
            )
        return replace(self, task="fill-mask")

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
    check_config(source, config)
    if task == "auto" and _pools(path):
        task = "embed"
    architecture, settled = _settle(config, task)
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


def _settle(config: dict[str, Any], task: str) -> tuple[str, Task]:
    """The class to load and its task, from config.json and the requested task."""
    model_type = config.get("model_type")
    named = (config.get("architectures") or [None])[0]
    classes = _CLASSES.get(str(model_type))
    if classes is None:
        known = ", ".join(_CLASSES)
        remote = " (code in a checkpoint is never run)" if "auto_map" in config else ""
        raise ExportError(f"model type {model_type!r} is not supported{remote}; supported: {known}")
    if config.get("is_decoder") and "generate" not in classes.values():
        raise ExportError(f"{model_type} checkpoints with is_decoder set are not supported")
    if named in classes and task in ("auto", classes[named]):
        return named, classes[named]
    for architecture, known_task in classes.items():
        if task == known_task:
            return architecture, known_task
    tasks = list(dict.fromkeys(classes.values()))
    if task == "auto":
        options = " or ".join(f"--task {known_task}" for known_task in tasks)
        raise ExportError(
            f"cannot tell the task from the architecture {named!r} in config.json; if the "
            f"checkpoint has the head for it, pass {options}"
        )
    raise ExportError(
        f"{model_type} models do not support {task}; supported tasks: {', '.join(tasks)}"
    )


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
