"""Tracing a torch module, optimizing the graph, and saving it."""

import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx_ir as ir
import onnxscript.optimizer
import torch
from onnx_ir.passes import common as passes
from onnxscript.rewriter.ort_fusions import optimize_for_ort
from onnxscript.rewriter.pattern import MatchResult, SimplePatternMatcher
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from transformers import PreTrainedModel

from maskdial_export.errors import ExportError, first_line
from maskdial_export.tracing.lowering import quick_lowering
from maskdial_export.tracing.rewrite import (
    MODULES,
    NAMED,
    cancel_reshapes,
    cancel_transposes,
    flatten_heads,
    give_attention_biases,
    modules_of,
    name_modules,
    narrow_norms,
    pack_projections,
    part_skip_layer_norms,
    project_packs,
    share_transposed_weights,
    sum_in_order,
)

OPSET = 20  # the first with Gelu
_LARGE_BYTES = 2**20
_STRIP = 64
_COUNT = re.compile(r"\bu\d+\b")  # torch's names for them, also in products and sums


def trunk(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a causal model whose hidden states its head reads."""
    decoder = model.get_decoder()
    if decoder is model:  # transformers does not find Llama 4's
        decoder = getattr(model, "model", model)
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


@contextmanager
def gather_rows(base_model: nn.Module, rows: Tensor) -> Iterator[list[Tensor]]:
    """Lets the base model return only the hidden states of ``rows``.

    The head that follows then runs on (1, num_rows, hidden_size) instead of
    (batch, length, hidden_size). ``rows`` are indices into the flattened batch, int64. The list
    gets the hidden states of all tokens, (batch * length, hidden_size).
    """
    states: list[Tensor] = []

    def gather(_module: nn.Module, _args: Any, output: Any) -> Any:
        states.append(output[0].flatten(0, 1))
        output["last_hidden_state"] = states[-1].index_select(0, rows)[None]
        return output

    hook = base_model.register_forward_hook(gather)
    try:
        yield states
    finally:
        hook.remove()


@contextmanager
def quiet() -> Iterator[None]:
    """Silences torch's exporter.

    It warns about its own deprecations and optional packages, and prints its unfinished graph if it
    fails.
    """
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.fx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def to_onnx_ir(
    module: nn.Module,
    inputs: dict[str, Any],
    dynamic_shapes: dict[str, Any],
    input_names: list[str],
    output_names: list[str],
) -> ir.Model:
    """Traces ``module(**inputs)``; the names are for the flattened inputs and outputs.

    Raises:
        ExportError: torch cannot trace the model.
    """
    with quiet(), torch.no_grad(), quick_lowering():
        try:
            program = torch.onnx.export(
                module.eval(),
                kwargs=inputs,
                dynamic_shapes=dynamic_shapes,
                input_names=input_names,
                output_names=output_names,
                opset_version=OPSET,
                dynamo=True,
                optimize=False,  # `optimize` does
                verbose=False,
            )
        except Exception as error:  # the model, torch and onnxscript raise any type
            raise ExportError(f"torch cannot trace the model: {_reason(error)}") from error
    assert program is not None
    _forget_counts(program.model.graph)
    return program.model


def _forget_counts(graph: ir.Graph) -> None:
    """Leaves sizes unknown that the graph finds out as it runs: the tokens of an expert.

    ONNX Runtime takes sizes of one name as equal, and copies of a layer have the layer's names.
    """
    for node in graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape(
                    None if _COUNT.search(str(size)) else size for size in value.shape
                )


def _reason(error: Exception) -> str:
    """Why a trace failed: the exporter's message is a report of many lines around the cause."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, GuardOnDataDependentSymNode):
        return "its code takes different paths for different values of its tensors"
    return f"{first_line(error)} ({type(error).__name__})"


@contextmanager
def _quick_matching() -> Iterator[None]:
    """Lets onnxscript look for a pattern of several results only where its first node may be.

    It looks at the whole graph for every node and pattern before it compares that node: 107 of 125
    seconds for two layers of 64 experts.
    """
    match = SimplePatternMatcher.match

    def match_first(matcher: Any, model: Any, graph: Any, node: ir.Node, **settings: Any) -> Any:
        operator = matcher.pattern.output_nodes[0].op_identifier()
        if operator is not None and operator != node.op_identifier():
            return MatchResult().fail("another operator")
        return match(matcher, model, graph, node, **settings)

    with mock.patch.object(SimplePatternMatcher, "match", match_first):
        yield


def fold(model: ir.Model) -> None:
    """Computes what is constant, and computes once what is computed twice."""
    with quiet(), _quick_matching():
        onnxscript.optimizer.optimize(model)


def optimize(model: ir.Model, packs: Sequence[tuple[str, ...]] = ()) -> ir.Model:
    """Fuses what ONNX Runtime has an operator for, and stores each weight once.

    ``packs`` are groups of the checkpoint's modules to multiply as one product each.
    """
    fold(model)
    with quiet(), _quick_matching():
        name_modules(model.graph)  # before fusion, which keeps the names
        cancel_transposes(model.graph)
        model, _ = optimize_for_ort(model)
        passes.DeduplicateInitializersPass()(model)
        cancel_reshapes(model.graph)
        sum_in_order(model.graph)
        part_skip_layer_norms(model.graph)
        narrow_norms(model.graph)
        project_packs(model.graph, packs)
        give_attention_biases(model.graph)
        pack_projections(model.graph)
        share_transposed_weights(model.graph)
        flatten_heads(model.graph)
        passes.RemoveUnusedNodesPass()(model)
    _drop_unused_inputs(model.graph)
    return model


def _drop_unused_inputs(graph: ir.Graph) -> None:
    for value in list(graph.inputs):
        if not value.uses():
            graph.inputs.remove(value)


def data_file(graph: str) -> str:
    """The name of a graph file's weight file."""
    return f"{graph}.data"


def save(model: ir.Model, path: Path) -> list[str]:
    """Writes the graph and its weight file, and returns their names.

    Of the metadata, products and lookups keep the names of their modules, by which adapters know
    them.

    Raises:
        OSError: a file cannot be written.
    """
    data = data_file(path.name)
    named = [(node, modules_of(node)) for node in model.graph if node.op_type in NAMED]
    passes.ClearMetadataAndDocStringPass()(model)
    for node, modules in named:
        if modules:
            node.metadata_props[MODULES] = ",".join(modules)
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and len(tensor.shape) == 2 and tensor.nbytes > _LARGE_BYTES:
            value.const_value = ir.LazyTensor(
                partial(_in_order, tensor),
                tensor.dtype,
                ir.Shape(tensor.shape.numpy()),
                name=value.name,
            )
    ir.save(model, path, external_data=data)
    return [path.name, data]


def _in_order(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A matrix in the order of its rows: most are a checkpoint's, seen transposed.

    numpy copies those element by element, in five times the time of these strips.
    """
    array = tensor.numpy()
    if array.flags.c_contiguous:
        return ir.Tensor(array)
    ordered = np.empty_like(array, order="C")
    for start in range(0, array.shape[1], _STRIP):
        strip = slice(start, start + _STRIP)
        ordered[:, strip] = array[:, strip]
    return ir.Tensor(ordered)
