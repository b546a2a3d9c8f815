"""What ``maskdial inspect`` shows of a bundle: what it is, what it can do, how good it is."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maskdial.ask import catalogue
from maskdial.bundle.bundle import Bundle
from maskdial.bundle.card import Measured
from maskdial.bundle.manifest import (
    CacheInteger,
    Calibration,
    Denoising,
    Embedding,
    InfillTokens,
    KVLayout,
    Manifest,
    ParityReport,
    QualityReport,
    loss_in_words,
    with_unit,
)
from maskdial.kernels.installed import find_kernels

_MAX_LABELS = 20


def describe(bundle: Bundle, replies: Mapping[str, Any]) -> dict[str, str]:
    """A sentence for each thing to know, by its name; what does not apply is left out.

    Args:
        bundle: of one graph.
        replies: how a causal model writes tool calls and reasoning, as the server derives it.
    """
    manifest, folder = bundle.manifest, bundle.path
    tasks = [task.name for task in catalogue.LISTED if task.serves(manifest)]
    size = sum((folder / name).stat().st_size for name in manifest.files)
    lines = {
        "model": f"{manifest.architecture}, {_kind(manifest)} ({manifest.graph})",
        "can do": ", ".join(tasks),
        "reads": f"up to {manifest.max_length:,} tokens; the vocabulary has "
        f"{manifest.vocab_size:,}",
        **_of_task(manifest, _served_cache(manifest, folder)),
        "tool calls": _json(replies.get("tool_format")),
        "reasoning": _json(replies.get("thinking_marks")),
        "left out": ", ".join(manifest.left_out),
        "size": f"{size / 1e6:.1f} MB in {len(manifest.files)} files, hashes verified"
        + _density(manifest, folder),
        "precision": manifest.precision + _invariance(manifest.batch_invariant),
        "quality": "" if manifest.quality is None else _quality(manifest.quality),
        "parity": _parity(manifest.parity),
        "measured": "; ".join(map(_measured, bundle.card.measured)),
        "source": f"{manifest.source}, {manifest.source_sha256[:16]}",
        "identity": bundle.sha256,
        "made by": ", ".join(f"{name} {number}" for name, number in manifest.tool_versions.items()),
    }
    return {name: text for name, text in lines.items() if text}


def _measured(found: Measured) -> str:
    """What a task has shown, in a phrase."""
    apart = {each.metric: each for each in found.differences}
    scores = []
    for each in found.figures:
        score = f"{each.metric} {each.value:.4f}"
        if each.metric in apart:
            score += f" ({apart[each.metric].value:+.4f} to {found.reference_name})"
        scores.append(score)
    return f"{found.task}, {found.questions:,} questions, {found.date}: {', '.join(scores)}"


def _kind(manifest: Manifest) -> str:
    if manifest.family == "encoder-decoder":
        return "reads a text and writes another"
    if manifest.task == "generate":
        return "reads from left to right and writes"
    if manifest.denoising is not None:
        return "writes whole canvases of tokens, in several passes each"
    goes_right = manifest.reads_left or manifest.family == "causal"
    return f"reads a text {'from left to right' if goes_right else 'in both directions'}"


def _of_task(manifest: Manifest, served: CacheInteger | None) -> dict[str, str]:
    kv, source = manifest.kv, manifest.text_to_text
    return {
        "canvas": "" if manifest.denoising is None else _canvas(manifest.denoising),
        "infills": "" if manifest.infill is None else _infill(manifest.infill),
        "source text": "" if source is None else f"up to {source.max_source_length:,} tokens",
        "languages": "" if source is None else ", ".join(source.languages),
        "vectors": "" if manifest.embedding is None else _vectors(manifest.embedding),
        "labels": _labels(manifest.labels),
        "calibrated": _calibration(manifest.calibration),
        "cache": "" if kv is None else _cache(kv, served),
    }


def _served_cache(manifest: Manifest, folder: Path) -> CacheInteger | None:
    """The integers of the KV cache with which a server on this machine's CPU would begin."""
    if manifest.kv is None or find_kernels("auto") is None:
        return None
    from maskdial.kernels.rewrite import rewrite  # needs onnx, which is optional

    return rewrite(folder / manifest.graph, "auto").kv_cache


