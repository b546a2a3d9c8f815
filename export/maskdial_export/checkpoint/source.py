"""Hugging Face checkpoints: finding and checking them without running their code."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from transformers import JevForDecision
from transformers.models.auto.modeling_auto import MODEL_FOR_DECISION_MAPPING_NAMES

from maskdial.bundle.manifest import Family, TaskName
from maskdial_export.checkpoint.architectures import has_two_parts, settle, text_class
from maskdial_export.checkpoint.config import check_config
from maskdial_export.checkpoint.files import files_sha256
from maskdial_export.checkpoint.gguf.contents import gguf_files
from maskdial_export.checkpoint.gguf.convert import convert
from maskdial_export.checkpoint.hub import HYBRID_HEADS, download, provenance
from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.onnx_files import find_graphs
from maskdial_export.checkpoint.own_code import own_code
from maskdial_export.checkpoint.reranking import is_reranker
from maskdial_export.checkpoint.router import Router, find_router
from maskdial_export.checkpoint.sentence import MODULES, SENTENCE_CONFIG
from maskdial_export.errors import ExportError

Mask = Literal["full", "causal"]

GLINER_CONFIG = "gliner_config.json"
GLINER, GLINER2 = "GLiNER", "GLiNER2"

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint folder, with the class to load and the task to export for.

    ``both_ways``: whether the full mask takes the place of a causal model's own. ``adapter`` is the
    folder of a PEFT adapter to merge into the weights, ``num_labels`` are those of a head that it
    brings. ``own_code``: what the checkpoint brings to
    run that is not run. ``table`` is the folder of a table of static embeddings. ``finder`` is the
    folder of a GLiNER model whose encoder of labels this is; ``path`` has its tokenizer only.
    ``gguf`` are the files that the folder was restored from. ``router`` has the whole checkpoint
    whose documents' route this is, in the folder ``routed``.
    """

    name: str
    path: Path
    architecture: str
    task: TaskName
    both_ways: bool = False
    adapter: Path | None = None
    num_labels: int | None = None
    own_code: str | None = None
    table: Path | None = None
    finder: Path | None = None
    gguf: tuple[Path, ...] = ()
    router: Router | None = None
    routed: Path | None = None

    @property
    def family(self) -> Family:
        if has_two_parts(self.architecture):
            return "encoder-decoder"
        return "causal" if self.task == "generate" else "masked"

    def with_head(self, adapter: Path, task: TaskName, num_labels: int) -> "Source":
        """The same model with an adapter, and with the head that it brings.

        Raises:
            ExportError: the model has no class for the task.
        """
        model_type = str(self.read_json("config.json").get("model_type"))
        architecture = text_class(task, model_type)
        if architecture is None:
            raise ExportError(f"{model_type} models have no head for {task}")
        return replace(
            self, adapter=adapter, task=task, architecture=architecture, num_labels=num_labels
        )

    def under(self, mask: Mask) -> "Source":
        """The same model under another attention mask.

        Raises:
            ExportError: the architecture does not support the mask.
        """
        if self.family == "causal":
            return self if mask == "causal" else replace(self, task="fill-mask", both_ways=True)
        if mask == "full":
            return self
        raise ExportError(
            f"{self.architecture} only supports its own mask; --mask causal and --mask both are "
            "for models that generate"
        )

    @property
    def provenance(self) -> str:
        """For the manifest: Hub id and commit, or a local name; and the adapter's name."""
        path = self.gguf[0] if self.gguf else (self.routed or self.finder or self.path).resolve()
        local = self.gguf or Path(self.name).is_dir()
        name = provenance(path) if local else f"{self.name}@{path.name}"
        return name if self.adapter is None else f"{name} + {self.adapter.resolve().name}"

    def read_json(self, file_name: str) -> dict[str, Any]:
        """A JSON object next to the weights; empty if the file is missing."""
        return read_json(self.path / file_name)

    def weight_files(self) -> list[Path]:
        folder = self.table or self.finder or self.path
        return sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])

    def sha256(self) -> str:
        """One SHA-256 over the names and contents of config.json, weight files, heads, adapter.

        A GGUF file has the first two.
        """
        beside = [*self.path.glob("*/adapter_*")] if self.task == "decide" else []
        beside += [self.path / name for name in HYBRID_HEADS if self.task == "embed-hybrid"]
        beside += [] if self.adapter is None else self.adapter.glob("adapter_*")
        beside += [] if self.router is None else self.router.files
        folder = self.finder or self.path
        configs = (folder / name for name in ("config.json", GLINER_CONFIG))
        own = (*(each for each in configs if each.is_file()), *self.weight_files())
        return files_sha256((*(self.gguf or own), *sorted(beside)))


