"""Writes the bundle of an encoder, or of a decoder that embeds or classifies, straight from a
checkpoint's folder, without torch.

int8 goes through the quality gate: what it loses is measured on the sample that the tracer measures
on, as no part of that needs torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import onnx
from rich.console import Console

from maskdial.bundle.bundle import hash_files
from maskdial.bundle.manifest import GRAPH, KERNEL_CHECK, loss_in_words, with_unit
from maskdial_export.checkpoint.config import check_config
from maskdial_export.checkpoint.files import read_files, special_tokens, write_files
from maskdial_export.checkpoint.module_settings import check_modules, is_cross_encoder
from maskdial_export.checkpoint.sample import read_sample
from maskdial_export.checkpoint.sentence import longest_text, lower_case, tokenizer_settings
from maskdial_export.checks.kernels import exact_here, kernel_check
from maskdial_export.direct.backbone_graph import BackboneWriter
from maskdial_export.direct.backbones import Backbone, knows, read_backbone, tokenizer_family
from maskdial_export.direct.checkpoint import DirectCheckpoint
from maskdial_export.direct.data import DataFile
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.direct.disentangled_graph import DisentangledWriter
from maskdial_export.direct.encoder import Encoder, OnePass
from maskdial_export.direct.encoder_check import EncoderCheck, Lowered
from maskdial_export.direct.encoder_graph import EncoderWriter
from maskdial_export.direct.encoder_head import check_no_modules, pools, read_head
from maskdial_export.direct.encoder_reference import EncoderReference
from maskdial_export.direct.encoders import Family, family_of, read_encoder
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.one_pass_graph import IDS
from maskdial_export.direct.products import (
    BlockProducts,
    FloatProducts,
    Modules,
    Products,
    RowProducts,
)
from maskdial_export.direct.quality import limit_of
from maskdial_export.direct.reranker import find_padding, read_prompt, with_score
from maskdial_export.direct.room import check_disk, check_memory, num_bytes
from maskdial_export.direct.tokenizer import load_tokenizer, sends_types
from maskdial_export.direct.views import View, find_by_heads, find_stacked
from maskdial_export.direct.weights import (
    GGUFWeights,
    JoinedWeights,
    SafetensorsWeights,
    Weights,
    check_one_pass_weights,
)
from maskdial_export.errors import ExportError, QualityError, onnxruntime_errors
from maskdial_export.phase import finding, phase
from maskdial_export.quantize.gate import Gate, check_choice

_LARGEST, _REDUCED = 127, 63
_SESSIONS = 2.5
"""Bytes of memory for each of int8's in the bundle, of a random Qwen3-Embedding-0.6B: 2.4."""
_Form = Callable[[Weights, Nodes, DataFile], Products]


