"""Writes a bundle straight from a checkpoint's file: no torch, no trace, no float32 copy."""

import importlib.metadata
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import onnx
import pydantic
from rich.console import Console

import maskdial
from maskdial.bundle.bundle import file_sha256, hash_files, write_manifest
from maskdial.bundle.infill import find_infill_tokens
from maskdial.bundle.manifest import GRAPH, Manifest
from maskdial_export.checkpoint.files import (
    read_files,
    response_template,
    special_tokens,
    write_files,
)
from maskdial_export.checkpoint.sample import read_sample
from maskdial_export.checks.next_tokens import NextTokens
from maskdial_export.destination import new_folder
from maskdial_export.direct.check import check_graph
from maskdial_export.direct.checkpoint import DirectCheckpoint, open_checkpoint
from maskdial_export.direct.data import DataFile
from maskdial_export.direct.decoder import Decoder, NotDirectError
from maskdial_export.direct.encoder_export import write_encoder
from maskdial_export.direct.families import read_decoder, token_ids
from maskdial_export.direct.graph import GraphWriter
from maskdial_export.direct.layer_norm_reference import make_reference
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.products import BlockProducts, FloatProducts, Modules
from maskdial_export.direct.quality import QualityGate, limit_of
from maskdial_export.direct.room import check_disk, check_memory, num_bytes
from maskdial_export.direct.tokenizer import load_tokenizer
from maskdial_export.direct.weights import RoundedWeights, Weights, check_weights
from maskdial_export.errors import ExportError, first_line, io_reason, onnxruntime_errors
from maskdial_export.golden_check import TEXT
from maskdial_export.phase import BYTES, finding, phase
from maskdial_export.quantize.gate import Gate, check_choice
from maskdial_export.session import Loaded, kernels_here

DirectPrecision = Literal["fp32", "int8", "int4"]
_DATA = f"{GRAPH}.data"
_TOOLS = ("gguf", "numpy", "onnx", "onnxruntime", "tokenizers")


def export_direct(
    source: str,
    dest: Path,
    *,
    task: str = "auto",
    precision: str | None = None,
    revision: str | None = None,
    max_length: int | None = None,
    tolerance: float,
    gate: Gate | None = None,
    complete: bool = False,
    console: Console,
) -> Manifest:
    """Exports a causal model, or one that reads in one pass, to the new or empty folder ``dest``.

    Args:
        source: a GGUF file, a folder of safetensors, or a Hub id.
        dest: the bundle's folder.
        task: what the model is for, if that is asked for; another one is not known here.
        precision: fp32, int8, or int4 for a file that has integers of 4 bits; None for that of the
            file's integers, or int8.
        revision: of the Hub id.
        max_length: tokens of a text; None for as many as the model has positions for, at most
            131,072.
        tolerance: the largest difference allowed between the logits of the graph in float32 and
            those of the reference; it scales with logits beyond 10.
        gate: how much floats that are rounded to int8 may lose, and on which text that is
            measured; its other options are the tracer's.
        complete: whether to refuse what only the tracer exports beside the model itself: layers
            that predict further tokens.
        console: where to show progress.

    Returns:
        Its manifest.

    Raises:
        NotDirectError: the checkpoint says what is not known here; the tracer may know it.
        QualityError: int8 loses more than the gate allows.
        ExportError: the checkpoint cannot be exported.
    """
    with (
        new_folder(dest) as folder,
        tempfile.TemporaryDirectory(prefix=".gguf.", dir=folder) as restored,
    ):
        try:
            checkpoint = open_checkpoint(source, revision, Path(restored), task)
            gate = gate or Gate()
            return _write(
                checkpoint,
                folder,
                precision,
                gate,
                max_length,
                tolerance,
                console,
                complete=complete,
            )
        except pydantic.ValidationError as error:
            raise ExportError(f"{source} cannot be described: {first_line(error)}") from error
        except OSError as error:
            raise ExportError(f"cannot export {source} to {dest}: {io_reason(error)}") from error


