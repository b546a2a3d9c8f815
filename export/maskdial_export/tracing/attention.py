"""The attention functions of traced models: each puts one ONNX Runtime operator into the graph.

The operators are specified in onnxruntime's docs/ContribOperators.md.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from maskdial_export.tracing.rotary import Rotation, rotated
from maskdial_export.tracing.survey import Layer, Survey
from maskdial_export.tracing.swap import swapped

# Below every score, in float16 too, and finite: a padded row may have no key at all
MASKED_SCORE = -60_000.0


_Pair = tuple[Tensor, Tensor]


class Attention(Protocol):
    """The functions that transformers calls: for each layer ``rotate``, then the attention itself.

    query, key, value: (batch, num_heads, length, head_dim).
    """

    def rotate(self, function: Callable[..., _Pair], *arguments: Any, **settings: Any) -> _Pair: ...

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
def attending(model: PreTrainedModel, survey: Survey, attention: Attention) -> Iterator[None]:
    """Lets the model rotate and attend through ``attention`` inside the block."""
    with (
        survey.tables.looked_up(model),
        rotated(model, attention.rotate),
        swapped(model, attention),
    ):
        yield


def join_heads(heads: Tensor, copies: int = 1) -> Tensor:
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

    _lengths: _Pair
    _with_sink: _Pair

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._index = 0
        self._windows: dict[int, Tensor] = {}

    def begin(self, lengths: Tensor, longest: int) -> None:
        """Starts a forward pass.

        Args:
            lengths: valid tokens of each row, int32 (batch,).
            longest: tokens of a row, padding included.
        """
        rows = torch.arange(lengths.shape[0] + 1, dtype=lengths.dtype)
        starts = rows * longest  # of queries, keys
        self._lengths = lengths, torch.cat([lengths, starts, starts])
        starts = starts + rows
        self._with_sink = lengths + 1, torch.cat([lengths + 1, starts, starts])
        self._windows.clear()
        self._index = 0

    def rotate(self, function: Callable[..., _Pair], *arguments: Any, **settings: Any) -> _Pair:
        """Rotates by an operator if the layer's rotation is known, else by the model's function."""
        rotation = self._layers[self._index].rotation
        if rotation is None:
            return function(*arguments, **settings)
        return _rotate(arguments[0], rotation), _rotate(arguments[1], rotation)

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
        position_bias: Tensor | None = None,
        alibi: Tensor | None = None,
        seen_by_all: Tensor | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """``seen_by_all`` are keys inside every window: bool (1 or batch, length).

        ``s_aux`` are attention sinks: for each head, the score of one more key without a value.
        """
        batch, num_heads, length, head_dim = query.shape
        value_dim = value.shape[-1]
        if sliding_window is None and self._layers:
            sliding_window = self._layers[self._index].window
        self._index += 1
        shared = num_heads // key.shape[1]  # query heads per key head
        attributes: dict[str, Any] = {"num_heads": num_heads}
        if scaling is not None:
            attributes["scale"] = float(scaling)
        biases = [] if position_bias is None else [position_bias]
        if alibi is not None:
            biases.append(alibi[None, :, None, :length].expand(-1, -1, length, -1))
        if sliding_window is not None:
            biases.append(self._window(sliding_window, length, query.dtype, seen_by_all))
        bias = sum(biases[1:], biases[0]) if biases else None
        lengths = self._lengths
        if s_aux is not None:
            scale = head_dim**-0.5 if scaling is None else float(scaling)
            attributes["scale"] = scale
            query, key, value = _with_sinks(query, key, value, s_aux / scale)
            lengths, shared = self._with_sink, 1
            bias = None if bias is None else nn.functional.pad(bias, (1, 0, 1, 0))
        output = torch.onnx.ops.symbolic(
            "com.microsoft::MultiHeadAttention",
            [
                join_heads(query),
                join_heads(key, shared),
                join_heads(value, shared),
                None,
                lengths[query.dtype == torch.float16],
                bias,
            ],
            attributes,
            dtype=query.dtype,
            shape=(batch, query.shape[2], num_heads * value_dim),
            version=1,
        )
        if s_aux is not None:
            output = output[:, 1:]
        return output.view(batch, length, num_heads, value_dim), None

    def _window(
        self, size: int, length: int, dtype: torch.dtype, seen_by_all: Tensor | None
    ) -> Tensor:
        """A bias for the scores that masks keys outside the window.

        It is (1 or batch, 1, length, length). Layers of one size share it: which keys all tokens
        see is the same in the whole pass.
        """
        if size not in self._windows:
            position = torch.arange(length)
            far = (position[:, None] - position[None, :]).abs() >= size
            hidden = far.to(dtype)[None, None]
            if seen_by_all is not None:
                hidden = hidden * ~seen_by_all[:, None, None, :]
            self._windows[size] = hidden * MASKED_SCORE
        return self._windows[size]


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a token before all others: its key's product with every query is the sink.

    Queries have one more column for that, which is 1; the token's value is 0. Its own query only
    keeps the products of a text of one token from being computed in another way than others.
    """
    shared = query.shape[1] // key.shape[1]
    query = nn.functional.pad(nn.functional.pad(query, (0, 1), value=1.0), (0, 0, 1, 0))
    key = nn.functional.pad(key.repeat_interleave(shared, 1), (0, 1, 1, 0))
    value = nn.functional.pad(value.repeat_interleave(shared, 1), (0, 0, 1, 0))
    first = torch.arange(key.shape[2])[:, None] == 0
    last = torch.arange(key.shape[3])[None, :] == key.shape[3] - 1
    added = (first & last).to(key.dtype) * sinks.to(key.dtype)[:, None, None]
    return query, key + added, value