def write_encoder(
    checkpoint: DirectCheckpoint,
    folder: Path,
    precision: str | None,
    gate: Gate,
    limit: int | None,
    tolerance: float,
    console: Console,
) -> dict[str, Any]:
    """Writes everything but the manifest into a folder; returns what that says of it.

    Without a precision, the bundle has that of the file's integers, or is int8.

    Raises:
        NotDirectError: the checkpoint says what is not known here.
        QualityError: int8 loses more than the gate allows.
        ExportError: it cannot be exported.
    """
    of_file = "int4" if 4 in checkpoint.bits else "int8"
    precision = precision or of_file
    check_choice(precision, gate)
    if precision not in ("fp32", "int8", of_file):
        raise NotDirectError(f"the direct path does not round encoders to {precision}")
    check_config(checkpoint.name, checkpoint.config)
    config, pooled = checkpoint.config, pools(checkpoint)
    sends: bool | None = False
    encoder: OnePass
    if checkpoint.task == "rerank" or knows(config, pools=pooled):
        encoder = read_backbone(config, limit=limit, task=checkpoint.task)
        family = tokenizer_family(config)
    else:
        family, sends = family_of(config), sends_types(checkpoint)
        encoder = read_encoder(config, sends_types=sends, limit=limit, pools=pooled)
    encoder, weights = _with_head(checkpoint, encoder, family)
    _check_room(checkpoint.name, encoder, folder, rounds=precision != "fp32")
    sample = read_sample(gate.text)
    tokenizer, tokenization = load_tokenizer(checkpoint, encoder.vocab_size, sample, family.special)
    kind = type(tokenizer.model).__name__
    if sends is None and kind != family.tokenizer and encoder.num_types > 1:
        raise NotDirectError(
            f"a tokenizer of {kind} in a {encoder.architecture}, whose own is of "
            f"{family.tokenizer}, is not known to the direct path"
        )
    others = tokenizer_settings(checkpoint).keys() - {"model_max_length"}
    if others:
        raise NotDirectError(
            f"{min(others)} among the tokenizer's arguments of sentence-transformers is not known "
            "to the direct path"
        )
    lower_case(checkpoint, tokenizer)
    ids = SimpleNamespace(**{**family.ids, **config})
    tokens = special_tokens(checkpoint, ids, tokenizer)
    template, stated = None, {}
    if checkpoint.task == "rerank":
        assert isinstance(encoder, Backbone), "a decoder ranks"
        pad = find_padding(checkpoint, tokens)
        template = read_prompt(checkpoint, tokenizer, pad)
        weights = with_score(checkpoint, encoder, tokenizer)
        encoder, stated = replace(encoder, pad=pad), {"pad_token_id": pad}
    check_one_pass_weights(encoder, weights)
    texts = read_files(checkpoint, tokenizer)
    max_length = _max_length(checkpoint, encoder, limit)
    reference = EncoderReference(checkpoint, weights, **stated)
    most = limit_of(gate, keeps_integers=bool(checkpoint.bits))
    check = EncoderCheck(encoder, reference, tokenizer, tokens, max_length, sample, most)
    path, names = folder / GRAPH, [GRAPH, f"{GRAPH}.data"]
    modules = _modules(encoder)
    with phase(console, "Writing"):
        _write_graph(encoder, weights, path, lambda *parts: FloatProducts(modules, *parts))
    with phase(console, "Checking"), onnxruntime_errors():
        parity = check.parity(path, tolerance)
    quality, graph = None, None
    if precision != "fp32":
        mixed = isinstance(encoder, Encoder) and encoder.has_experts
        blocks = mixed or bool(checkpoint.bits)
        forms = _forms(modules, blocks=blocks, bits=4 if precision == "int4" else 8)
        traceable = checkpoint.traceable and family.traceable and not mixed
        with onnxruntime_errors():
            lowered = _lower(encoder, weights, forms, path, check, console, precision, traceable)
        quality, graph = check.report(lowered), path
        if lowered.by_row and exact_here():
            onnx.save(kernel_check(), folder / KERNEL_CHECK)
            names.append(KERNEL_CHECK)
    with onnxruntime_errors():
        golden = check.golden(parity.tolerance, graph)
        invariant = check.is_invariant(path, quantized=graph is not None)
    names += write_files(texts, folder)
    shapes = encoder.shapes()
    if not encoder.base:  # the class has a pooler, whether or not the checkpoint does
        shapes |= encoder.optional
    of_model = [shape for name, shape in shapes.items() if not name.startswith("pooler.steps.")]
    head = encoder.head
    return {
        "family": "masked",
        "task": head.task,
        "architecture": encoder.architecture,
        "reads_left": encoder.reads_left,
        "precision": precision,
        "batch_invariant": invariant,
        "vocab_size": encoder.vocab_size,
        "num_parameters": sum(int(np.prod(shape)) for shape in of_model),
        "max_length": max_length,
        "special_tokens": tokens,
        "tokenization": tokenization,
        "labels": head.labels,
        "pair_template": template,
        "problem_type": head.problem_type,
        "embedding": head.embedding,
        "parity": parity,
        "quality": quality,
        "golden": golden,
        "files": hash_files(folder, names),
    }


def _check_room(name: str, encoder: OnePass, folder: Path, *, rounds: bool) -> None:
    """Refuses an encoder that has no room.

    Integers are in two sessions at a time, with the kernels and without, the latter with packed
    copies. Floats are written first, which the checks read from the mapped file.
    """
    shapes = encoder.shapes()
    floats, integers = (num_bytes(shapes, rounds=each) for each in (False, True))
    integers = int(_SESSIONS * integers)
    check_memory(name, integers if rounds else floats, as_int8=None if rounds else integers)
    check_disk(floats, folder)


def _with_head(
    checkpoint: DirectCheckpoint, encoder: OnePass, family: Family
) -> tuple[OnePass, Weights]:
    """The encoder with its head, and the weights of both."""
    weights = checkpoint.weights
    if encoder.head.task != "embed":
        check_modules(checkpoint)
        check_no_modules(checkpoint)
        return encoder, _renamed(weights, family, encoder)
    head, parts = read_head(checkpoint, encoder.hidden_size)
    joined = JoinedWeights(weights.name, {"": _renamed(weights, family, encoder), **parts})
    return replace(encoder, head=head), joined


def _stored(weights: Weights) -> SafetensorsWeights | GGUFWeights:
    assert isinstance(weights, SafetensorsWeights | GGUFWeights), "they are as files have them"
    return weights


