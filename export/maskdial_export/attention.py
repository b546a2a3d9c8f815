"""Replaces a model's attention by ONNX Runtime operators while it is traced.

transformers models look up their attention function by name (``AttentionInterface``). We register
one that puts a single ONNX Runtime operator into the traced graph. No mask function goes with it,
so the models build no mask tensors: the operators mask by the lengths.

The operators are specified in onnxruntime's docs/ContribOperators.md.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

_NAME = "maskdial"
# Below every score, in float16 too, and finite: a padded row may have no key at all
_MASKED_SCORE = -60_000.0


class Attention(Protocol):
    """The function transformers calls. query, key, value: (batch, num_heads, length, head_dim)."""

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]: ...


@contextmanager
def swapped(model: PreTrainedModel, attention: Attention) -> Iterator[None]:
    """Lets the model attend through ``attention`` inside the block."""
    AttentionInterface.register(_NAME, attention)
    before = model.config._attn_implementation
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = before


def _join_heads(heads: Tensor, copies: int = 1) -> Tensor:
    """(batch, num_heads, length, head_dim) to (batch, length, num_heads * copies * head_dim)."""
    batch, _, length, _ = heads.shape
    parts = heads.transpose(1, 2)
    if copies > 1:
        parts = parts[:, :, :, None].expand(-1, -1, -1, copies, -1)
    return parts.reshape(batch, length, -1)


class MaskedAttention:
    """``com.microsoft::MultiHeadAttention`` over right-padded rows.

    float16 is for CUDA, whose memory-efficient kernel needs the rows' start offsets after their
    lengths. With the lengths alone ONNX Runtime 1.31 falls back to a slow kernel, except on some
    older GPUs. The CPU kernel returns the same bits for both.
    """

    _lengths: Tensor
    _extents: Tensor

    def __init__(self) -> None:
        self._windows: dict[int, Tensor] = {}

    def begin(self, lengths: Tensor, longest: int) -> None:
        """Starts a forward pass.

        Args:
            lengths: valid tokens of each row, int32 (batch,).
            longest: tokens of a row, padding included.
        """
        starts = torch.arange(lengths.shape[0] + 1, dtype=lengths.dtype) * longest
        self._lengths = lengths
        self._extents = torch.cat([lengths, starts, starts])  # queries, keys
        self._windows.clear()

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        batch, num_heads, length, head_dim = query.shape
        shared = num_heads // key.shape[1]  # query heads per key head
        attributes: dict[str, Any] = {"num_heads": num_heads}
        if scaling is not None:
            attributes["scale"] = float(scaling)
        window = (
            None if sliding_window is None else self._window(sliding_window, length, query.dtype)
        )
        output = torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention",
            [
                _join_heads(query),
                _join_heads(key, shared),
                _join_heads(value, shared),
                None,
                self._extents if query.dtype == torch.float16 else self._lengths,
                window,
            ],
            attributes,
            dtype=query.dtype,
            shape=(batch, length, num_heads * head_dim),
            version=1,
        )
        return output.view(batch, length, num_heads, head_dim), None

    def _window(self, size: int, length: int, dtype: torch.dtype) -> Tensor:
        """A bias for the scores, (1, 1, length, length), that masks keys outside the window."""
        if size not in self._windows:
            position = torch.arange(length)
            far = (position[:, None] - position[None, :]).abs() >= size
            self._windows[size] = far.to(dtype)[None, None] * _MASKED_SCORE
        return self._windows[size]


class CausalAttention:
    """``com.microsoft::GroupQueryAttention`` over a KV cache that past and present share.

    Given the rotary tables, the operator also rotates queries and keys.
    """

    def __init__(self) -> None:
        self.present: list[tuple[Tensor, Tensor]] = []
        self._past: Sequence[tuple[Tensor, Tensor]] = ()
        self._lengths: list[Tensor] = []
        self._tables: list[Tensor] = []

    def begin(
        self,
        past: Sequence[tuple[Tensor, Tensor]],
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Starts a forward pass.

        `maskdial.models.bundle` documents the inputs. ``rotary``: cosines and sines,
        (max_length, rotary_dim / 2) each, if the operator shall rotate.
        """
        self._past = past
        self._lengths = [seqlens_k, total_sequence_length]
        self._tables = list(rotary or ())
        self.present = []

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        batch, num_heads, length, head_dim = query.shape
        past_key, past_value = self._past[len(self.present)]
        attributes: dict[str, Any] = {"num_heads": num_heads, "kv_num_heads": key.shape[1]}
        if scaling is not None:
            attributes["scale"] = float(scaling)
        if sliding_window is not None:
            attributes["local_window_size"] = int(sliding_window)
        if softcap is not None:
            attributes["softcap"] = float(softcap)
        if self._tables:
            attributes["do_rotary"] = 1
        output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            [
                *(_join_heads(heads) for heads in (query, key, value)),
                past_key,
                past_value,
                *self._lengths,
                *self._tables,
            ],
            attributes,
            dtypes=(query.dtype, past_key.dtype, past_value.dtype),
            shapes=((batch, length, num_heads * head_dim), past_key.shape, past_value.shape),
            version=1,
        )
        self.present.append((present_key, present_value))
        return output.view(batch, length, num_heads, head_dim), None


Rotate = Callable[..., tuple[Tensor, Tensor]]


@contextmanager
def rotated(model: PreTrainedModel, rotate: Rotate) -> Iterator[None]:
    """Replaces the model's own rotary embedding of queries and keys inside the block."""
    module: Any = sys.modules[type(model).__module__]
    before: Rotate = module.apply_rotary_pos_emb
    module.apply_rotary_pos_emb = rotate
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = before


def not_rotated(query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Leaves the rotation to the attention operator."""
    return query, key


class Rotary:
    """``com.microsoft::RotaryEmbedding`` for texts that start at position 0.

    ``cos`` and ``sin``: (max_length, rotary_dim / 2) each.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._tables = [cos, sin]

    def __call__(self, query: Tensor, key: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._rotate(query), self._rotate(key)

    def _rotate(self, heads: Tensor) -> Tensor:
        batch, num_heads, length, head_dim = heads.shape
        joined = _join_heads(heads)
        attributes: dict[str, Any] = {"num_heads": num_heads}
        rotary_dim = 2 * self._tables[0].shape[1]
        if rotary_dim < head_dim:
            attributes["rotary_embedding_dim"] = rotary_dim
        first = torch.zeros(1, dtype=torch.int64)
        output = torch.onnx.ops.symbolic(
            "com.microsoft::RotaryEmbedding",
            [joined, first, *self._tables],
            attributes,
            dtype=heads.dtype,
            shape=joined.shape,
            version=1,
        )
        return output.view(batch, length, num_heads, head_dim).transpose(1, 2)
