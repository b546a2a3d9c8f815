"""Writes one bundle: a checkpoint under one attention mask, checked on the way."""

import importlib.metadata
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from rich.console import Console

import maskdial
from maskdial.bundle.bundle import hash_files, write_manifest
from maskdial.bundle.infill import find_infill_tokens
from maskdial.bundle.manifest import (
    ADDITIONAL_TEMPLATES,
    CHAT_TEMPLATE,
    DECISION_TEMPLATE,
    DRAFT_GRAPH,
    DRAFT_TOKENS,
    ENCODER_GRAPH,
    GRAPH,
    KERNEL_CHECK,
    LABEL_ENCODER,
    MANIFEST,
    DraftHead,
    Family,
    GoldenCheck,
    InfillTokens,
    Manifest,
    ParityReport,
    QualityReport,
)
from maskdial_export.checkpoint.decision import read_decision
from maskdial_export.checkpoint.eagle import load_eagle
from maskdial_export.checkpoint.files import read_files, response_template, write_files
from maskdial_export.checkpoint.gliner_labels import label_source
from maskdial_export.checkpoint.integers import stored_matrices
from maskdial_export.checkpoint.mtp import load_mtp
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.checkpoint.source import Source
from maskdial_export.checks.kernels import kernel_check
from maskdial_export.choices import Precision
from maskdial_export.errors import ExportError, onnxruntime_errors
from maskdial_export.golden import Golden
from maskdial_export.golden_check import SLACK, half_tolerance, quantized_tolerance
from maskdial_export.join import share_weights
from maskdial_export.model import Checkpoint, load_checkpoint
from maskdial_export.phase import finding, phase
from maskdial_export.quantize.blocks import Blocks
from maskdial_export.quantize.gate import Gate
from maskdial_export.quantize.quality import Graphs, Quantizer
from maskdial_export.quantize.quantize import HALF
from maskdial_export.quantize.stored import StoredIntegers
from maskdial_export.quantize.table import tied_head
from maskdial_export.session import Loaded
from maskdial_export.tracing.eagle import eagle_head
from maskdial_export.tracing.graph import data_file, optimize, save
from maskdial_export.tracing.heads import labels_of
from maskdial_export.tracing.mtp import mtp_head
from maskdial_export.tracing.positions import max_length
from maskdial_export.tracing.rewrite import PRODUCTS, packs_of

Packs = Sequence[tuple[str, ...]]

# What the server's kernels compute, with which alone it drafts by hidden states
_OF_KERNELS = frozenset({"int8", "int4"})
_TOOLS = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to write a bundle.

    ``tolerance`` is the largest difference allowed between the logits of torch and ONNX Runtime in
    fp32; ``strict`` refuses checkpoints with missing or unused weights; ``limit`` is how many
    tokens a text may have, None for as many as the model reads; ``brings_drafts``: whether a layer
    for multi-token prediction is exported with its model; ``draft`` is an EAGLE-3 head that is;
    ``allow_pickle``: whether that may be a pickle; ``made`` has the int4 matrices that the graphs
    of one model share.
    """

    precision: Precision
    gate: Gate
    sample: Sample
    calibration: Sample
    tolerance: float
    console: Console
    strict: bool = True
    limit: int | None = None
    brings_drafts: bool = True
    draft: str | None = None
    allow_pickle: bool = False
    made: dict[str, Blocks] = field(default_factory=dict)

    def keeping(self, names: Collection[str], int8: Collection[str]) -> "Settings":
        """Settings that keep these layers, and more only if the gate may choose them itself."""
        more = None if self.gate.keep_worst is None else 0
        gate = replace(self.gate, keep=tuple(names), int8=tuple(int8), keep_worst=more)
        return replace(self, gate=gate)


@dataclass(frozen=True, slots=True)
class Written:
    """A written bundle's manifest, and the groups of modules its graph multiplies at once."""

    manifest: Manifest
    packs: Packs

    @property
    def kept(self) -> tuple[str, ...]:
        """The layers that are not quantized."""
        return () if self.manifest.quality is None else self.manifest.quality.kept

    @property
    def raised(self) -> tuple[str, ...]:
        """The layers that are int8 with int4."""
        return () if self.manifest.quality is None else self.manifest.quality.raised


@dataclass(frozen=True, slots=True)
class _Checked:
    """The results of checking the bundle's graph."""

    parity: ParityReport
    batch_invariant: bool
    golden: GoldenCheck
    quality: QualityReport | None = None


