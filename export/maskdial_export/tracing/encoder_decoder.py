"""Tracing encoder-decoder models: a graph for the encoder and one for the decoder.

The encoder's graph reads a source text once, and returns what the decoder's layers need of it: the
keys and values of their cross-attention. The decoder's graph reads one token per row, with a KV
cache of its own tokens as in causal models, and attends to these keys and values as they lie.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from maskdial.bundle.manifest import Heads, KVLayout
from maskdial_export.errors import ExportError, first_line
from maskdial_export.tracing.attention import CrossingAttention, MaskedAttention
from maskdial_export.tracing.graph import gather_rows, to_onnx_ir
from maskdial_export.tracing.survey import Layer
from maskdial_export.tracing.swap import swapped

_Pair = tuple[Tensor, Tensor]


class _SelfAttentionCache:
    """Leaves a layer's keys and values to the attention operator, which has the cache."""

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> _Pair:
        return key, value

    def get_seq_length(self, *_: Any) -> int:
        return 0


class _CrossLayer:
    """The keys and values of one layer's cross-attention."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values


class _CrossAttentionCache:
    """Gives out the keys and values of source texts, or takes those that layers project."""

    def __init__(self, pairs: Sequence[_Pair]) -> None:
        self.layers = [_CrossLayer(*pair) for pair in pairs]

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> _Pair:
        self.layers.append(_CrossLayer(key, value))
        return key, value

    @property
    def pairs(self) -> list[_Pair]:
        return [(layer.keys, layer.values) for layer in self.layers]


class _Caches(EncoderDecoderCache):  # type: ignore[misc]
    """What a decoder takes for its caches.

    ``cross`` are the keys and values of the source texts; without them the decoder projects the
    encoder's states, and they are collected.
    """

    def __init__(self, cross: Sequence[_Pair] = ()) -> None:
        self.self_attention_cache: Any = _SelfAttentionCache()
        self.cross_attention_cache: Any = _CrossAttentionCache(cross)
        self.is_updated = dict.fromkeys(range(len(cross)), True)

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return 0


def _parts(model: PreTrainedModel) -> tuple[Any, Any]:
    """The encoder and the decoder of a model.

    Raises:
        ExportError: it has no such parts.
    """
    try:
        parts = model.get_encoder(), model.get_decoder()
    except AttributeError as error:
        raise ExportError(f"{type(model).__name__} has no encoder and decoder") from error
    return parts


def _no_attention(
    _module: nn.Module, query: Tensor, _key: Tensor, _value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    return query.transpose(1, 2), None


def _project(decoder: Any, states: Tensor) -> list[_Pair]:
    """The keys and values of each layer's cross-attention: (batch, num_heads, length, head_dim).

    The decoder runs on a token of its own, and nothing of what it makes of it is kept.
    """
    caches = _Caches()
    with swapped(decoder, _no_attention):
        decoder(
            input_ids=torch.ones(states.shape[0], 1, dtype=torch.int64),
            encoder_hidden_states=states,
            past_key_values=caches,
        )
    pairs: list[_Pair] = caches.cross_attention_cache.pairs
    return pairs


def kv_layout(model: PreTrainedModel) -> tuple[KVLayout, tuple[Layer, ...]]:
    """The KV cache of the decoder, the same for its own tokens and for the source's; its layers.

    Raises:
        ExportError: the decoder does not attend to an encoder's states by keys and values of one
            shape.
    """
    _, decoder = _parts(model)
    config: Any = model.config
    width = getattr(config, "d_model", None) or config.hidden_size
    try:
        with torch.no_grad(), numbered(decoder, torch.zeros(1, 1, dtype=torch.int64), 1):
            pairs = _project(decoder, torch.zeros(1, 3, width))
    except Exception as error:  # models raise any type
        raise ExportError(
            f"{type(model).__name__} cannot be split into an encoder and a decoder with caches: "
            f"{first_line(error)}"
        ) from error
    shapes = {tensor.shape for pair in pairs for tensor in pair}
    if len(shapes) != 1:
        raise ExportError(
            f"{type(model).__name__} does not have cross-attention of one shape in every layer, "
            "so the source text cannot be kept in a cache"
        )
    _, num_heads, _, head_dim = shapes.pop()
    layer = Layer(num_heads, num_heads, head_dim, head_dim, None)
    layout = KVLayout(layers=(Heads(num_heads, head_dim),) * len(pairs))
    return layout, (layer,) * len(pairs)


def has_relative_positions(model: PreTrainedModel) -> bool:
    """Whether positions are biases by the distance, as T5's are."""
    return any(getattr(each, "has_relative_attention_bias", False) for each in model.modules())