def _write(
    checkpoint: DirectCheckpoint,
    folder: Path,
    precision: str | None,
    gate: Gate,
    limit: int | None,
    tolerance: float,
    console: Console,
    *,
    complete: bool,
) -> Manifest:
    """Writes the bundle of a checkpoint of either kind."""
    if checkpoint.family == "masked":
        described = write_encoder(checkpoint, folder, precision, gate, limit, tolerance, console)
    else:
        decoder = read_decoder(checkpoint.name, checkpoint.config, limit)
        checkpoint = checkpoint.arranged(decoder)
        # A trace makes no draft of layers in fp8 either
        complete = complete and not checkpoint.is_in_fp8
        if check_weights(decoder, checkpoint.weights, complete=complete):
            finding(console, "layers that predict further tokens are left out; --trace has them")
        chosen = _precision(checkpoint, precision, gate)
        described = _write_decoder(checkpoint, decoder, folder, chosen, gate, tolerance, console)
    return write_described(described, checkpoint, folder)


def write_described(
    described: dict[str, Any], checkpoint: DirectCheckpoint, folder: Path
) -> Manifest:
    """Writes the manifest of a bundle, and returns it.

    Args:
        described: what it says, but for where all of it comes from.
        checkpoint: what the bundle was made of.
        folder: the bundle's.
    """
    versions = {name: importlib.metadata.version(name) for name in _TOOLS}
    if "source_sha256" not in described:
        described["source_sha256"] = checkpoint.sha256()
    manifest = Manifest(
        **described,
        source=checkpoint.provenance,
        tool_versions={"maskdial": maskdial.__version__, **versions},
    )
    write_manifest(folder, manifest)
    return manifest


def _write_decoder(
    checkpoint: DirectCheckpoint,
    decoder: Decoder,
    folder: Path,
    precision: DirectPrecision,
    gate: Gate,
    tolerance: float,
    console: Console,
) -> dict[str, Any]:
    """Writes everything but the manifest; returns what that says of it."""
    needed = _size(decoder, checkpoint.weights, precision)
    as_int8 = _size(decoder, checkpoint.weights, "int8") if precision == "fp32" else None
    check_memory(checkpoint.name, needed, as_int8=as_int8)
    check_disk(needed, folder)
    sample = read_sample(gate.text)
    tokenizer, tokenization = load_tokenizer(checkpoint, decoder.vocab_size, sample)
    config = SimpleNamespace(**token_ids(checkpoint.config))
    tokens = special_tokens(checkpoint, config, tokenizer)
    texts = read_files(checkpoint, tokenizer)
    layout = decoder.layout
    with phase(console, "Writing") as show:
        model, rounded = _write_graph(
            *(checkpoint, decoder, folder, precision, console),
            lambda done: show(done, max(done, needed), BYTES),
        )
    ids = tokenizer.encode(TEXT).ids[: decoder.max_length] or [0]
    further = tokenizer.encode(sample.text[:1000], add_special_tokens=False).ids
    original = reference = make_reference(checkpoint.config, rounded or checkpoint.weights)
    is_gated = rounded is not None and rounded.rounds_products
    if is_gated:
        original = make_reference(checkpoint.config, checkpoint.weights)
    with phase(console, "Checking"), onnxruntime_errors(), ThreadPoolExecutor(2) as pool:
        # Seconds for each gigabyte
        source_sha256 = pool.submit(checkpoint.sha256)
        data_sha256 = pool.submit(file_sha256, folder / _DATA)
        served = Loaded(folder / GRAPH, kernels=kernels_here())
        checked = check_graph(
            model,
            folder,
            served,
            layout,
            reference,
            original,
            [*ids, *further][: decoder.max_length],
            len(ids),
            tolerance * decoder.rounding,
            is_gated=is_gated,
        )
        quality = None
        if is_gated:
            evaluation = NextTokens(
                tokenizer, sample, decoder.max_length, decoder.vocab_size, layout
            )
            most = limit_of(gate, keeps_integers=bool(checkpoint.bits))
            measure = QualityGate(evaluation, original, sample, decoder.num_parameters, most)
            quality = measure.check(served, precision, decoder.vocab_size, console)
        served.free()
    if quality is None and checked.divergence is not None:
        finding(
            console,
            f"{precision} diverges by {checked.divergence:.2g} nats from float32 on the check's "
            "text; --trace measures it on several thousand tokens",
        )
    part = checkpoint.part
    if part is not None:
        towers = ", ".join(path.rpartition(".")[2] for path in part.left_out)
        finding(console, f"the text part alone; left out: {towers}")
    names = [GRAPH, *write_files(texts, folder)]
    return {
        "family": "causal",
        "task": "generate",
        "architecture": decoder.architecture if part is None else part.architecture,
        "left_out": () if part is None else part.left_out,
        "media_tokens": () if part is None else part.media_tokens,
        "precision": precision,
        "batch_invariant": checked.batch_invariant,
        "vocab_size": decoder.vocab_size,
        "num_parameters": decoder.num_parameters,
        "max_length": decoder.max_length,
        "special_tokens": tokens,
        "tokenization": tokenization,
        "kv": layout,
        "infill": find_infill_tokens(tokenizer.token_to_id),
        "response_template": response_template(checkpoint),
        "parity": checked.parity,
        "quality": quality,
        "golden": checked.golden,
        "source_sha256": source_sha256.result(),
        "files": dict(sorted({_DATA: data_sha256.result(), **hash_files(folder, names)}.items())),
    }


