"""Repeating layers: a model's first layers are traced, and all further ones are copies of the last.

torch takes a second for each layer, though most models have one kind only, or a few that alternate
with a period: each sixth layer of Gemma 3 attends globally. After the first layers come two traced
periods, which are compared node by node: where one reads a weight, a cache or a value of the period
before it, the other must read its own. The layers of the torch model are compared beforehand, so
only code that counts layers could make them differ; parity finds that.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.errors import ExportError
from maskdial_export.tracing.graph import fold
from maskdial_export.tracing.rewrite import constant
from maskdial_export.tracing.survey import Layer, Survey

_SCOPES = "pkg.torch.onnx.name_scopes"
_CACHE = re.compile(r"^((?:past|present)_(?:key|value)\.)(\d+)$")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class Stack:
    """The layers of a model, which repeat.

    Attributes:
        name: the name of their list.
        layers: all of them.
        first: how many come before the part that repeats; at least one, since the first layer has
            none before it, and computes what all share.
        period: after how many layers one is like another. The rest is a multiple of it.
    """

    name: str
    layers: nn.ModuleList
    first: int
    period: int

    @property
    def num_traced(self) -> int:
        """How many layers are traced: the first ones, and two periods."""
        return self.first + 2 * self.period

    @contextmanager
    def shortened(self, model: PreTrainedModel) -> Iterator[None]:
        """Leaves the model only the layers that are traced inside the block."""
        owner, name = self.name.rpartition(".")[::2]
        parent = model.get_submodule(owner)
        setattr(parent, name, self.layers[: self.num_traced])
        try:
            yield
        finally:
            setattr(parent, name, self.layers)


def find_stack(model: PreTrainedModel, survey: Survey) -> Stack | None:
    """The layers of a model, if some may stand for all; None if they do not repeat, or are few."""
    if survey.whole or survey.states:
        return None
    config: Any = model.config
    total = getattr(config, "num_hidden_layers", None)
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == total
    ]
    if len(lists) != 1 or len(survey.layers) not in (0, total):
        return None
    name, layers = lists[0]
    named = dict(_tensors(model))  # a tensor that layers share has the name of the first one only
    descriptions: list[Sequence[Any]] = [
        [_shapes(named, f"{name}.{index}.") for index in range(len(layers))],
        [_attention(layer) for layer in survey.layers],
    ]
    settings = (value for value in config.to_dict().values() if isinstance(value, list | tuple))
    descriptions += [value for value in settings if len(value) == total]
    for period in range(1, len(layers) // 2):
        stack = Stack(name, layers, 1 + (len(layers) - 1) % period, period)
        if stack.num_traced < len(layers) and _repeats(stack, descriptions):
            return stack
    return None


def _repeats(stack: Stack, descriptions: Sequence[Sequence[Any]]) -> bool:
    """Whether each layer, and each description of it, is like that of one period later."""
    first, period, layers = stack.first, stack.period, stack.layers
    return all(
        each == other
        for values in descriptions
        for each, other in zip(values[first:], values[first + period :], strict=False)
    ) and all(
        _alike(layers[index], layers[index + period], (index, index + period))
        for index in range(first, len(layers) - period)
    )


def _attention(layer: Layer) -> tuple[Layer, int]:
    """What to compare of a layer's attention: rotations are the same one, or different."""
    return replace(layer, rotation=None), id(layer.rotation)


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
            if not (type(pair[0]) is int and pair == numbers) and not _equal(*pair):
                return False
    return True


def _equal(setting: Any, other: Any) -> bool:
    if setting is other:
        return True
    if isinstance(setting, partial) and isinstance(other, partial):  # each equals only itself
        parts = (setting.func, setting.args, setting.keywords)
        return parts == (other.func, other.args, other.keywords)
    return not isinstance(setting, Tensor) and bool(setting == other)