@contextmanager
def numbered(part: Any, positions: Tensor | None, longest: Any) -> Iterator[None]:
    """Lets an encoder or a decoder take its tokens' positions from us inside the block.

    Args:
        part: whose position embeddings or relative position biases are looked up.
        positions: int64 (batch, length); None counts from 0 in every row.
        longest: the number of keys that a token may attend to.
    """
    with ExitStack() as patches:
        for name, module in part.named_modules():
            forward: Callable[..., Tensor] | None = None
            method = "forward"
            if name.rpartition(".")[2] == "embed_positions":
                forward = _embedder(module, positions)
            elif getattr(module, "has_relative_attention_bias", False):
                method, forward = "compute_bias", _relative_bias(module, positions, longest)
            if forward is not None:
                patches.enter_context(mock.patch.object(module, method, forward))
        yield


def _embedder(module: Any, positions: Tensor | None) -> Callable[..., Tensor] | None:
    """How position embeddings are looked up; None if the module's own way is right."""
    if hasattr(module, "create_position_ids_from_input_ids"):  # counts what is not padding

        def count(input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
            before = 0 if positions is None else positions
            ids = module.create_position_ids_from_input_ids(input_ids, module.padding_idx, before)
            return nn.functional.embedding(ids, module.weights)

        return count
    if positions is None or not isinstance(module, nn.Embedding):
        return None
    offset = getattr(module, "offset", 0)
    return lambda *_, **__: nn.functional.embedding(positions + offset, module.weight)


def _relative_bias(module: Any, positions: Tensor | None, longest: Any) -> Callable[..., Tensor]:
    """T5's bias of the scores by the distance, (batch, num_heads, length, num_keys).

    It is looked up by the distance itself. From ``relative_attention_max_distance`` on there is
    one bias; computing the buckets in the graph would take logarithms, which may round differently.
    """
    furthest = int(module.relative_attention_max_distance)
    length = 2 * furthest + 1
    table = module.compute_bias(length, length)[0, :, furthest].T.detach().contiguous()

    def compute(query_length: int, *_: Any, **__: Any) -> Tensor:
        at = torch.arange(query_length)[None] if positions is None else positions
        distance = torch.arange(longest)[None, None, :] - at[:, :, None]
        index = distance.clamp(-furthest, furthest) + furthest
        return nn.functional.embedding(index, table).permute(0, 3, 1, 2)

    return compute


class EncoderGraph(nn.Module):
    """An encoder with the inputs and outputs that `maskdial.bundle.bundle` documents."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.attention = MaskedAttention(())
        self.pad_token_id = int(getattr(model.config, "pad_token_id", None) or 0)

    def forward(self, input_ids: Tensor, lengths: Tensor) -> list[_Pair]:
        encoder, decoder = _parts(self.model)
        longest = input_ids.shape[1]
        self.attention.begin(lengths, longest)
        valid = torch.arange(longest)[None, :] < lengths[:, None]
        ids = torch.where(valid, input_ids, self.pad_token_id)
        with numbered(encoder, None, longest), swapped(encoder, self.attention):
            states = encoder(input_ids=ids, attention_mask=valid.to(torch.int64))[0]
        with numbered(decoder, torch.zeros(1, 1, dtype=torch.int64), 1):
            return _project(decoder, states)


class DecoderGraph(nn.Module):
    """A decoder with its head; `maskdial.bundle.bundle` documents the inputs and outputs."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.model = model
        self.attention = CrossingAttention(layers)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        seqlens_k: Tensor,
        total_sequence_length: Tensor,
        source_seqlens_k: Tensor,
        total_source_length: Tensor,
        rows: Tensor,
        past: list[_Pair],
        cross: list[_Pair],
    ) -> tuple[Tensor, list[_Pair]]:
        _, decoder = _parts(self.model)
        self.attention.begin(past, seqlens_k, total_sequence_length)
        self.attention.cross(cross, source_seqlens_k, total_source_length)
        config: Any = self.model.config
        states = torch.zeros(input_ids.shape[0], 1, config.d_model, dtype=self.model.dtype)
        with (
            numbered(decoder, position_ids, total_sequence_length.item()),
            swapped(decoder, self.attention),
            gather_rows(decoder, rows),
        ):
            output = self.model(
                decoder_input_ids=input_ids,
                encoder_outputs=BaseModelOutput(last_hidden_state=states),
                past_key_values=_Caches(cross),
            )
        return output.logits.squeeze(0).float(), self.attention.present


