# ruff: noqa: N803 - the arguments have transformers' names
"""Layers with a state of a fixed size: short convolutions and linear attention.

The modeling files of transformers call a function of their own for each; `Recurrence` replaces
these functions in a trace. The state comes in and goes out beside the keys and values, in float32.
A row's tokens beyond its length, and rows without tokens, leave the state unchanged.

ONNX Runtime's ``LinearAttention`` goes token by token, so the result has the same bits in one piece
and in chunks. It is specified in onnxruntime's docs/ContribOperators.md.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

_EPSILON = 1e-6  # of the normalization within the delta rule's functions

Shape = tuple[int, ...]


# The functions of transformers' modeling files -> the methods that take their place
_FUNCTIONS = {
    "causal_conv1d_fn": "convolve",
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "scan",
    "mamba_selective_scan": "selective_scan",
}


def is_traceable(module: nn.Module) -> bool:
    """Whether the file of a recurrent layer has such functions, which it calls."""
    return not _FUNCTIONS.keys().isdisjoint(vars(sys.modules[type(module).__module__]))


@contextmanager
def recurring(model: PreTrainedModel, recurrent: "StateShapes | Recurrence") -> Iterator[None]:
    """Lets the model's recurrent layers compute through ``recurrent`` inside the block.

    Its methods get the original function first.
    """
    modules = {sys.modules[type(module).__module__] for module in model.modules()}
    with ExitStack() as patches:
        for modeling in modules:
            for name, method in _FUNCTIONS.items():
                function = getattr(modeling, name, None)
                if function is not None:
                    replacement = partial(getattr(recurrent, method), function)
                    patches.enter_context(mock.patch.object(modeling, name, replacement))
        yield


class StateShapes:
    """Notes the shape of each layer's state, batch left out, in the order of the calls."""

    def __init__(self) -> None:
        self.shapes: list[Shape] = []

    def convolve(self, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        channels, width = _argument(args, settings, 1, "weight").shape
        self.shapes.append((width - 1, channels))
        return function(*args, **settings)

    def delta_rule(self, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        key, value = (_argument(args, settings, i, n) for i, n in ((1, "key"), (2, "value")))
        self.shapes.append((value.shape[2], key.shape[3], value.shape[3]))
        return function(*args, **settings)

    def scan(self, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        values, key = (_argument(args, settings, i, n) for i, n in ((0, "hidden_states"), (3, "B")))
        self.shapes.append((values.shape[2], key.shape[3], values.shape[3]))
        return function(*args, **settings)

    def selective_scan(self, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        channels, num_columns = _argument(args, settings, 2, "A").shape
        self.shapes.append((channels, num_columns, 1))
        return function(*args, **settings)


def _argument(args: Sequence[Any], settings: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if index < len(args) else settings[name]


class Recurrence:
    """Convolutions, and ``com.microsoft::LinearAttention``, over the rows' states."""

    def __init__(self) -> None:
        self.present: list[Tensor] = []
        """The states after the pass, in the order of the past ones."""

    def begin(self, past: Sequence[Tensor], lengths: Tensor, longest: int) -> None:
        """Starts a forward pass.

        Args:
            past: the states, float32 (batch, ...).
            lengths: valid tokens of each row, int32 (batch,).
            longest: tokens of a row, padding included.
        """
        self.present = []
        self._past = past
        self._lengths = lengths
        self._valid = torch.arange(longest)[None] < lengths[:, None]

    def convolve(
        self,
        _: Callable[..., Any],
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **__: Any,
    ) -> Tensor:
        """A convolution (batch, channels, length) of each channel by itself; the state is its tail.

        It is a sum of shifted products: ``CausalConvWithState`` of ONNX Runtime 1.31 takes two to
        three times as long on the CPU. Nothing but the joined tokens reads the past, so past and
        present may share their memory.
        """
        past = self._past[len(self.present)]
        size, length = past.shape[1], hidden_states.shape[2]
        joined = torch.cat([past, hidden_states.transpose(1, 2).float()], 1)
        tail = self._lengths[:, None].long() + torch.arange(size)
        self.present.append(joined.gather(1, tail[:, :, None].expand(-1, -1, past.shape[2])))
        taps = weight.float().T.contiguous()
        output = joined[:, :length] * taps[0]
        for distance in range(1, size + 1):
            output = output + joined[:, distance : distance + length] * taps[distance]
        if bias is not None:
            output = output + bias.float()
        if activation is not None:
            output = ACT2FN[activation](output)
        return output.transpose(1, 2).to(hidden_states.dtype)

    def delta_rule(
        self,
        _: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **__: Any,
    ) -> tuple[Tensor, None]:
        """The gated delta rule over (batch, length, num_heads, columns).

        ``g``: the decay's logarithm, for each head of ``value``, or for each column of its key.
        """
        dtype, head_dim = value.dtype, key.shape[3]
        query, key, value, g, beta = (each.float() for each in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            query, key = (_normalized(each) for each in (query, key))
        shared = value.shape[2] // key.shape[2]
        query, key = (_repeated(each, shared) for each in (query, key))
        output = self._attend(
            "gated_delta", query, key, value, g, self._masked(beta), head_dim**-0.5
        )
        return output.to(dtype), None

    def scan(
        self,
        _: Callable[..., Any],
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **__: Any,
    ) -> Tensor:
        """Mamba 2 over (batch, length, num_heads, head_dim), as gated linear attention.

        ``B`` are its keys, ``C`` its queries, (batch, length, num_groups, state_size).
        """
        steps = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        steps = nn.functional.softplus(steps) if dt_softplus else steps
        steps = steps.clamp(*dt_limit)
        values, shared = hidden_states.float(), hidden_states.shape[2] // B.shape[2]
        key, query = (_repeated(each.float(), shared) for each in (B, C))
        decay = A.float() * steps
        output = self._attend(
            "gated", query, self._masked(key), values * steps[..., None], decay, None, 1.0
        )
        if D is not None:
            output = output + D.float()[:, None] * values
        return output.to(hidden_states.dtype)

    def selective_scan(
        self,
        _: Callable[..., Any],
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        delta_bias: Tensor | None = None,
        *,
        delta_softplus: bool = False,
        **__: Any,
    ) -> Tensor:
        """Mamba over (batch, channels, length): each channel is a head with values of one column.

        ``A``: (channels, state_size); ``B``, ``C``: (batch, state_size, length).
        """
        steps = dt.float() if delta_bias is None else dt.float() + delta_bias.float()[:, None]
        steps = nn.functional.softplus(steps) if delta_softplus else steps
        steps = steps.transpose(1, 2)  # (batch, length, channels)
        values = hidden_states.float().transpose(1, 2)
        channels = A.shape[0]
        key, query = (
            each.float().transpose(1, 2)[:, :, None].expand(-1, -1, channels, -1) for each in (B, C)
        )
        decay = steps[..., None] * A.float()
        output = self._attend(
            "gated", query, self._masked(key), (values * steps)[..., None], decay, None, 1.0
        )
        output = output[..., 0].transpose(1, 2)
        if D is not None:
            output = output + hidden_states.float() * D.float()[:, None]
        output = output.to(hidden_states.dtype)
        return output if z is None else output * nn.functional.silu(z)

    def _attend(
        self,
        rule: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Linear attention of as many heads of queries and keys as of values."""
        batch, length, num_heads, columns = value.shape
        past = self._past[len(self.present)]
        inputs = [
            *(each.flatten(2) for each in (query, key, value)),
            past,
            self._masked(decay).flatten(2),
            *([] if beta is None else [beta]),
        ]
        attributes: dict[str, Any] = {
            "update_rule": rule,
            "q_num_heads": num_heads,
            "kv_num_heads": num_heads,
            "scale": scale,
        }
        output, present = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::LinearAttention",
            inputs,
            attributes,
            dtypes=(torch.float32, torch.float32),
            shapes=((batch, length, num_heads * columns), past.shape),
            version=1,
        )
        self.present.append(present)
        return output.view(batch, length, num_heads, columns)

    def _masked(self, values: Tensor) -> Tensor:
        """Zeros beyond the rows' lengths: there a state neither decays nor takes anything in."""
        valid = self._valid.view(*self._valid.shape, *[1] * (values.ndim - 2))
        return torch.where(valid, values, 0.0)


def _normalized(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _EPSILON)


def _repeated(heads: Tensor, copies: int) -> Tensor:
    return heads if copies == 1 else heads.repeat_interleave(copies, 2)
