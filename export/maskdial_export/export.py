"""Export: a checkpoint becomes a bundle, phase by phase, or nothing is left behind."""

import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import onnx_ir as ir
from rich.console import Console

import maskdial
from maskdial.bundle import (
    GRAPH,
    KERNEL_CHECK,
    GoldenCheck,
    Manifest,
    ParityReport,
    QualityReport,
    Task,
    hash_files,
    write_manifest,
)
from maskdial.errors import MaskdialError
from maskdial_export.checkpoint import Checkpoint, load_checkpoint
from maskdial_export.errors import ExportError, first_line
from maskdial_export.files import write_files
from maskdial_export.golden import SLACK, Golden, quantised_tolerance
from maskdial_export.graph import optimise, save
from maskdial_export.kernels import kernel_check
from maskdial_export.phase import phase
from maskdial_export.quality import Gate, Quantiser
from maskdial_export.sample import Sample, read_sample
from maskdial_export.source import Source, find

TASKS = ("auto", *get_args(Task))
Precision = Literal["fp32", "fp16", "int8", "int4"]
PRECISIONS = get_args(Precision)
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
    gate: Gate | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    tolerance: float = TOLERANCE,
    console: Console | None = None,
) -> Manifest:
    """Exports a local checkpoint folder or a Hub id to the new folder ``dest``.

    ``gate`` says what a precision other than fp32 may cost. ``tolerance`` is the largest difference
    allowed between a logit of torch's and of ONNX Runtime's, in fp32; where logits exceed 10 it
    grows in proportion, as float32's rounding does.

    Raises:
        ExportError: it cannot be exported; nothing is left at ``dest``.
    """
    console = console or Console(quiet=True)
    if precision not in PRECISIONS:
        raise ExportError(f"there is no precision {precision}; there are {', '.join(PRECISIONS)}")
    if precision == "fp32" and gate not in (None, Gate()):
        raise ExportError(
            "--keep, --keep-worst, --max-loss and the like are for lower precisions; say "
            "--precision int8 or int4 with them"
        )
    gate = gate or Gate()
    if precision == "fp16" and (gate.keep or gate.keep_worst):
        raise ExportError("--keep and --keep-worst are for int8 and int4; fp16 is for all layers")
    sample = read_sample(gate.text)
    _check_vacant(dest)
    with phase(console, "Finding the checkpoint"):
        found = find(source, task, revision=revision, allow_pickle=allow_pickle)
    try:
        with _new_folder(dest) as folder:
            to = cast(Precision, precision)
            manifest = _write_bundle(found, folder, to, gate, sample, tolerance, console)
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


@dataclass(frozen=True, slots=True)
class _Checked:
    """What is known of the graph that the bundle has."""

    parity: ParityReport
    batch_invariant: bool
    golden: GoldenCheck
    quality: QualityReport | None = None


def _write_bundle(
    source: Source,
    folder: Path,
    precision: Precision,
    gate: Gate,
    sample: Sample,
    tolerance: float,
    console: Console,
) -> Manifest:
    quantiser = None
    with phase(console, "Loading"):
        checkpoint = load_checkpoint(source)
        if precision != "fp32":
            quantiser = Quantiser(checkpoint, precision, gate, sample, console)
    with phase(console, "Tracing"):
        graph = checkpoint.trace()
    with phase(console, "Optimising"):
        graph = optimise(graph)
        named = graph.clone()  # saving takes the modules' names away
    path = folder / GRAPH
    with phase(console, "Writing"):
        names = [*save(graph, path), *write_files(source, checkpoint.tokenizer, folder)]
    with _onnxruntime_errors():
        checked = _check(checkpoint, path, tolerance, console)
        if quantiser is not None:
            quality = quantiser.replace(named, path)
            checked = _check_quantised(checkpoint, path, checked, quality, console)
    if precision == "int8" and not gate.reduce_range:
        ir.save(kernel_check(), folder / KERNEL_CHECK)
        names.append(KERNEL_CHECK)
    kv = checkpoint.kv
    if kv is not None and precision == "fp16":
        kv = kv.model_copy(update={"dtype": "float16"})
    config = checkpoint.model.config
    with phase(console, "Writing the manifest"):
        manifest = Manifest(
            family=source.family,
            task=source.task,
            architecture=source.architecture,
            precision=precision,
            batch_invariant=checked.batch_invariant,
            vocab_size=config.vocab_size,
            max_length=checkpoint.max_length,
            special_tokens=checkpoint.tokens,
            **_classification(source, config),
            embedding=checkpoint.embedding,
            kv=kv,
            source=source.provenance,
            source_sha256=source.sha256(),
            tool_versions=_tool_versions(),
            parity=checked.parity,
            quality=checked.quality,
            golden=checked.golden,
            files=hash_files(folder, names),
        )
        write_manifest(folder, manifest)
    return manifest


def _check(checkpoint: Checkpoint, path: Path, tolerance: float, console: Console) -> _Checked:
    """The fp32 graph against torch."""
    with phase(console, "Checking parity"):
        measured = checkpoint.parity(path).measure(tolerance)
        golden = Golden(checkpoint)
        allowed = SLACK * measured.report.tolerance
        check = golden.check(golden.expected(), allowed)
    return _Checked(measured.report, measured.batch_invariant, check)


def _check_quantised(
    checkpoint: Checkpoint, path: Path, fp32: _Checked, quality: QualityReport, console: Console
) -> _Checked:
    """The quantised graph for itself."""
    with phase(console, "Checking invariance"):
        batch_invariant = checkpoint.parity(path).batch_invariant()
        golden = Golden(checkpoint)
        before, logits = golden.expected(), golden.computed(path)
        allowed = quantised_tolerance(before, logits, fp32.golden.tolerance)
    return _Checked(fp32.parity, batch_invariant, golden.check(logits, allowed), quality)


@contextmanager
def _onnxruntime_errors() -> Iterator[None]:
    """Says what ONNX Runtime cannot run."""
    try:
        yield
    except (MaskdialError, OSError):
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
