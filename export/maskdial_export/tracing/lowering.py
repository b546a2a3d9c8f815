"""Brings a traced program into the operators that torch's exporter translates."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._C import DispatchKey
from torch.export import ExportedProgram
from torch.onnx._internal.exporter import _fx_passes

_aten = torch.ops.aten
_COPIES_PERHAPS = (
    *(_aten.to.dtype, _aten.to.dtype_layout, _aten.to.device, _aten.contiguous.default),
    *(_aten.detach.default, _aten.detach_.default),
)
_CONTIGUOUS: dict[str, Any] = {"memory_format": torch.contiguous_format}
_EQUALS = {
    _aten.min.other: _aten.minimum.default,
    _aten.max.other: _aten.maximum.default,
    _aten.__and__.Tensor: _aten.bitwise_and.Tensor,
}


@contextmanager
def quick_lowering() -> Iterator[None]:
    """Has torch's exporter trace a program a second time only if the program needs it.

    The exporter decomposes what it has no translation for by tracing the program again, which takes
    half of an export. Most programs have nothing of the kind once reshapes and casts are written as
    that trace would write them.
    """
    decompose = _fx_passes.decompose_with_registry

    def lower(program: ExportedProgram, registry: Any) -> ExportedProgram:
        _rewrite(program.graph)
        if all(map(_is_translated(registry), program.graph.nodes)):
            return program
        return decompose(program, registry)

    with mock.patch.object(_fx_passes, "decompose_with_registry", lower):
        yield


def _rewrite(graph: fx.Graph) -> None:
    """Removes assertions and what copies nothing; writes casts and reshapes as a trace does."""
    outputs = graph.output_node().all_input_nodes
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        target = node.target
        value: Any = node.args[0] if node.args else None
        if str(target).startswith(("aten._assert", "aten.sym_constrain_range")):
            graph.erase_node(node)
        elif target in _EQUALS:
            node.target = _EQUALS[target]
        elif target is _aten.numpy_T.default and node.meta["val"].dim() == 2:
            node.target = _aten.t.default
        elif target is _aten.chunk.default:
            size = node.meta["val"][0].shape[node.args[2] if len(node.args) > 2 else 0]
            if isinstance(size, int):
                node.target, node.args = _aten.split.Tensor, (value, size, *node.args[2:])
        elif target in (_aten.reshape.default, _aten.flatten.using_ints):
            if target is _aten.reshape.default:
                sizes = node.args[1]
            else:
                shape = node.meta["val"].shape
                sizes = [size if isinstance(size, int) else -1 for size in shape]
                if sizes.count(-1) > 1:
                    continue
            if not _is_contiguous(value):
                with graph.inserting_before(node):
                    value = graph.call_function(_aten.clone.default, (value,), _CONTIGUOUS)
                value.meta.update(node.meta, val=value.args[0].meta["val"].clone())
            node.target, node.args = _aten.view.default, (value, sizes)
        elif target in _COPIES_PERHAPS:
            dtype = node.meta["val"].dtype
            if target is _aten.contiguous.default and not _is_contiguous(value):
                node.target, node.kwargs = _aten.clone.default, _CONTIGUOUS
            elif value.meta["val"].dtype != dtype:
                node.target, node.args, node.kwargs = (
                    _aten._to_copy.default,
                    (value,),
                    {"dtype": dtype},
                )
            elif node in outputs:  # whose names are in the program's signature
                node.target, node.args, node.kwargs = _aten.alias.default, (value,), {}
            else:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_translated(registry: Any) -> Callable[[fx.Node], bool]:
    """Whether the exporter translates a node as it is."""

    def is_translated(node: fx.Node) -> bool:
        target = node.target
        if node.op != "call_function" or target is operator.getitem:
            return True
        if isinstance(target, torch._ops.OpOverload):
            schema = target._schema
            views = any(value.alias_info is not None for value in schema.returns)
            if schema.is_mutable or (views and _is_composite(target)):
                return False
        return bool(registry.is_registered(target))

    return is_translated


def _is_contiguous(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_contiguous())


def _is_composite(target: torch._ops.OpOverload[..., Any]) -> bool:
    """Whether torch has it as a composition of other operators."""
    name = target._schema.name
    if target._schema.overload_name:
        name += f".{target._schema.overload_name}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        name, DispatchKey.CompositeImplicitAutograd
    )