def _rotate(heads: Tensor, rotation: Rotation) -> Tensor:
    """``com.microsoft::RotaryEmbedding`` for texts that start at position 0."""
    batch, num_heads, length, head_dim = heads.shape
    joined = join_heads(heads)
    attributes: dict[str, Any] = {"num_heads": num_heads}
    if rotation.rotary_dim < head_dim:
        attributes["rotary_embedding_dim"] = rotation.rotary_dim
    if rotation.interleaved:
        attributes["interleaved"] = 1
    first = torch.zeros(1, dtype=torch.int64)
    output = torch.onnx.ops.symbolic(
        "com.microsoft::RotaryEmbedding",
        [joined, first, rotation.cos, rotation.sin],
        attributes,
        dtype=heads.dtype,
        shape=joined.shape,
        version=1,
    )
    return output.view(batch, length, num_heads, head_dim).transpose(1, 2)


class CausalAttention:
    """``com.microsoft::GroupQueryAttention`` over a KV cache that past and present share.

    Without a cache it attends within right-padded rows. Where a layer's rotation is known, the
    operator also rotates queries and keys.
    """

    _lengths: Sequence[Tensor]

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.present: list[_Pair] = []
        self._layers = layers
        self._past: Sequence[_Pair] | None = None

    def begin(
        self,
        past: Sequence[_Pair] | None,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
    ) -> None:
        """Starts a forward pass; `maskdial.bundle.bundle` documents the inputs."""
        self._past = past
        self._lengths = seqlens_k, total_sequence_length
        self.present = []

    def rotate(self, function: Callable[..., _Pair], *arguments: Any, **settings: Any) -> _Pair:
        """Leaves a known rotation to the attention operator."""
        if self._layers[len(self.present)].rotation is None:
            return function(*arguments, **settings)
        return arguments[0], arguments[1]

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
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        alibi: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        batch, num_heads, length, head_dim = query.shape
        value_dim = value.shape[-1]
        if value_dim < head_dim:  # latent attention; the cache has one shape for keys and values
            value = nn.functional.pad(value, (0, head_dim - value_dim))
        index = len(self.present)
        past = (None, None) if self._past is None else self._past[index]
        rotation = self._layers[index].rotation
        if sliding_window is None:
            sliding_window = self._layers[index].window
        attributes: dict[str, Any] = {"num_heads": num_heads, "kv_num_heads": key.shape[1]}
        if scaling is not None:
            attributes["scale"] = float(scaling)
        if sliding_window is not None:
            attributes["local_window_size"] = int(sliding_window)
        if softcap is not None:
            attributes["softcap"] = float(softcap)
        tables: list[Tensor | None] = [None, None]
        if rotation is not None:
            attributes["do_rotary"] = 1
            attributes["rotary_interleaved"] = int(rotation.interleaved)
            tables = [rotation.cos, rotation.sin]
        optional = [
            *tables,
            None,
            position_bias if alibi is None else self._bias(alibi, length),
            None if s_aux is None else s_aux.to(query.dtype),
        ]
        while optional and optional[-1] is None:
            optional.pop()
        shape = (batch, key.shape[1], length, head_dim)
        output, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            [
                *(join_heads(heads) for heads in (query, key, value)),
                *past,
                *self._lengths,
                *optional,
            ],
            attributes,
            dtypes=(query.dtype, query.dtype, query.dtype),
            shapes=(
                (batch, length, num_heads * head_dim),
                *(shape if each is None else each.shape for each in past),
            ),
            version=1,
        )
        self.present.append((present_key, present_value))
        return output.view(batch, length, num_heads, head_dim)[..., :value_dim], None

    def _bias(self, alibi: Tensor, length: int) -> Tensor:
        """ALiBi's bias (num_heads, max_length) as (1, num_heads, length, total_length)."""
        keys = torch.arange(self._lengths[1].item())
        return alibi.index_select(1, keys)[None, :, None].expand(-1, -1, length, -1)


class CrossingAttention(CausalAttention):
    """The attention of a decoder that also attends to a source text, one token per row.

    Cross-attention is the same operator, over keys and values that stay as they are: it gets none
    to add (as layers do that share another layer's cache).
    """

    def cross(
        self, pairs: Sequence[_Pair], seqlens_k: Tensor, total_sequence_length: Tensor
    ) -> None:
        """Goes on with `begin`: the keys and values of the source texts, and their lengths."""
        self._cross = pairs
        self._cross_lengths = seqlens_k, total_sequence_length

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        if not any(key is keys for keys, _ in self._cross):
            return super().__call__(
                module, query, key, value, attention_mask, scaling=scaling, **settings
            )
        batch, num_heads, length, head_dim = query.shape
        attributes: dict[str, Any] = {"num_heads": num_heads, "kv_num_heads": num_heads}
        if scaling is not None:
            attributes["scale"] = float(scaling)
        nothing = query.new_zeros(batch, 0, num_heads * head_dim)
        output = torch.onnx.ops.symbolic(
            "com.microsoft::GroupQueryAttention",
            [join_heads(query), nothing, nothing, key, value, *self._cross_lengths],
            attributes,
            dtype=query.dtype,
            shape=(batch, length, num_heads * head_dim),
            version=1,
        )
        return output.view(batch, length, num_heads, head_dim), None