def find(
    source: str,
    task: str,
    *,
    revision: str | None,
    allow_pickle: bool,
    ignore_remote_code: bool = False,
    restored: Path | None = None,
    console: Console | None = None,
) -> Source:
    """Finds a checkpoint, downloads it if ``source`` is a Hub id, and determines its task.

    A GGUF file, or the documents' route of a Router, is restored to a checkpoint in the empty
    folder ``restored``; None accepts neither.

    Raises:
        ExportError: there is no such checkpoint, or it is not supported.
    """
    path = Path(source)
    gguf = () if restored is None else gguf_files(path)
    if gguf and restored is not None:
        if revision is not None:
            raise ExportError("--revision applies to Hub ids, and the source is a local file")
        convert(gguf, restored, console)
        path = restored
    elif not path.is_dir():
        path = download(source, revision, allow_pickle=allow_pickle)
    elif revision is not None:
        raise ExportError("--revision applies to Hub ids, and the source is a local folder")
    router, whole = find_router(source, path), path
    if router is not None:
        if restored is None:
            raise ExportError(f"{source} has a Router, for which no adapter is exported")
        path = router.restore(path, restored)
    config = read_json(path / "config.json")
    table = _static_table(path, config)
    if table is not None:
        if task not in ("auto", "embed"):
            raise ExportError(f"{source} is a table of static embeddings, which can only embed")
        static = Source(source, path, "StaticEmbedding", "embed", table=table)
        _check_weights(static, allow_pickle=False)
        return static
    if (path / GLINER_CONFIG).is_file():
        if task not in ("auto", "entities"):
            raise ExportError(f"{source} is a GLiNER model, which can only find entities")
        finder = Source(source, path, GLINER, "entities")
        _check_weights(finder, allow_pickle)
        return finder
    if config.get("model_type") == "extractor":
        if task not in ("auto", "extract"):
            raise ExportError(f"{source} is a GLiNER2 model, which can only extract")
        extractor = Source(source, path, GLINER2, "extract")
        _check_weights(extractor, allow_pickle)
        return extractor
    if not config:
        _refuse_adapter(source, path)
        _refuse_folders(source, path)
        raise ExportError(f"{source} is not a Hugging Face checkpoint: it has no config.json")
    check_config(source, config)
    if config.get("model_type") == "nomic_bert" and config.get("num_experts"):
        raise ExportError(
            f"{source} is a Nomic BERT with {config['num_experts']} experts, which transformers' "
            "NomicBert lacks, so it cannot be traced; without options for tracing it is written "
            "directly"
        )
    if task == "auto":
        task = _module_task(path, config)
    architecture, settled = settle(config, task)
    code = own_code(source, path, config)
    if code is not None and not ignore_remote_code:
        raise ExportError(
            f"{code}, which is never run; transformers' {architecture} may compute something else, "
            "such as attention in one direction only: pass --ignore-remote-code if it does not"
        )
    found = Source(source, path, architecture, settled, own_code=code, gguf=tuple(gguf))
    if router is not None:
        if settled != "embed-sparse":
            raise ExportError(
                f"{source} has weights of a query's tokens, and its documents' route is not that "
                "of a sparse encoder, which is not supported"
            )
        found = replace(found, router=router, routed=whole)
    _check_weights(found, allow_pickle)
    return found


