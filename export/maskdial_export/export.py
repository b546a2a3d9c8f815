"""Export: a checkpoint becomes a bundle, phase by phase, or nothing is left behind."""

import importlib.metadata
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from transformers import PreTrainedModel

import maskdial
from maskdial.bundle import GRAPH, Embedding, Manifest, Task, hash_files, write_manifest
from maskdial.errors import MaskdialError
from maskdial_export import causal, masked
from maskdial_export.embedding import longest_text, lower_case, read_embedding
from maskdial_export.errors import ExportError, first_line
from maskdial_export.files import load_tokenizer, special_tokens, write_files
from maskdial_export.golden import golden_check
from maskdial_export.graph import optimise, save
from maskdial_export.parity import CausalParity, MaskedParity, Measured
from maskdial_export.source import Source, find, load_model

TASKS = ("auto", *get_args(Task))
PRECISIONS = ("fp32",)
TOLERANCE = 1e-4

# What BERT's authors call them; config.json does not name them.
NEXT_SENTENCE_LABELS = ("isNext", "notNext")

_TOOLS = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")


def export(
    source: str,
    dest: Path,
    *,
    task: str = "auto",
    precision: str = "fp32",
    revision: str | None = None,
    allow_pickle: bool = False,
    tolerance: float = TOLERANCE,
    console: Console | None = None,
) -> Manifest:
    """Exports a local checkpoint folder or a Hub id to the new folder ``dest``.

    ``tolerance`` is the largest difference allowed between a logit of torch's and of ONNX
    Runtime's; where logits exceed 10 it grows in proportion, as float32's rounding does.

    Raises:
        ExportError: it cannot be exported; nothing is left at ``dest``.
    """
    console = console or Console(quiet=True)
    if precision not in PRECISIONS:
        raise ExportError(f"precision {precision} is not available yet; fp32 is")
    _check_vacant(dest)
    with _phase(console, "Finding the checkpoint"):
        found = find(source, task, revision=revision, allow_pickle=allow_pickle)
    try:
        with _new_folder(dest) as folder:
            manifest = _write_bundle(found, folder, tolerance, console)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ExportError(f"the bundle cannot be written to {dest}: {reason}") from error
    return manifest


def _check_vacant(dest: Path) -> None:
    if dest.is_dir() and not any(dest.iterdir()):
        return
    if dest.exists() or dest.is_symlink():
        raise ExportError(f"{dest} exists already; remove it or choose another name")


@contextmanager
def _new_folder(dest: Path) -> Iterator[Path]:
    """A folder that takes the name ``dest`` when all went well, and else is gone."""
    dest.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{dest.name}.", suffix=".partial", dir=dest.parent))
    try:
        folder.chmod(0o755)
        yield folder
        _check_vacant(dest)
        os.replace(folder, dest)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _phase(console: Console, name: str) -> Iterator[None]:
    """Shows a spinner while it runs and its time when it is done."""
    start = time.perf_counter()
    with console.status(f"{name} ..."):
        yield
    console.print(f"{name:<24}{time.perf_counter() - start:7.1f} s", highlight=False)


def _write_bundle(source: Source, folder: Path, tolerance: float, console: Console) -> Manifest:
    with _phase(console, "Loading"):
        model = load_model(source)
        config = model.config
        tokenizer = load_tokenizer(source, config.vocab_size)
        tokens = special_tokens(source, config, tokenizer)
        max_length = (causal if source.family == "causal" else masked).max_length(config)
        embedding = None
        if source.task == "embed":
            embedding = read_embedding(source, config)
            max_length = longest_text(source, max_length)
            lower_case(source, tokenizer)
    with _phase(console, "Tracing"):
        graph = (
            causal.trace(model)
            if source.family == "causal"
            else masked.trace(model, source.task, embedding)
        )
    with _phase(console, "Optimising"):
        graph = optimise(graph)
    with _phase(console, "Writing"):
        names = [*save(graph, folder / GRAPH), *write_files(source, tokenizer, folder)]
    with _phase(console, "Checking parity"):
        measured = _measure(source, model, embedding, folder / GRAPH, max_length, tolerance)
        effective = measured.report.tolerance
    with _phase(console, "Writing the manifest"):
        manifest = Manifest(
            family=source.family,
            task=source.task,
            architecture=source.architecture,
            precision="fp32",
            batch_invariant=measured.batch_invariant,
            vocab_size=config.vocab_size,
            max_length=max_length,
            special_tokens=tokens,
            **_classification(source, config),
            embedding=embedding,
            kv=causal.kv_layout(config) if source.family == "causal" else None,
            source=source.provenance,
            source_sha256=source.sha256(),
            tool_versions=_tool_versions(),
            parity=measured.report,
            golden=golden_check(
                model, tokenizer, tokens, source.task, embedding, max_length, effective
            ),
            files=hash_files(folder, names),
        )
        write_manifest(folder, manifest)
    return manifest


def _measure(
    source: Source,
    model: PreTrainedModel,
    embedding: Embedding | None,
    graph: Path,
    max_length: int,
    tolerance: float,
) -> Measured:
    try:
        if source.family == "masked":
            return MaskedParity(model, embedding, graph, max_length).measure(tolerance)
        layout = causal.kv_layout(model.config)
        return CausalParity(model, graph, max_length, layout).measure(tolerance)
    except MaskdialError:
        raise
    except Exception as error:  # onnxruntime's errors have no common class
        raise ExportError(
            f"ONNX Runtime cannot run the exported graph: {first_line(error)}"
        ) from error


def _classification(source: Source, config: Any) -> dict[str, Any]:
    if source.task not in ("classify", "token-classify"):
        return {}
    labels = tuple(config.id2label[index] for index in range(config.num_labels))
    if source.architecture.endswith("ForNextSentencePrediction"):
        labels = NEXT_SENTENCE_LABELS
    return {
        "labels": labels,
        "problem_type": config.problem_type if source.task == "classify" else None,
    }


def _tool_versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _TOOLS}
    return {"maskdial": maskdial.__version__, **versions}