def _precision(checkpoint: DirectCheckpoint, asked: str | None, gate: Gate) -> DirectPrecision:
    """The precision that was asked for, or that of the file's integers, or int8.

    Raises:
        NotDirectError: it rounds otherwise, or the gate has options for integers that are kept.
        ExportError: the options of the gate do not apply to it.
    """
    of_file: DirectPrecision = "int4" if 4 in checkpoint.bits else "int8"
    chosen = of_file if asked is None else asked
    check_choice(chosen, gate)
    if checkpoint.bits and gate != Gate():
        raise NotDirectError("the direct path measures what rounding of floats loses alone")
    if chosen == "fp32":
        return "fp32"
    if chosen == "int8":
        return "int8"
    if chosen == of_file == "int4":
        return "int4"
    raise NotDirectError(
        f"the direct path does not round to {chosen}: it keeps integers of a GGUF file, and rounds "
        "to int8"
    )


def _size(decoder: Decoder, weights: Weights, precision: DirectPrecision) -> int:
    """About how many bytes the bundle's weights take, on disk and in memory."""
    shapes = decoder.shapes()
    fours = {name for name in shapes if precision == "int4" and weights.bits(name) == 4}
    return num_bytes(shapes, rounds=precision != "fp32", fours=fours)


def _write_graph(
    checkpoint: DirectCheckpoint,
    decoder: Decoder,
    folder: Path,
    precision: DirectPrecision,
    console: Console,
    written: Callable[[int], None],
) -> tuple[onnx.ModelProto, RoundedWeights | None]:
    """Writes the graph; returns it, and its weights if they are not the checkpoint's."""
    weights, nodes, rounded = checkpoint.weights, Nodes(), None
    modules = Modules(decoder.names.table, tied=decoder.tied, parts=decoder.parts())
    with DataFile(folder / _DATA, written) as data:
        if precision == "fp32":
            floats = FloatProducts(modules, weights, nodes, data)
            model = GraphWriter(decoder, weights, floats, nodes, data).write()
        else:
            blocks = BlockProducts(modules, weights, nodes, data, 4 if precision == "int4" else 8)
            model = GraphWriter(decoder, weights, blocks, nodes, data).write()
            if checkpoint.bits:
                finding(
                    console,
                    f"{blocks.num_kept} of {blocks.num_products} layers keep the integers of the "
                    "file; others are int8",
                )
            if blocks.rounded or blocks.by_row:
                rounded = RoundedWeights(weights, blocks.rounded, blocks.by_row)
    (folder / GRAPH).write_bytes(model.SerializeToString())
    return model, rounded