def write_bundle(source: Source, folder: Path, settings: Settings, packs: Packs = ()) -> Written:
    """Writes a bundle into an empty folder.

    ``packs`` are groups of modules to multiply as one product each, to match another graph of the
    same model.

    Raises:
        ExportError: the checkpoint cannot be exported.
        OSError: a file cannot be written.
    """
    console, precision = settings.console, settings.precision
    if source.family == "encoder-decoder" and precision in HALF:
        raise ExportError(
            f"{source.architecture} has an encoder and a decoder, and {precision} is for GPUs, on "
            "which such models do not run; choose fp32, int8 or int4"
        )
    if source.table is not None and precision not in ("fp32", "int8"):
        raise ExportError(
            f"{source.name} is a table of vectors, which {precision} makes no faster; export it in "
            "fp32, or in int8, which takes a quarter of the memory"
        )
    if source.task == "block-diffusion" and precision != "fp32":
        raise ExportError(
            f"{source.architecture} writes canvases in many passes, and nothing measures what "
            f"{precision} would lose in them; export it in fp32"
        )
    if settings.draft is not None:
        _check_draft(source, settings)
    with phase(console, "Loading"):
        checkpoint = load_checkpoint(
            source,
            sample=settings.sample,
            strict=settings.strict,
            limit=settings.limit,
            console=console,
            folder=folder,
        )
        checkpoint = _with_draft_head(source, replace(checkpoint, packs=packs), settings)
        texts = read_files(source, checkpoint.tokenizer)
        decision, decision_template = read_decision(source)
        if decision_template is not None:
            texts[DECISION_TEMPLATE] = decision_template
        templates = (
            []
            if CHAT_TEMPLATE in texts
            else [Path(name).stem for name in texts if ADDITIONAL_TEMPLATES in name]
        )
        if templates:
            finding(
                console, f"no chat template is the default; {', '.join(templates)} have to be named"
            )
        # Finds what is wrong with the gate, before anything takes long
        quantizer = _quantizer(source, checkpoint, settings)
    golden = Golden(checkpoint)
    graphs = _write_graphs(checkpoint, folder, settings)
    with onnxruntime_errors():
        # As it is served, or a reference that need not be fast but must not take much memory
        fp32, whole = Loaded(folder / GRAPH, prepack=quantizer is None), None
        try:
            checked = _check(checkpoint, fp32, golden, settings)
        except ExportError:
            whole = checkpoint.whole()
            if whole is None:
                raise
        if whole is not None:
            finding(console, "differs from torch: each layer is traced, in case they are not alike")
            fp32.free()  # the file that it reads is replaced
            checkpoint, quantizer = whole, _quantizer(source, whole, settings)
            graphs = _write_graphs(checkpoint, folder, settings)
            checked = _check(checkpoint, fp32, golden, settings)
        if quantizer is not None:
            quality, quantized = quantizer.replace(graphs, folder / GRAPH, fp32)
            checked = _check_quantized(checkpoint, quantized, golden, checked, quality, settings)
    if settings.draft is not None:
        _check_draft_head(folder, settings)
    names = [*graphs.files, *write_files(texts, folder)]
    names += _write_draft_tokens(checkpoint, folder)
    by_row = precision == "int8" and checked.quality is not None and checked.quality.by_row
    # Products in blocks do not saturate
    if by_row and quantizer is not None and not quantizer.reduce_range:
        onnx.save(kernel_check(), folder / KERNEL_CHECK)
        names.append(KERNEL_CHECK)
    if graphs.others:
        with phase(console, "Sharing the weights"):
            share_weights(folder, (GRAPH, *graphs.others))
        for name in graphs.others:
            names.remove(data_file(name))
    names += _write_label_encoder(source, folder, settings)
    names += _write_field_head(checkpoint, folder, settings)
    kv = checkpoint.kv
    if kv is not None and precision in HALF:
        kv = kv.model_copy(update={"dtype": "float16"})
    config = checkpoint.model.config
    with phase(console, "Writing the manifest"):
        manifest = Manifest(
            family=_family(source, checkpoint),
            task=source.task,
            architecture=source.architecture,
            precision=precision,
            batch_invariant=checked.batch_invariant,
            vocab_size=config.vocab_size,
            num_parameters=sum(each.numel() for each in checkpoint.model.parameters()),
            max_length=checkpoint.max_length,
            special_tokens=checkpoint.tokens,
            tokenization=checkpoint.tokenization,
            **_classification(source, config),
            reads_left=_reads_left(source, checkpoint),
            embedding=checkpoint.pooler and checkpoint.pooler.embedding,
            kv=kv,
            draft_head=_describe_draft_head(checkpoint),
            text_to_text=checkpoint.text_to_text,
            pair_template=checkpoint.pair_template,
            decision=decision,
            entities=checkpoint.entities,
            extraction=checkpoint.extraction,
            denoising=checkpoint.denoising,
            infill=infill_tokens(source, checkpoint),
            response_template=response_template(source),
            left_out=tuple(checkpoint.left_out),
            media_tokens=tuple(checkpoint.media_tokens),
            source=source.provenance,
            source_sha256=source.sha256(),
            tool_versions=_tool_versions(),
            parity=checked.parity,
            quality=checked.quality,
            golden=checked.golden,
            files=hash_files(folder, names),
        )
        write_manifest(folder, manifest)
    return Written(manifest, packs_of(graphs.graph.graph))