def trace_encoder(model: PreTrainedModel, layout: KVLayout) -> ir.Model:
    """Traces the encoder for any batch and length."""
    batch, length = 2, 5
    inputs: dict[str, Any] = {
        "input_ids": torch.ones(batch, length, dtype=torch.int64),
        "lengths": torch.tensor([length, length - 2], dtype=torch.int32),
    }
    dynamic = torch.export.Dim.DYNAMIC
    shapes: dict[str, Any] = {"input_ids": {0: dynamic, 1: dynamic}, "lengths": {0: dynamic}}
    outputs = _names("cross", layout)
    return to_onnx_ir(EncoderGraph(model), inputs, shapes, list(inputs), outputs)


def trace_decoder(model: PreTrainedModel, layout: KVLayout, layers: Sequence[Layer]) -> ir.Model:
    """Traces the decoder for any batch and any sizes of the caches, one token per row."""
    batch, room, source_room = 2, 11, 13
    num_heads, head_dim = layout.layers[0]
    shape = (batch, num_heads, room, head_dim)
    source_shape = (batch, num_heads, source_room, head_dim)
    inputs: dict[str, Any] = {
        "input_ids": torch.ones(batch, 1, dtype=torch.int64),
        "position_ids": torch.full((batch, 1), 4),
        "seqlens_k": torch.full((batch,), 4, dtype=torch.int32),
        "total_sequence_length": torch.tensor(5, dtype=torch.int32),
        "source_seqlens_k": torch.full((batch,), 6, dtype=torch.int32),
        "total_source_length": torch.tensor(7, dtype=torch.int32),
        "rows": torch.tensor([0, 1, 1]),
        "past": [(torch.zeros(shape), torch.zeros(shape)) for _ in layers],
        "cross": [(torch.zeros(source_shape), torch.zeros(source_shape)) for _ in layers],
    }
    dynamic = torch.export.Dim.DYNAMIC
    cache = ({0: dynamic, 2: dynamic}, {0: dynamic, 2: dynamic})
    shapes: dict[str, Any] = {
        "input_ids": {0: dynamic},
        "position_ids": {0: dynamic},
        "seqlens_k": {0: dynamic},
        "total_sequence_length": {},
        "source_seqlens_k": {0: dynamic},
        "total_source_length": {},
        "rows": {0: dynamic},
        "past": [cache] * len(layout.layers),
        "cross": [cache] * len(layout.layers),
    }
    names = [*list(inputs)[:-2], *_names("past", layout), *_names("cross", layout)]
    outputs = ["logits", *_names("present", layout)]
    return to_onnx_ir(DecoderGraph(model, layers), inputs, shapes, names, outputs)


def _names(prefix: str, layout: KVLayout) -> list[str]:
    kinds = (f"{prefix}_key", f"{prefix}_value")
    return [f"{kind}.{index}" for index in range(len(layout.layers)) for kind in kinds]