def _renamed(weights: Weights, family: Family, encoder: OnePass) -> Weights:
    """The weights by the names that the description has for them."""
    prefix = f"{family.base}."

    def rename(name: str) -> str:
        for stored, names in family.stored.items():
            name = name.replace(stored, names[0]) if len(names) == 1 else name
        return name

    table = f"{encoder.words}.weight"
    with_head = not encoder.base and f"{prefix}{table}" in map(rename, weights.shapes())
    if not (family.stored or with_head):
        return weights
    found = _stored(weights).renamed(
        lambda name: rename(name).removeprefix(prefix if with_head else "")
    )
    shapes = found.shapes()
    views: dict[str, View] = {}
    for name, shape in shapes.items():
        for stored, names in family.stored.items():
            if stored in name and len(names) > 1:
                size = shape[0] // len(names)
                views |= {
                    name.replace(stored, part): View(name, None, slice(start, start + size))
                    for part, start in zip(names, range(0, shape[0], size), strict=True)
                }
    if isinstance(encoder, Encoder):
        for layer, experts in encoder.mixed():
            views |= find_stacked(experts, f"{layer}.{experts.module}.experts", shapes)
    elif isinstance(encoder, Backbone) and encoder.packed is not None:
        views |= find_by_heads(encoder.decoder, encoder.packed, shapes)
    return found.with_views(views)


def _max_length(checkpoint: DirectCheckpoint, encoder: OnePass, limit: int | None) -> int:
    """Tokens of a text. Raises: ExportError: there are fewer positions than the limit."""
    longest, task = encoder.max_length, encoder.head.task
    if task in ("embed", "rerank") or (task == "classify" and is_cross_encoder(checkpoint)):
        longest = longest_text(checkpoint, longest)
    if limit is not None and limit > longest:
        raise ExportError(
            f"{checkpoint.name} reads at most {longest} tokens, fewer than --max-length {limit}"
        )
    return limit or longest


def _modules(encoder: OnePass) -> Modules:
    head = encoder.vocabulary
    module, tied = (None, False) if head is None else (head.module, head.num_inputs is None)
    parts: dict[str, tuple[str, ...]] = {}
    for layer, experts in encoder.mixed() if isinstance(encoder, Encoder) else ():
        parts |= experts.parts(layer)
    return Modules(encoder.words, module, tied, IDS, parts)


def _write_graph(
    encoder: OnePass,
    weights: Weights,
    path: Path,
    make: _Form,
) -> None:
    nodes = Nodes()
    with DataFile(path.with_name(f"{path.name}.data")) as data:
        products = make(weights, nodes, data)
        parts = weights, products, nodes, data
        if isinstance(encoder, Backbone):
            model = BackboneWriter(encoder, *parts).write()
        else:
            assert isinstance(encoder, Encoder), "there are two kinds"
            writer = EncoderWriter if encoder.disentangled is None else DisentangledWriter
            model = writer(encoder, *parts).write()
    path.write_bytes(model.SerializeToString())


def _forms(modules: Modules, *, blocks: bool, bits: Literal[4, 8]) -> Mapping[bool, _Form]:
    """The forms of integers, the fastest first, by whether they have a scale for each row.

    ``blocks``: whether only those in blocks do, as those of a file, and of experts: ONNX Runtime
    cannot round the rows of an expert that no token chose.
    """
    largest = _LARGEST if exact_here() else _REDUCED

    def in_blocks(weights: Weights, nodes: Nodes, data: DataFile) -> Products:
        return BlockProducts(modules, weights, nodes, data, bits)

    def by_row(weights: Weights, nodes: Nodes, data: DataFile) -> Products:
        return RowProducts(modules, weights, nodes, data, largest)

    return {False: in_blocks} if blocks else {True: by_row, False: in_blocks}


def _lower(
    encoder: OnePass,
    weights: Weights,
    forms: Mapping[bool, _Form],
    path: Path,
    check: EncoderCheck,
    console: Console,
    precision: str,
    traceable: bool,
) -> Lowered:
    """Replaces the fp32 graph by the fastest form of integers that loses little enough.

    Raises:
        QualityError: all lose too much; the tracer keeps layers in fp32 then.
    """
    with phase(console, "Evaluating fp32"):
        before = check.answers(path)
    for by_row, form in forms.items():
        with phase(console, "Quantizing"):
            _write_graph(encoder, weights, path, form)
        with phase(console, "Checking quality"):
            lowered = check.lowered(path, before, by_row=by_row)
        found = lowered.comparison
        said = f"{precision} {loss_in_words(found.loss, found.figures, 'fp32')}"
        if check.accepts(lowered):
            finding(console, said)
            return check.measured(lowered, path, before)
    limit = with_unit(check.limit, found.figures)
    raise QualityError(
        f"{said}, and the maximum is {limit}; choose another precision, or raise --max-loss",
        f"{said}, more than {limit}",
        traceable=traceable,
    )
