"""Bundles with random weights: the exporter's graph without its comparisons.

The exporter compares each graph with torch in float32, and each lower precision with that. For
billions of random weights this takes many minutes and shows nothing, so the graph is quantized as
it is traced, in float16 for CUDA. The manifest's parity is that of a tiny model of the same family.
"""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from loadtests.checkpoints import new_folder, random_model
from loadtests.compare.setup import HALF, Setup
from maskdial.bundle.bundle import hash_files, write_manifest
from maskdial.bundle.manifest import GRAPH, GoldenCheck, Manifest
from maskdial_export.checkpoint.files import read_files, special_tokens, write_files
from maskdial_export.checkpoint.sample import read_sample
from maskdial_export.checkpoint.source import Source
from maskdial_export.checkpoint.tokenization import load_tokenizer
from maskdial_export.golden import Golden
from maskdial_export.model import Checkpoint
from maskdial_export.quantize.quantize import IntegerPrecision, quantize
from maskdial_export.quantize.table import word_embedding
from maskdial_export.tracing.causal import kv_layout
from maskdial_export.tracing.graph import optimize, save
from maskdial_export.tracing.positions import max_length
from maskdial_export.tracing.survey import survey

_ROUNDING = 0.25
"""Tolerance of the golden check, in standard deviations of the logits. Rounding stays below it (of
float16 far below; of int8 activations, which the kernels and ONNX Runtime round differently, 0.14
in the 22 random layers of the 1.1B shape), and a graph that computes something else far above.
"""


def write_unchecked(setup: Setup, tiny: Manifest) -> None:
    """Writes a setup's bundle; ``tiny`` is the manifest of an exported bundle of its family."""
    source = _source(setup)
    checkpoint = _checkpoint(setup, source)
    with new_folder(setup.bundle) as folder:
        graph = optimize(checkpoint.trace())
        if setup.precision != "fp16":
            table = None if setup.precision in HALF else word_embedding(checkpoint.model)
            by_row = setup.precision == "int8" and source.family == "masked"
            precision = cast(IntegerPrecision, setup.precision)
            graph = quantize(graph, precision, embedding=table, by_row=by_row)
        names = save(graph, folder / GRAPH)
        names += write_files(read_files(source, checkpoint.tokenizer), folder)
        config: Any = checkpoint.model.config
        about = {
            "precision": setup.precision,
            "batch_invariant": False,  # not measured here
            "vocab_size": config.vocab_size,
            "max_length": checkpoint.max_length,
            "special_tokens": checkpoint.tokens,
            "kv": checkpoint.kv,
            "source": f"{setup.shape} with random weights, whose parity is {tiny.source}'s",
            "source_sha256": source.sha256(),
            "golden": _golden(setup, checkpoint, folder / GRAPH),
            "files": hash_files(folder, names),
        }
        write_manifest(folder, tiny.model_copy(update=about))


def _source(setup: Setup) -> Source:
    path = setup.checkpoint
    if setup.model.family == "causal":
        return Source(str(path), path, "LlamaForCausalLM", "generate")
    return Source(str(path), path, "BertForMaskedLM", "fill-mask")


def _checkpoint(setup: Setup, source: Source) -> Checkpoint:
    """What the exporter has before it quantizes; for CUDA, after `Checkpoint.half`."""
    config = setup.model.config
    dtype = torch.float16 if setup.precision in HALF else torch.float32
    model = random_model(config, setup.seed, dtype=dtype, attention="eager")
    loaded = load_tokenizer(source, config.vocab_size, read_sample(None))
    tokenizer = loaded.backend
    tokens = special_tokens(source, config, tokenizer)
    surveyed = survey(model)
    layout = kv_layout(surveyed, dtype) if source.family == "causal" else None
    return Checkpoint(
        source.task,
        model,
        surveyed,
        tokenizer,
        tokens,
        max_length(model),
        None,
        layout,
        sends_token_types=loaded.sends_token_types,
    )


def _golden(setup: Setup, checkpoint: Checkpoint, graph: Path) -> GoldenCheck:
    """torch's logits in float16; for quantized weights, ONNX Runtime's on the CPU."""
    golden = Golden(checkpoint)
    computed = golden.expected if setup.precision == "fp16" else golden.computed(graph)
    logits = computed.astype(np.float32)
    return golden.check(logits, _ROUNDING * float(logits.std()))
