"""Exports a checkpoint to a bundle. A failed export leaves nothing behind."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pydantic
from rich.console import Console

from maskdial.bundle.bundle import hash_files, write_manifest
from maskdial.bundle.manifest import QUERY_WEIGHTS, Manifest
from maskdial.extras import how_to_install
from maskdial_export.checkpoint.adapter import check_adapter
from maskdial_export.checkpoint.integers import stored_matrices
from maskdial_export.checkpoint.sample import read_calibration, read_sample
from maskdial_export.checkpoint.source import Source, find
from maskdial_export.checkpoint.task_adapters import TaskAdapters, read_tasks
from maskdial_export.choices import TOLERANCE, MaskChoice, Precision
from maskdial_export.destination import new_folder
from maskdial_export.errors import ExportError, first_line, io_reason
from maskdial_export.join import join
from maskdial_export.phase import finding, phase
from maskdial_export.quantize.gate import Gate, check_choice
from maskdial_export.writing import Settings, write_bundle


def export(
    source: str,
    dest: Path,
    *,
    task: str = "auto",
    mask: MaskChoice | None = None,
    precision: str | None = None,
    gate: Gate | None = None,
    revision: str | None = None,
    allow_pickle: bool = False,
    strict: bool = True,
    ignore_remote_code: bool = False,
    max_length: int | None = None,
    adapter: Path | None = None,
    draft: str | None = None,
    tolerance: float = TOLERANCE,
    rounds: bool = False,
    console: Console | None = None,
) -> Manifest:
    """Exports a checkpoint to the new or empty folder ``dest`` and returns its manifest.

    Args:
        source: a local checkpoint folder, a GGUF file, or a Hub id.
        dest: the bundle's folder.
        task: one of ``TASKS``.
        mask: the attention mask; None for that of the architecture. "both" writes two graphs that
            share one weight file, and returns the causal graph's manifest.
        precision: one of ``PRECISIONS``; None for that of the integers which a GGUF file has, or
            of floats as ``rounds`` says.
        gate: how much quality a precision below fp32 may lose, and where.
        revision: a branch, tag or commit of the Hub id.
        allow_pickle: whether to load ``.bin`` files, which can run code.
        strict: whether to refuse a checkpoint that lacks weights of the model or has others.
        ignore_remote_code: whether to accept a checkpoint with code of its own, which is never run.
        max_length: how many tokens a text may have; None for what the model has positions for, at
            most 131,072 if they are rotary.
        adapter: the folder of a PEFT adapter (LoRA...) to merge into the weights.
        draft: the folder or Hub id of an EAGLE-3 head, which drafts for the model.
        tolerance: the largest difference allowed between the logits of torch and ONNX Runtime in
            fp32. Where logits exceed 10 it scales with them, as float32 rounding does.
        rounds: whether floats become int8 if no precision is asked for, and the quality gate can
            measure it; otherwise they become fp32.
        console: where to show progress; None for nowhere.

    Raises:
        QualityError: the precision loses more than the gate allows.
        ExportError: the checkpoint cannot be exported.
    """
    console, gate = console or Console(quiet=True), gate or Gate()
    if precision is not None:
        check_choice(precision, gate)
    sample = read_sample(gate.text)
    calibration = read_calibration(gate.calibration_text, gate.text)
    with new_folder(dest) as folder, _temporary(folder, ".gguf.") as restored:
        with phase(console, "Finding the checkpoint"), _reading(source):
            found = find(
                source,
                task,
                revision=revision,
                allow_pickle=allow_pickle,
                ignore_remote_code=ignore_remote_code,
                restored=restored,
                console=console,
            )
            if adapter is not None:
                check_adapter(adapter, allow_pickle=allow_pickle)
                found = replace(found, adapter=adapter)
        if precision is None:
            precision = _of_file(found, rounds=rounds, console=console)
            check_choice(precision, gate)
        settings = Settings(
            cast(Precision, precision),
            gate,
            sample,
            calibration,
            tolerance,
            console,
            strict=strict,
            limit=max_length,
            draft=draft,
            allow_pickle=allow_pickle,
        )
        try:
            if mask == "both":
                return _write_both(found, folder, settings)
            under = found if mask is None else found.under(mask)
            manifest = write_bundle(under, folder, settings).manifest
            manifest = _with_queries(manifest, folder, under)
            return _with_tasks(manifest, read_tasks(under), folder, under, console)
        except pydantic.ValidationError as error:
            raise ExportError(f"{source} cannot be described: {first_line(error)}") from error
        except OSError as error:
            reason = io_reason(error)
            raise ExportError(f"cannot write the bundle to {dest}: {reason}") from error


def _of_file(source: Source, *, rounds: bool, console: Console) -> Precision:
    """The precision that keeps the integers of a GGUF file; of floats, int8 or fp32.

    As floats of 32 bits integers would take five to eight times the file. Nothing measures what
    int8 loses of a table of vectors, or of canvases.
    """
    bits = {each.bits for each in stored_matrices(source).values()} if source.gguf else set()
    if not bits:
        measured = source.table is None and source.task != "block-diffusion"
        return "int8" if rounds and measured else "fp32"
    chosen: Precision = "int4" if 4 in bits else "int8"
    finding(console, f"exported as {chosen}, which keeps the file's integers; see --precision")
    return chosen


def _with_tasks(
    manifest: Manifest, found: TaskAdapters, folder: Path, source: Source, console: Console
) -> Manifest:
    """Adds the adapters of a checkpoint's tasks to its bundle; returns the manifest."""
    if not found.tasks:
        return manifest
    try:
        from maskdial_export.adapting import add_tasks
    except ImportError as error:
        raise ExportError(
            f"{source.name} brings adapters, which need peft ({error}): {how_to_install('adapter')}"
        ) from error
    return add_tasks(folder, manifest, found, source, console)