def _cache(kv: KVLayout, served: CacheInteger | None) -> str:
    def size(layout: KVLayout, dtype: str) -> str:
        return f"{layout.bytes_per_token / 1024:.1f} KiB a token in {dtype}"

    if served is None:
        return size(kv, kv.dtype)
    return f"{size(kv.stored_as(served), served)} (without the kernels {size(kv, kv.dtype)})"


def _canvas(how: Denoising) -> str:
    return f"{how.canvas_length} tokens, up to {how.steps} passes"


def _infill(tokens: InfillTokens) -> str:
    parts = [f"{tokens.prefix} text", f"{tokens.suffix} text"]
    if tokens.suffix_first:
        parts.reverse()
    return " ".join(filter(None, (*parts, tokens.middle)))


def _calibration(calibration: Calibration | None) -> str:
    if calibration is None:
        return ""
    thresholds = ", ".join(f"{name} {each:.4g}" for name, each in calibration.thresholds.items())
    scale = f"temperature {calibration.temperature:.4g}"
    if calibration.isotonic:
        points = sum(map(len, calibration.isotonic.values()))
        scale = f"isotonic tables of {points} points"
    return f"on {calibration.texts:,} texts: {scale}; thresholds {thresholds}"


def _density(manifest: Manifest, folder: Path) -> str:
    """Bits per parameter of the graphs, as llama.cpp's tools count them."""
    if manifest.num_parameters is None:
        return ""
    names = (name for name in manifest.files if name.endswith((".onnx", ".data")))
    size = sum((folder / name).stat().st_size for name in names)
    bits = 8 * size / manifest.num_parameters
    return f"; {manifest.num_parameters / 1e6:,.1f} million parameters in {bits:.2f} bits each"


def _vectors(embedding: Embedding) -> str:
    parts = [f"{embedding.dimension:,} dimensions", f"pooling {embedding.pooling}"]
    if embedding.normalized:
        parts.append("of length 1")
    if embedding.prompts:
        parts.append(f"prompts {', '.join(map(repr, embedding.prompts))}")
    if embedding.tasks:
        parts.append(f"tasks {', '.join(embedding.tasks)}")
    return ", ".join(parts)


def _labels(labels: Sequence[str]) -> str:
    shown = ", ".join(labels[:_MAX_LABELS])
    more = len(labels) - _MAX_LABELS
    return f"{shown} and {more:,} more" if more > 0 else shown


def _invariance(batch_invariant: bool) -> str:
    if batch_invariant:
        return "; an answer is the same in any batch, to the last bit"
    return "; last bits depend on the batch"


def _quality(quality: QualityReport) -> str:
    figures = _figures(quality.figures)
    limit = "any was accepted"
    if quality.max_loss is not None:
        limit = f"at most {with_unit(quality.max_loss, quality.figures)}"
    kept = f"; layers not quantized: {len(quality.kept)}" if quality.kept else ""
    raised = f"; layers in int8: {len(quality.raised)}" if quality.raised else ""
    exact, portable = "", ""
    if quality.portable is not None:
        portable = f"; without the kernels: {_figures(quality.portable)}"
    if quality.weights_only is not None:
        exact = f"; with activations in fp32: {_figures(quality.weights_only)}"
    loss = loss_in_words(quality.loss, quality.figures, "fp32")
    return f"{loss} ({limit}): {figures}{kept}{raised}{portable}{exact}"


def _figures(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())


_REFERENCES = {"torch": "torch", "numpy": "NumPy", "onnxruntime": "the graph by itself"}


def _parity(parity: ParityReport) -> str:
    differences = {
        "a ragged batch": parity.ragged_batch,
        "a prompt in chunks": parity.chunked_prompt,
        "decode steps": parity.decode_steps,
        "a long text": parity.long_text,
    }
    measured = ", ".join(
        f"{value:.1e} for {what}" for what, value in differences.items() if value is not None
    )
    doubt = f"; {parity.doubt}" if parity.doubt else ""
    reference = _REFERENCES[parity.reference]
    what = "" if parity.reference == "onnxruntime" else "fp32 "
    return f"{what}against {reference} {measured} (at most {parity.tolerance:.1e}){doubt}"


def _json(value: object) -> str:
    return "" if value is None else json.dumps(value, ensure_ascii=False)