def _check_draft(source: Source, settings: Settings) -> None:
    """Refuses an EAGLE-3 head for a bundle that no server drafts for.

    Raises:
        ExportError: the bundle does not generate, or is of another precision.
    """
    if source.task != "generate" or source.family != "causal" or source.both_ways:
        raise ExportError(
            f"--draft is for causal models that generate, and {source.name} is exported for "
            f"{source.task}"
        )
    if settings.precision not in _OF_KERNELS:
        raise ExportError(
            "drafts change no bit with the server's kernels only, which compute int8 and int4 and "
            f"not {settings.precision}; add --precision int8 or int4"
        )


def _with_draft_head(source: Source, checkpoint: Checkpoint, settings: Settings) -> Checkpoint:
    """A checkpoint with what is exported to draft for it: the head that was asked for, or its own
    layer for multi-token prediction.
    """
    if settings.draft is not None:
        main = checkpoint.model
        eagle = load_eagle(
            settings.draft, main, max_length(main), allow_pickle=settings.allow_pickle
        )
        finding(settings.console, f"the EAGLE-3 head {settings.draft} is exported as well")
        return checkpoint.with_draft_head(eagle_head(main, eagle))
    if source.task != "generate" or source.both_ways or not settings.brings_drafts:
        return checkpoint
    if settings.precision not in _OF_KERNELS:
        return checkpoint
    found = load_mtp(source, checkpoint.model)
    if found is None:
        return checkpoint
    finding(settings.console, "the layer for multi-token prediction is exported as well")
    return checkpoint.with_draft_head(mtp_head(checkpoint.model, found))


def _check_draft_head(folder: Path, settings: Settings) -> None:
    """Refuses a head that was asked for, if the server would not draft by it.

    Raises:
        ExportError: some products of the model, or of the head, stayed in fp32.
    """
    for name, what in ((GRAPH, "the model"), (DRAFT_GRAPH, "the head")):
        if any(node.op_type in PRODUCTS for node in ir.load(folder / name).graph):
            raise ExportError(
                f"the server would not draft by {settings.draft}: some products of {what} stay in "
                "fp32, which its kernels do not compute, so drafts would change bits; export "
                "without --draft, or without --keep and --keep-worst"
            )