def _with_queries(manifest: Manifest, folder: Path, source: Source) -> Manifest:
    """Adds the weights of queries to a bundle that reads documents; returns its manifest."""
    if source.router is None:
        return manifest
    np.save(folder / QUERY_WEIGHTS, source.router.weights(manifest.vocab_size))
    files = manifest.files | hash_files(folder, (QUERY_WEIGHTS,))
    whole = manifest.model_copy(update={"files": files})
    write_manifest(folder, whole)
    return whole


@contextmanager
def _temporary(folder: Path, prefix: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as made:
        yield Path(made)


@contextmanager
def _reading(source: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ExportError(f"cannot read {source}: {io_reason(error)}") from error


def _write_both(found: Source, folder: Path, settings: Settings) -> Manifest:
    """Writes one model under both masks. A layer kept in fp32 by one graph is kept by both."""
    sources = found.under("causal"), found.under("full")
    settings = replace(settings, brings_drafts=False)
    if settings.draft is not None:
        raise ExportError("--draft is for bundles of one mask; leave out --mask both")
    with _temporary(folder, ".masks.") as parts:
        while True:
            round_ = Path(tempfile.mkdtemp(dir=parts))
            causal_folder, full_folder = round_ / "causal", round_ / "full"
            causal_folder.mkdir(parents=True)
            full_folder.mkdir()
            finding(settings.console, "under the causal mask:")
            causal = write_bundle(sources[0], causal_folder, settings)
            finding(settings.console, "under the full mask:")
            settings = settings.keeping(causal.kept, causal.raised)
            full = write_bundle(sources[1], full_folder, settings, causal.packs)
            if set(full.kept) == set(causal.kept) and set(full.raised) == set(causal.raised):
                break
            settings = settings.keeping(full.kept, full.raised)
            shutil.rmtree(round_)
        with phase(settings.console, "Sharing the weights"):
            join(causal_folder, full_folder, (causal.manifest, full.manifest), folder)
    return causal.manifest
