"""Repeating layers: a model's first layers are traced, and all further ones are copies of the last.

torch takes a second for each layer, though most models have one kind only. Of three traced layers
the last two are compared node by node: where one reads a weight, a cache or a value of the layer
before it, the other must read its own. The layers of the torch model are compared beforehand, so
only code that counts layers could make them differ; parity finds that.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.errors import ExportError
from maskdial_export.graph import fold
from maskdial_export.rewrite import constant
from maskdial_export.survey import Survey

_TRACED = 3  # the first has no layer before it, and computes what all share
_SCOPES = "pkg.torch.onnx.name_scopes"
_CACHE = re.compile(r"^((?:past|present)_(?:key|value)\.)\d+$")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of a model, alike from the second on; ``name`` is that of their list."""

    name: str
    layers: nn.ModuleList

    @contextmanager
    def shortened(self, model: PreTrainedModel) -> Iterator[None]:
        """Leaves the model only its first layers inside the block."""
        owner, name = self.name.rpartition(".")[::2]
        parent = model.get_submodule(owner)
        setattr(parent, name, self.layers[:_TRACED])
        try:
            yield
        finally:
            setattr(parent, name, self.layers)


def find_stack(model: PreTrainedModel, survey: Survey) -> Stack | None:
    """The layers of a model, if three may stand for all; None if they differ, or are few."""
    if survey.whole:
        return None
    config: Any = model.config
    total = getattr(config, "num_hidden_layers", None)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == total
    ]
    if len(lists) != 1 or len(lists[0][1]) <= _TRACED or len(survey.layers) not in (0, total):
        return None
    name, layers = lists[0]
    settings = (value for value in config.to_dict().values() if isinstance(value, list | tuple))
    if any(len(value) == total and not _same(value[1:]) for value in settings):
        return None
    attentions = survey.layers[1:]
    if any(layer.rotation is not attentions[0].rotation for layer in attentions):
        return None
    if not _same([replace(layer, rotation=None) for layer in attentions]):
        return None
    named = dict(_tensors(model))  # a tensor that layers share has the name of the first one only
    shapes = [_shapes(named, f"{name}.{index}.") for index in range(1, len(layers))]
    if not _same(shapes):
        return None
    if not all(_alike(layers[1], layer, (1, i)) for i, layer in enumerate(layers) if i > 1):
        return None
    return Stack(name, layers)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _shapes(
    tensors: Mapping[str, Tensor], prefix: str
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        name.removeprefix(prefix): (tensor.shape, tensor.dtype)
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _same(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _alike(left: nn.Module, right: nn.Module, numbers: tuple[int, int]) -> bool:
    """Whether two layers have the same modules and settings, apart from their numbers."""
    modules, others = (list(layer.named_modules()) for layer in (left, right))
    if [(name, type(each)) for name, each in modules] != [(n, type(each)) for n, each in others]:
        return False
    for (_, module), (_, other) in zip(modules, others, strict=True):
        settings, theirs = vars(module), vars(other)
        if settings.keys() != theirs.keys():
            return False
        for key in settings.keys() - _OF_EVERY_MODULE:
            pair = settings[key], theirs[key]
            if pair[0] is pair[1] or (type(pair[0]) is int and pair == numbers):
                continue
            if isinstance(pair[0], Tensor) or not bool(pair[0] == pair[1]):
                return False
    return True


def trace_by_layers(
    model: PreTrainedModel, survey: Survey, wrapper: nn.Module, trace: Callable[[int], ir.Model]
) -> ir.Model:
    """A traced graph, of whose layers only three were traced, if the others are like them.

    Args:
        model: the model.
        survey: of the model.
        wrapper: what is traced; the model is its attribute ``model``.
        trace: traces the model with the layers that it has at the time, so many as it is told.

    Raises:
        ExportError: torch cannot trace the model.
    """
    total = len(survey.layers)
    stack = find_stack(model, survey)
    if stack is None:
        return trace(total)
    try:
        with stack.shortened(model):
            graph = trace(_TRACED)
    except ExportError:  # the model's code counts its layers
        return trace(total)
    with _named_weights(graph.graph):
        fold(graph)
    copier = _Copier(graph.graph, wrapper, f"model.{stack.name}")
    return graph if copier.copy(len(stack.layers)) else trace(total)


@contextmanager
def _named_weights(graph: ir.Graph) -> Iterator[None]:
    """Hides the weights of an unoptimized graph from the optimizer inside the block.

    They are inputs there, so none is merged with an equal one, or replaced by its transpose.
    """
    hidden = [value for value in graph.initializers.values() if value.shape]
    arrays = {value: value.const_value for value in hidden}
    for value in hidden:
        graph.initializers.pop(str(value.name))
        value.const_value = None
        graph.inputs.append(value)
    try:
        yield
    finally:
        for value in hidden:
            graph.inputs.remove(value)
            value.const_value = arrays[value]
            graph.register_initializer(value)


class _Copier:
    """Adds copies of the last traced layer to a graph."""

    def __init__(self, graph: ir.Graph, module: nn.Module, name: str) -> None:
        """``module`` is what was traced, with all its layers; ``name`` that of their list in it."""
        self._graph = graph
        self._name = name
        self._tensors = dict(_tensors(module))
        numbers: dict[ir.Node, int | None] = {}
        for node in reversed(graph):
            numbers[node] = self._layer_of(node, numbers)
        layers: list[list[ir.Node]] = [
            [node for node in graph if numbers[node] == index] for index in range(_TRACED)
        ]
        self._before, self._last = layers[-2:]
        self._place_before, self._place = _places(self._before), _places(self._last)
        self._carried: dict[ir.Value, ir.Value] = {}
        self._own: dict[ir.Value, None] = {}  # the last layer's weights and caches, in order

    def _layer_of(self, node: ir.Node, numbers: Mapping[ir.Node, int | None]) -> int | None:
        """The layer that a node belongs to, or all that read it if nothing says where it is."""
        scopes = node.metadata_props.get(_SCOPES)
        if scopes is None:
            readers = {numbers[use.node] for value in node.outputs for use in value.uses()}
            return readers.pop() if len(readers) == 1 else None
        for scope in ast.literal_eval(scopes):
            if scope.startswith(f"{self._name}."):
                return int(scope.removeprefix(f"{self._name}.").partition(".")[0])
        return None

    def copy(self, total: int) -> bool:
        """Adds layers up to ``total``; returns False, and adds none, if the traced ones differ."""
        if not self._compare():
            return False
        outputs = [value for value in self._graph.outputs if value in self._place]
        last = set(self._last)
        following = [
            (value, use) for value in self._place for use in value.uses() if use.node not in last
        ]
        values: dict[ir.Value, ir.Value] = {}  # of the last layer, or before it, to the copy's
        end = self._last[-1]
        for index in range(_TRACED, total):
            values = self._begin(values, index)
            for node in self._last:
                copied = self._copy_node(node, values, index)
                self._graph.insert_after(end, copied)
                end = copied
            self._graph.outputs.extend(values[output] for output in outputs)
        for value, use in following:
            use.node.replace_input_with(use.idx, values[value])
        self._graph.sort()
        return True

    def _begin(self, values: Mapping[ir.Value, ir.Value], index: int) -> dict[ir.Value, ir.Value]:
        """What a copy reads, in place of what the last traced layer does."""
        following: dict[ir.Value, ir.Value] = {}
        for value in self._carried:
            last = self._last[self._place_before[value][0]].outputs[self._place_before[value][1]]
            following[value] = values.get(last, last)
        for value in self._own:
            following[value] = self._renamed(value, index)
        return following

    def _renamed(self, value: ir.Value, index: int) -> ir.Value:
        name = _number(str(value.name), index, self._name)
        copied = ir.Value(name=name, shape=value.shape, type=value.type)
        if value.is_initializer():
            copied.const_value = TorchTensor(self._tensors[name], name=name)
            self._graph.register_initializer(copied)
        else:
            self._graph.inputs.append(copied)
        return copied

    def _copy_node(self, node: ir.Node, values: dict[ir.Value, ir.Value], index: int) -> ir.Node:
        outputs = []
        for output in node.outputs:
            name = str(output.name)
            named = _number(name, index, self._name) if output.is_graph_output() else None
            outputs.append(
                ir.Value(name=named or f"{name}.{index}", shape=output.shape, type=output.type)
            )
        metadata = {
            key: each.replace(f"{self._name}.{_TRACED - 1}", f"{self._name}.{index}")
            for key, each in node.metadata_props.items()
        }
        copied = ir.Node(
            node.domain,
            node.op_type,
            [None if each is None else values.get(each, each) for each in node.inputs],
            list(node.attributes.values()),
            overload=node.overload,
            outputs=outputs,
            version=node.version,
            metadata_props=metadata,
        )
        values.update(zip(node.outputs, outputs, strict=True))
        return copied

    def _compare(self) -> bool:
        """Compares the last two traced layers, and notes what each reads in its own place."""
        if not self._last or len(self._before) != len(self._last):
            return False
        if not all(
            self._compare_nodes(*pair) for pair in zip(self._before, self._last, strict=True)
        ):
            return False
        # Nothing but the next layer may read what a layer computes
        readers = {*self._before, *self._last}
        return all(use.node in readers for value in self._place_before for use in value.uses())

    def _compare_nodes(self, before: ir.Node, last: ir.Node) -> bool:
        if before.op_identifier() != last.op_identifier():
            return False
        if len(before.inputs) != len(last.inputs) or len(before.outputs) != len(last.outputs):
            return False
        if not _equal_attributes(before, last):
            return False
        return all(
            self._compare_values(*pair) for pair in zip(before.inputs, last.inputs, strict=True)
        )

    def _compare_values(self, before: ir.Value | None, last: ir.Value | None) -> bool:
        if before is None or last is None:
            return before is last
        if last in self._place or before in self._place_before:
            return self._place_before.get(before) == self._place.get(last)
        if last in self._place_before:
            return self._carried.setdefault(last, before) is before
        if before is last:
            return True
        numbered = _number(str(before.name), _TRACED - 1, self._name)
        if numbered == last.name and (last.is_graph_input() or last.name in self._tensors):
            self._own[last] = None
            return True
        array, other = constant(before), constant(last)
        return array is not None and other is not None and np.array_equal(array, other)


def _places(nodes: Sequence[ir.Node]) -> dict[ir.Value, tuple[int, int]]:
    """Each value that the nodes compute: the node's number, and the output's."""
    return {
        value: (number, index)
        for number, node in enumerate(nodes)
        for index, value in enumerate(node.outputs)
    }


def _number(name: str, index: int, layers: str) -> str:
    """The name of a weight, a cache or an output, for another layer; the same if it has none."""
    if name.startswith(f"{layers}."):
        rest = name.removeprefix(f"{layers}.").partition(".")[2]
        return f"{layers}.{index}.{rest}"
    return _CACHE.sub(rf"\g<1>{index}", name)


def _equal_attributes(left: ir.Node, right: ir.Node) -> bool:
    if left.attributes.keys() != right.attributes.keys():
        return False
    for name, attribute in left.attributes.items():
        value, other = attribute.value, right.attributes[name].value
        if isinstance(attribute.value, ir.TensorProtocol):
            value, other = value.numpy().tolist(), other.numpy().tolist()
        if value != other:
            return False
    return True