def _static_table(path: Path, config: Mapping[str, Any]) -> Path | None:
    """The folder of a table of static embeddings; None if the checkpoint is none."""
    if config.get("model_type") == "model2vec":
        return path
    try:
        modules = json.loads((path / MODULES).read_text(encoding="utf-8"))
        first = modules[0]
        if first["type"].rpartition(".")[2] != "StaticEmbedding":
            return None
        return path / str(first["path"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # what is wrong with it is told where it is read


def _refuse_adapter(source: str, path: Path) -> None:
    """Says how to export an adapter, which is no checkpoint by itself."""
    base = read_json(path / "adapter_config.json").get("base_model_name_or_path")
    if base is not None:
        raise ExportError(
            f"{source} is an adapter of {base}; export that model with --adapter {path}"
        )


def _refuse_folders(source: str, path: Path) -> None:
    """Says which module of sentence-transformers has the model in a folder of its own."""
    listed = path / MODULES
    text = listed.read_text(encoding="utf-8", errors="replace") if listed.is_file() else ""
    kind = next(iter(re.findall(r'"type"\s*:\s*"(?:[^"]*\.)?([^".]+)"', text)), None)
    if kind is not None:
        raise ExportError(
            f"{source} has no config.json: its first module in {MODULES} is a {kind} with files in "
            "a folder of its own, which is not supported"
        )


def _module_task(path: Path, config: Mapping[str, Any]) -> str:
    """The task by the files beside the weights, such as sentence-transformers'; otherwise auto."""
    if _has_decision_head(path, config):
        return "decide"
    if all((path / name).is_file() for name in HYBRID_HEADS):
        return "embed-hybrid"
    modules = path / MODULES
    listed = modules.read_text(encoding="utf-8", errors="replace") if modules.is_file() else ""
    if is_reranker(path, config):
        return "rerank"
    kind = read_json(path / SENTENCE_CONFIG).get("model_type")
    is_colbert = kind in ("ColBERT", "MultiVectorEncoder") or "HF_ColBERT" in (
        config.get("architectures") or ()
    )
    if is_colbert or "MultiVectorMask" in listed:
        return "embed-all"
    if "SpladePooling" in listed:
        return "embed-sparse"
    return "embed" if "Pooling" in listed else "auto"


def _has_decision_head(path: Path, config: Mapping[str, Any]) -> bool:
    """Whether a head for decisions lies beside the weights, as transformers finds one."""
    if config.get("model_type") not in MODEL_FOR_DECISION_MAPPING_NAMES:
        return False
    try:
        found, _ = JevForDecision.checkpoint_config(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(f"the decision head of {path} is damaged: {error!r}") from error
    return found is not None


def _check_heads(source: Source, allow_pickle: bool) -> None:
    """Refuses a hybrid model without its heads, which are pickles."""
    for name in HYBRID_HEADS:
        if not (source.path / name).is_file():
            raise ExportError(
                f"{source.name} has no {name}, which dense, sparse and token vectors from one pass "
                "need; use --task embed for the dense ones alone"
            )
    if not allow_pickle:
        raise ExportError(
            f"{' and '.join(HYBRID_HEADS)} of {source.name} are pickles, which can run code when "
            "loaded; pass --allow-pickle if you trust them, or --task embed for dense vectors alone"
        )


def _check_weights(source: Source, allow_pickle: bool) -> None:
    files = source.weight_files()
    if source.task == "embed-hybrid":
        _check_heads(source, allow_pickle)
    for file in files:
        with file.open("rb") as opened:
            if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ExportError(
                    f"{file} is a pointer of Git LFS, not the weights; run `git lfs pull` there"
                )
    if any(file.suffix == ".safetensors" for file in files):
        return
    if not files:
        others = (
            ""
            if Path(source.name).is_dir() or allow_pickle
            else (
                "; if the repository has .bin files, which can run code when loaded, pass "
                "--allow-pickle to use them"
            )
        )
        if graphs := find_graphs(source.name, source.path):
            others = (
                f"; its graph {graphs[0].name} is exported as it is, without options of a trace"
            )
        raise ExportError(f"{source.name} has no weights: model.safetensors is missing{others}")
    if not allow_pickle:
        raise ExportError(
            f"the weights of {source.name} are in {files[0].name}, a pickle, which can run code "
            "when loaded; convert it to safetensors, or pass --allow-pickle if you trust it"
        )