def _write_draft_tokens(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Writes which tokens a head predicts, if those are not all; returns the file's name."""
    head = checkpoint.draft_head
    if head is None or head.token_ids is None:
        return []
    np.save(folder / DRAFT_TOKENS, head.token_ids)
    return [DRAFT_TOKENS]


def _describe_draft_head(checkpoint: Checkpoint) -> DraftHead | None:
    head = checkpoint.draft_head
    if head is None:
        return None
    return DraftHead(
        kind=head.kind,
        hidden_size=head.hidden_size,
        vocab_size=head.num_columns,
        kv=head.kv,
        source=head.source,
    )


def _write_label_encoder(source: Source, folder: Path, settings: Settings) -> list[str]:
    """Writes the bundle of a GLiNER model's second encoder; returns the names of its files."""
    encoder = label_source(source)
    if encoder is None:
        return []
    finding(settings.console, "the encoder of labels:")
    inside = folder / LABEL_ENCODER
    inside.mkdir()
    manifest = write_bundle(encoder, inside, settings).manifest
    return [f"{LABEL_ENCODER}/{name}" for name in (MANIFEST, *manifest.files)]


def _write_field_head(checkpoint: Checkpoint, folder: Path, settings: Settings) -> list[str]:
    """Writes what reads a GLiNER2 model's fields, in fp32; returns its files' names."""
    graph = checkpoint.trace_field_head()
    if graph is None or checkpoint.extraction is None:
        return []
    path = folder / checkpoint.extraction.graph
    files = save(optimize(graph), path)
    with onnxruntime_errors():
        checkpoint.check_field_head(path, settings.tolerance)
    return files


def _family(source: Source, checkpoint: Checkpoint) -> Family:
    """A model's, which for one that decides depends on what the head stands on."""
    return "causal" if source.task == "decide" and checkpoint.kv is not None else source.family


def _reads_left(source: Source, checkpoint: Checkpoint) -> bool:
    """Whether the tokens of a masked graph attend to earlier ones only."""
    is_masked = _family(source, checkpoint) == "masked"
    return is_masked and checkpoint.survey.causal and not source.both_ways


def infill_tokens(source: Source, checkpoint: Checkpoint) -> InfillTokens | None:
    """The fill-in-the-middle tokens of a model that writes, if its tokenizer has any."""
    if source.family != "causal":
        return None
    return find_infill_tokens(checkpoint.tokenizer.token_to_id)


def _quantizer(source: Source, checkpoint: Checkpoint, settings: Settings) -> Quantizer | None:
    if settings.precision == "fp32":
        return None
    return Quantizer(
        checkpoint,
        settings.precision,
        settings.gate,
        settings.sample,
        settings.calibration,
        settings.console,
        settings.made,
        StoredIntegers(stored_matrices(source), settings.precision, tied_head(checkpoint.model)),
    )


def _write_graphs(checkpoint: Checkpoint, folder: Path, settings: Settings) -> Graphs:
    """Writes the fp32 graph and those beside it; returns them with their modules' names."""
    console = settings.console
    with phase(console, "Tracing"):
        graph = checkpoint.trace()
        traced = {
            ENCODER_GRAPH: checkpoint.trace_encoder(),
            DRAFT_GRAPH: checkpoint.trace_draft_head(),
        }
    with phase(console, "Optimizing"):
        graph = optimize(graph, checkpoint.packs)
        others = {name: optimize(other) for name, other in traced.items() if other is not None}
        # Saving removes the names
        named = Graphs(graph.clone(), {name: other.clone() for name, other in others.items()})
    with phase(console, "Writing"):
        save(graph, folder / GRAPH)
        for name, other in others.items():
            save(other, folder / name)
    return named


def _check(checkpoint: Checkpoint, graph: Loaded, golden: Golden, settings: Settings) -> _Checked:
    """Compares the fp32 graphs with torch."""
    with phase(settings.console, "Checking parity"), onnxruntime_errors():
        measured = checkpoint.parity(graph).measure(settings.tolerance)
        if checkpoint.draft_head is not None and checkpoint.kv is not None:
            own = graph.path.parent / DRAFT_GRAPH
            checkpoint.draft_head.check(graph, checkpoint.kv, own, settings.tolerance)
        allowed = SLACK * measured.report.tolerance
        check = golden.check(golden.expected, allowed)
    report = measured.report.model_copy(update={"doubt": checkpoint.doubt})
    return _Checked(report, measured.batch_invariant, check)


def _check_quantized(
    checkpoint: Checkpoint,
    graph: Loaded,
    golden: Golden,
    fp32: _Checked,
    quality: QualityReport,
    settings: Settings,
) -> _Checked:
    """Tests the graph, as it is served, for batch invariance, and sets its golden check."""
    with phase(settings.console, "Checking invariance"):
        batch_invariant = checkpoint.parity(graph).batch_invariant()
        before, served = golden.expected, golden.computed(graph)
        allowed, centered = fp32.golden.tolerance, checkpoint.predicts_tokens
        if settings.precision in HALF:
            halves = [golden.halved()] + [served] * (settings.precision == "fp16")
            check = golden.check(served, half_tolerance(before, halves, allowed))
        elif graph.kernels is None:
            tolerance = quantized_tolerance(before, [served], allowed, centered=centered)
            check = golden.check(served, tolerance, centered=centered)
        else:
            plain = golden.computed(graph.path)
            tolerance = quantized_tolerance(before, [plain, served], allowed, centered=centered)
            check = golden.check(plain, tolerance, served, centered=centered)
    return _Checked(fp32.parity, batch_invariant, check, quality)


def _classification(source: Source, config: Any) -> dict[str, Any]:
    if source.task not in ("classify", "token-classify"):
        return {}
    return {
        "labels": labels_of(source.architecture, config),
        "problem_type": config.problem_type if source.task == "classify" else None,
    }


def _tool_versions() -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in _TOOLS}
    return {"maskdial": maskdial.__version__, **versions}