def trace_by_layers(
    model: PreTrainedModel, survey: Survey, wrapper: nn.Module, trace: Callable[[int], ir.Model]
) -> ir.Model:
    """A traced graph, of whose layers only the first were traced, if the others are like them.

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
            graph = trace(stack.num_traced)
    except ExportError:  # the model's code counts its layers
        return trace(total)
    with _named_weights(graph.graph):
        fold(graph)
    return graph if _Copier(graph.graph, wrapper, stack).copy() else trace(total)


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
    """Adds copies of the last traced period to a graph."""

    def __init__(self, graph: ir.Graph, module: nn.Module, stack: Stack) -> None:
        """``module`` is what was traced, with all the layers of its attribute ``model``."""
        self._graph = graph
        self._stack = stack
        self._name = f"model.{stack.name}"
        self._in_text = re.compile(rf"({re.escape(self._name)}\.)(\d+)\b")
        self._tensors = dict(_tensors(module))
        numbers: dict[ir.Node, int | None] = {}
        for node in reversed(graph):
            numbers[node] = self._layer_of(node, numbers)
        self._part_shared(numbers)
        periods: list[list[ir.Node]] = [[], []]
        for node in graph:
            number = numbers[node]
            if number is not None and number >= stack.first:
                periods[(number - stack.first) // stack.period].append(node)
        self._before, self._last = periods
        self._place_before, self._place = _places(self._before), _places(self._last)
        self._carried: dict[ir.Value, ir.Value] = {}
        self._own: dict[ir.Value, None] = {}  # the last period's weights and caches, in order

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

    def _part_shared(self, numbers: dict[ir.Node, int | None]) -> None:
        """Takes what a layer computes for others, too, of the model's inputs alone, out of it.

        The first layer that attends locally computes the mask of all, for example.
        """
        of_layers: set[ir.Value] = set()
        for node in self._graph:
            read = [value for value in node.inputs if value is not None]
            if any(self._is_own(value) or value in of_layers for value in read):
                of_layers.update(node.outputs)
        for node in reversed(self._graph):
            readers = {numbers[use.node] for value in node.outputs for use in value.uses()}
            if of_layers.isdisjoint(node.outputs) and readers - {numbers[node]}:
                numbers[node] = None

    def _is_own(self, value: ir.Value) -> bool:
        """Whether a value is the weight or the cache of a layer."""
        name = str(value.name)
        return name.startswith(f"{self._name}.") or _CACHE.match(name) is not None

    def copy(self) -> bool:
        """Adds all further layers; returns False, and adds none, if the traced ones differ."""
        if not self._compare():
            return False
        outputs = [value for value in self._graph.outputs if value in self._place]
        last = set(self._last)
        following = [
            (value, use) for value in self._place for use in value.uses() if use.node not in last
        ]
        values: dict[ir.Value, ir.Value] = {}  # of the last layer, or before it, to the copy's
        end = self._last[-1]
        traced, period = self._stack.num_traced, self._stack.period
        for shift in range(period, len(self._stack.layers) - traced + 1, period):
            values = self._begin(values, shift)
            for node in self._last:
                copied = self._copy_node(node, values, shift)
                self._graph.insert_after(end, copied)
                end = copied
            self._graph.outputs.extend(values[output] for output in outputs)
        for value, use in following:
            use.node.replace_input_with(use.idx, values[value])
        self._graph.sort()
        return True

    def _begin(self, values: Mapping[ir.Value, ir.Value], shift: int) -> dict[ir.Value, ir.Value]:
        """What a copy, ``shift`` layers later, reads in place of what the last period does."""
        following: dict[ir.Value, ir.Value] = {}
        for value in self._carried:
            last = self._last[self._place_before[value][0]].outputs[self._place_before[value][1]]
            following[value] = values.get(last, last)
        for value in self._own:
            following[value] = self._renamed(value, shift)
        return following

    def _renamed(self, value: ir.Value, shift: int) -> ir.Value:
        name = self._shifted(str(value.name), shift)
        copied = ir.Value(name=name, shape=value.shape, type=value.type)
        if value.is_initializer():
            copied.const_value = TorchTensor(self._tensors[name], name=name)
            self._graph.register_initializer(copied)
        else:
            self._graph.inputs.append(copied)
        return copied

    def _shifted(self, name: str, shift: int) -> str:
        """The name of a weight, a cache or an output of a later layer; the same if it has none."""
        pattern = self._in_text if name.startswith(f"{self._name}.") else _CACHE
        return _shift(pattern, name, shift)

    def _copy_node(self, node: ir.Node, values: dict[ir.Value, ir.Value], shift: int) -> ir.Node:
        outputs = []
        for output in node.outputs:
            name = str(output.name)
            named = self._shifted(name, shift) if output.is_graph_output() else f"{name}.{shift}"
            outputs.append(ir.Value(name=named, shape=output.shape, type=output.type))
        metadata = {
            key: _shift(self._in_text, each, shift) for key, each in node.metadata_props.items()
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
        """Compares the two traced periods, and notes what each reads in its own place."""
        if not self._last or len(self._before) != len(self._last):
            return False
        if not all(
            self._compare_nodes(*pair) for pair in zip(self._before, self._last, strict=True)
        ):
            return False
        # Nothing but the next period may read what a period computes
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
        shifted = self._shifted(str(before.name), self._stack.period)
        if shifted == last.name and (last.is_graph_input() or last.name in self._tensors):
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


def _shift(pattern: re.Pattern[str], text: str, shift: int) -> str:
    return pattern.sub(lambda match: f"{match[1]}{int(match[2]) + shift}", text)


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
