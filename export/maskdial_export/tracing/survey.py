"""A survey of a model before it is traced: how each of its layers attends.

The model runs once on a short text. What its layers pass to the attention function tells the shape
of the KV cache, and whether the attention operator can rotate queries and keys by itself.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.errors import ExportError, first_line
from maskdial_export.tracing.positions import max_length
from maskdial_export.tracing.recurrence import Shape, StateShapes, recurring
from maskdial_export.tracing.rotary import Rotation, Tables, rotated
from maskdial_export.tracing.swap import swapped

_LENGTH = 7
# transformers' functions that make masks of windows -> what a token sees beside the window
_WINDOW_MASKS = {
    "create_sliding_window_causal_mask": 0,
    "create_bidirectional_sliding_window_mask": 1,
}
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2}  # of the largest value


@dataclass(frozen=True, slots=True)
class Layer:
    """The attention of one layer; ``rotation`` is None if the operator shall not rotate.

    ``window``: how far a token sees, itself included, where only the model's mask says it.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    rotation: Rotation | None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """The layers that attend through an operator, in the order of their calls.

    ``causal``: whether a token's hidden state is independent of all later tokens. ``whole``: every
    layer is to be traced, as the first ones turned out to be different. ``states``: the shapes of
    the states of recurrent layers, see `KVLayout`.
    """

    layers: tuple[Layer, ...]
    tables: Tables
    causal: bool
    whole: bool = False
    states: tuple[Shape, ...] = ()

    def half(self) -> "Survey":
        """The survey of the same model in float16."""
        halves = {id(rotation): rotation.half() for rotation in self._rotations()}
        layers = tuple(
            replace(layer, rotation=halves.get(id(layer.rotation))) for layer in self.layers
        )
        return replace(self, layers=layers, tables=self.tables.half())

    def _rotations(self) -> Iterator[Rotation]:
        return (layer.rotation for layer in self.layers if layer.rotation is not None)


def survey(model: PreTrainedModel) -> Survey:
    """Runs the model on a short text.

    Raises:
        ExportError: it does not turn token ids into one hidden state per token.
    """
    longest = max_length(model)
    ids = _text(model, min(_LENGTH, longest))
    tables = Tables(longest)
    surveyor, states = _Surveyor(tables), StateShapes()
    try:
        causal = _is_causal(model, ids)
        with (
            torch.no_grad(),
            tables.recorded(model),
            rotated(model, surveyor.rotate),
            swapped(model, surveyor),
            recurring(model, states),
            _windows_marked(model),
        ):
            model.base_model(input_ids=ids)
    except Exception as error:  # models raise any type
        if isinstance(error, ExportError):
            raise
        raise ExportError(
            f"{type(model).__name__} cannot run on token ids alone: {first_line(error)}"
        ) from error
    return Survey(tuple(surveyor.layers), tables, causal, states=tuple(states.shapes))


@contextmanager
def _windows_marked(model: PreTrainedModel) -> Iterator[None]:
    """Lets masks of windows carry the window inside the block.

    Qwen2-MoE and PhiMoE hand it to no attention function: an eager one has it in the mask only.
    """
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    with ExitStack() as patches:
        for modeling, (name, beside) in itertools.product(modules, _WINDOW_MASKS.items()):
            if hasattr(modeling, name):
                patches.enter_context(mock.patch.object(modeling, name, _marked(beside)))
        yield


def _marked(beside: int) -> Callable[..., Any]:
    def create(config: Any, *_: Any, **__: Any) -> Any:
        window = getattr(config, "sliding_window", None)
        if window is None:
            return None
        mask: Any = torch.zeros(1, 1, 1, 1)
        mask.window = window + beside
        return mask

    return create


def _text(model: PreTrainedModel, length: int) -> Tensor:
    """Different tokens, none of them padding; (1, length)."""
    config: Any = model.config
    ids = torch.arange(config.vocab_size)
    ids = ids[ids != (getattr(config, "pad_token_id", None) or 0)]
    return ids[torch.linspace(0, len(ids) - 1, length).long()][None]


def _is_causal(model: PreTrainedModel, ids: Tensor) -> bool:
    """Whether the last token's embedding has no influence on the other tokens' states.

    Its gradient is exactly 0 where attention is masked, while the states themselves may differ in
    their last bits: which experts are chosen decides what is multiplied together.
    """
    embedded: list[Tensor] = []

    def detach(_module: nn.Module, _args: Any, output: Any) -> Any:
        values = output[0] if isinstance(output, tuple) else output
        embedded.append(values.detach().requires_grad_())
        changeable = embedded[-1].clone()
        return (changeable, *output[1:]) if isinstance(output, tuple) else changeable

    table = model.get_input_embeddings().weight
    readers = [each for each in model.base_model.modules() if _has(each, table)]
    hooks = [module.register_forward_hook(detach) for module in readers]
    try:
        with torch.enable_grad():
            states = model.base_model(input_ids=ids)[0]
    finally:
        for hook in hooks:
            hook.remove()
    if states.ndim != 3 or states.shape[:2] != ids.shape:
        raise ExportError(f"{type(model).__name__} does not compute one hidden state per token")
    before = states[:, :-1]
    weights = torch.randn(before.shape, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad((before.float() * weights).sum(), embedded[0])
    by_token = gradient.flatten(0, -2)  # some models have the batch second, or add padding
    return not by_token[ids.shape[1] - 1].any()


def _has(module: nn.Module, weight: Any) -> bool:
    return getattr(module, "weight", None) is weight


def _close(left: Tensor, right: Tensor) -> bool:
    room = _TOLERANCE[right.dtype] * float(left.abs().max())
    return torch.allclose(left.float(), right.float(), rtol=0, atol=room)


class _Surveyor:
    """Attends without a mask, and notes what it was given."""

    def __init__(self, tables: Tables) -> None:
        self.layers: list[Layer] = []
        self._tables = tables
        self._turned: tuple[Tensor, ...] | None = None

    def rotate(
        self,
        function: Callable[..., tuple[Tensor, Tensor]],
        query: Tensor,
        key: Tensor,
        *rest: Any,
        **settings: Any,
    ) -> tuple[Tensor, Tensor]:
        rotated_query, rotated_key = function(query, key, *rest, **settings)
        self._turned = query, key
        return rotated_query, rotated_key

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        num_heads, num_kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
        rotation = self._rotation(query, key)
        self._turned = None
        window = None if sliding_window is not None else getattr(attention_mask, "window", None)
        shape = (num_heads, num_kv_heads, head_dim, value.shape[-1])
        self.layers.append(Layer(*shape, rotation, window))
        shared = num_heads // num_kv_heads
        scores = query @ key.repeat_interleave(shared, 1).transpose(2, 3) / head_dim**0.5
        output = scores.softmax(-1) @ value.repeat_interleave(shared, 1)
        return output.transpose(1, 2).contiguous(), None

    def _rotation(self, query: Tensor, key: Tensor) -> Rotation | None:
        """The rotation that led to these queries and keys; None if it cannot be told."""
        if self._turned is None:
            return None
        pairs = list(zip(self._turned, (query, key), strict=True))
        return self._tables.find(
            lambda rotation: (
                rotation.suits(query.shape[-1]) and all(_turns(rotation, *pair) for pair in pairs)
            )
        )


def _turns(rotation: Rotation, heads: Tensor, turned: Tensor) -> bool:
    """Whether the rotation maps heads (..., columns) to the first columns of ``turned``."""
    columns = heads.shape[-1]
    if heads.shape[:-1] != turned.shape[:-1] or rotation.rotary_dim > columns:
        return False
    return _close(rotation(heads), turned[..., :columns])
