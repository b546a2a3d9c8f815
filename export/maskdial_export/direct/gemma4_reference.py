"""Gemma 3n and 4 in plain NumPy, written from transformers' modeling files and not from the graph
writer."""

import math
import statistics
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from maskdial_export.direct.reference import Floats, Ids, Reference
from maskdial_export.direct.weights import Weights

_GELU = np.float32(math.sqrt(2 / math.pi))


class Gemma4Reference(Reference):
    """A decoder with heads of two sizes, and layers that read others' keys and values."""

    _PERIOD, _NUM_SHARED = 6, 0
    _ROPE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
        {
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
        }
    )

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        super().__init__(config, weights)
        self._is_shifted = False
        count = int(config["num_hidden_layers"])
        given = config.get("layer_types")
        kinds = given or [
            "sliding_attention" if (i + 1) % self._PERIOD else "" for i in range(count)
        ]
        self._near = [kind == "sliding_attention" for kind in kinds]
        if not given and self._PERIOD == 6:
            self._near[-1] = False
        self._first_shared = count - int(config.get("num_kv_shared_layers", self._NUM_SHARED))
        self._kept: dict[bool, tuple[Floats, Floats]] = {}
        self._inputs: Floats | None = None

    def hidden(self, *texts: Ids) -> Floats:
        """The hidden states that the output layer reads, (num_tokens, hidden_size)."""
        self._ends = np.cumsum([len(text) for text in texts])[:-1]
        tokens = np.concatenate(texts)
        root = np.float32(math.sqrt(self._hidden_size))
        states = self._rows("model.embed_tokens.weight", tokens) * root
        self._inputs = self._layer_inputs(tokens, states)
        return self._norm(self._layers(states), "model.norm")

    def _layers(self, states: Floats) -> Floats:
        for index in range(len(self._near)):
            states = self._layer(index, states)
        return states

    def _rows(self, name: str, tokens: Ids) -> Floats:
        known, places = np.unique(tokens, return_inverse=True)
        rows = [self._weights.values(name, slice(each, each + 1)) for each in known.tolist()]
        found: Floats = np.concatenate(rows)[places]
        return found

    def _layer_inputs(self, tokens: Ids, embedded: Floats) -> Floats | None:
        """(num_layers, num_tokens, size)."""
        size = self._config.get("hidden_size_per_layer_input", 256)
        if not size:
            return None
        shape = len(tokens), len(self._near), size
        rows = self._names["model.embed_tokens_per_layer.weight"][0]
        tokens = np.where(tokens < rows, tokens, 0)
        own = self._rows("model.embed_tokens_per_layer.weight", tokens) * np.float32(size**0.5)
        projected = self._linear(embedded, "model.per_layer_model_projection")
        projected = projected * np.float32(self._hidden_size**-0.5)
        normed = self._norm(projected.reshape(shape), "model.per_layer_projection_norm")
        both: Floats = (normed + own.reshape(shape)) * np.float32(2**-0.5)
        return both.swapaxes(0, 1)

    def _layer(self, index: int, states: Floats) -> Floats:
        name = f"model.layers.{index}"
        attended = self._attention(index, self._norm(states, f"{name}.input_layernorm"))
        states = states + self._norm(attended, f"{name}.post_attention_layernorm")
        inner = self._mlp(name, self._norm(states, f"{name}.pre_feedforward_layernorm"))
        if self._config.get("enable_moe_block"):
            inner = self._norm(inner, f"{name}.post_feedforward_layernorm_1")
            inner = inner + self._experts(name, states)
        states = states + self._norm(inner, f"{name}.post_feedforward_layernorm")
        if self._inputs is not None:
            gate = _gelu(self._linear(states, f"{name}.per_layer_input_gate"))
            own = self._linear(gate * self._inputs[index], f"{name}.per_layer_projection")
            states = states + self._norm(own, f"{name}.post_per_layer_input_norm")
        return states * self._weights.values(f"{name}.layer_scalar")

    def _experts(self, name: str, states: Floats) -> Floats:
        normed = self._unit(states) * self._weights.values(f"{name}.router.scale")
        scores = self._linear(normed * np.float32(self._hidden_size**-0.5), f"{name}.router.proj")
        likely = np.exp(scores - scores.max(axis=-1, keepdims=True))
        likely = likely / likely.sum(axis=-1, keepdims=True)
        count = int(self._config["top_k_experts"])
        best = np.argsort(-likely, axis=-1, kind="stable")[:, :count]
        shares = np.take_along_axis(likely, best, axis=-1)
        shares = shares / shares.sum(axis=-1, keepdims=True)
        shares = shares * self._weights.values(f"{name}.router.per_expert_scale")[best]
        read = self._norm(states, f"{name}.pre_feedforward_layernorm_2")
        total = np.zeros_like(states)
        for expert in range(int(self._config["num_experts"])):
            rows, places = np.nonzero(best == expert)
            if len(rows):
                one = f"{name}.experts.{expert}"
                gate = _gelu(self._linear(read[rows], f"{one}.gate_proj"))
                inner = gate * self._linear(read[rows], f"{one}.up_proj")
                found = self._linear(inner, f"{one}.down_proj")
                total[rows] += found * shares[rows, places][:, None]
        return self._norm(total, f"{name}.post_feedforward_layernorm_2")

    def _unit(self, values: Floats) -> Floats:
        squares = np.mean(np.square(values), axis=-1, keepdims=True)
        found: Floats = values / np.sqrt(squares + np.float32(self._epsilon))
        return found

    def _attention(self, index: int, values: Floats) -> Floats:
        name, near = f"model.layers.{index}.self_attn", self._near[index]
        size = len(self._weights.values(f"{name}.q_norm.weight"))
        query = self._linear(values, f"{name}.q_proj").reshape(len(values), -1, size)
        query = self._norm(query, f"{name}.q_norm")
        if index < self._first_shared:
            own = self._linear(values, f"{name}.k_proj").reshape(len(values), -1, size)
            value = own
            if f"{name}.v_proj.weight" in self._names:
                value = self._linear(values, f"{name}.v_proj").reshape(own.shape)
            self._kept[near] = self._norm(own, f"{name}.k_norm"), self._unit(value)
        parts = (np.split(each, self._ends) for each in (query, *self._kept[near]))
        joined = [self._attend(index, *each) for each in zip(*parts, strict=True)]
        return self._linear(np.concatenate(joined), f"{name}.o_proj")

    def _attend(self, index: int, query: Floats, key: Floats, value: Floats) -> Floats:
        near = self._near[index]
        query, key = self._rotated(query, near), self._rotated(key, near)
        groups = self._heads // key.shape[1]
        query, key, value = (part.swapaxes(0, 1) for part in (query, key, value))
        key, value = np.repeat(key, groups, axis=0), np.repeat(value, groups, axis=0)
        places = np.arange(query.shape[1])
        distance = places[:, None] - places[None, :]
        hidden = distance < 0
        if near:
            hidden |= distance >= int(self._config.get("sliding_window") or 512)
        scores = np.where(hidden, np.float32(-np.inf), query @ key.swapaxes(1, 2))
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = shares / shares.sum(axis=-1, keepdims=True)
        attended: Floats = (shares @ value).swapaxes(0, 1).reshape(len(places), -1)
        return attended

    def _rotated(self, heads: Floats, slides: bool) -> Floats:
        """Turns (num_tokens, heads, size); without windows, only the first pairs do."""
        rope = self._config.get("rope_parameters") or self._ROPE
        own = rope["sliding_attention" if slides else "full_attention"]
        size = heads.shape[-1]
        speeds = float(own["rope_theta"]) ** (-np.arange(0, size, 2) / size)
        if own.get("rope_type") == "proportional":
            speeds[int(own.get("partial_rotary_factor", 1.0) * size // 2) :] = 0
            speeds = speeds / own.get("factor", 1.0)
        angles = np.arange(len(heads))[:, None] * speeds
        cos, sin = (each.astype(np.float32)[:, None] for each in (np.cos(angles), np.sin(angles)))
        left, right = heads[..., : size // 2], heads[..., size // 2 :]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Gemma3nReference(Gemma4Reference):
    """A decoder of several streams, (num_inputs, num_tokens, hidden_size)."""

    _PERIOD, _NUM_SHARED = 5, 15
    _ROPE = MappingProxyType(
        {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    )

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        super().__init__({"final_logit_softcapping": 30.0, **config}, weights)
        count = len(self._near)
        few = [0.95 if count > 10 and index < 10 else 0.0 for index in range(count)]
        self._sparse: list[float] = config.get("activation_sparsity_pattern") or few
        self._count = int(config.get("altup_num_inputs", 4))

    def _layers(self, states: Floats) -> Floats:
        streams = [states]
        for index in range(1, self._count):
            other = self._linear(states, f"model.altup_projections.{index - 1}")
            streams.append(_as_large(other, states))
        for index in range(len(self._near)):
            streams = self._streams(index, streams)
        found = [streams[0]]
        for index in range(1, self._count):
            other = self._linear(streams[index], f"model.altup_unembed_projections.{index - 1}")
            found.append(_as_large(other, streams[0]))
        mean: Floats = np.mean(found, axis=0).astype(np.float32)
        return mean

    def _streams(self, index: int, streams: list[Floats]) -> list[Floats]:
        name = f"model.layers.{index}"
        coefficients = self._linear(
            self._modalities(name, streams[0]), f"{name}.altup.prediction_coefs"
        )
        square = coefficients.reshape(len(coefficients), self._count, self._count)
        predicted = [*(np.einsum("tij,jth->ith", square, np.stack(streams)) + np.stack(streams))]
        normed = self._norm(predicted[0], f"{name}.input_layernorm")
        low = self._linear(normed, f"{name}.laurel.linear_left")
        low = self._linear(low, f"{name}.laurel.linear_right")
        beside = normed + self._norm(low, f"{name}.laurel.post_laurel_norm")
        attended = self._norm(self._attention(index, normed), f"{name}.post_attention_layernorm")
        states = (predicted[0] + attended + beside) / np.float32(math.sqrt(2))
        gate = self._norm(states, f"{name}.pre_feedforward_layernorm")
        inner = self._sparse_mlp(index, name, gate)
        states = states + self._norm(inner, f"{name}.post_feedforward_layernorm")
        missed = states - predicted[0]
        shares = self._linear(self._modalities(name, states), f"{name}.altup.correction_coefs") + 1
        found = [each + missed * shares[:, row, None] for row, each in enumerate(predicted)]
        first = found[0]
        if self._config.get("altup_correct_scale", True):
            first = first * self._weights.values(f"{name}.altup.correct_output_scale")
        assert self._inputs is not None, "all have them"
        own = _gelu(self._linear(first, f"{name}.per_layer_input_gate")) * self._inputs[index]
        own = self._linear(own, f"{name}.per_layer_projection")
        own = self._norm(own, f"{name}.post_per_layer_input_norm")
        return [found[0], *(each + own for each in found[1:])]

    def _sparse_mlp(self, index: int, name: str, values: Floats) -> Floats:
        gate = self._linear(values, f"{name}.mlp.gate_proj")
        if self._sparse[index]:
            deviations = statistics.NormalDist().inv_cdf(self._sparse[index])
            mean, spread = (of(gate, axis=-1, keepdims=True) for of in (np.mean, np.std))
            gate = np.maximum(gate - (mean + spread * np.float32(deviations)), 0)
        inner = _gelu(gate) * self._linear(values, f"{name}.mlp.up_proj")
        return self._linear(inner, f"{name}.mlp.down_proj")

    def _modalities(self, name: str, values: Floats) -> Floats:
        normed = self._norm(values, f"{name}.altup.router_norm") / np.float32(self._hidden_size)
        found: Floats = np.tanh(self._linear(normed, f"{name}.altup.modality_router"))
        return found


def _as_large(values: Floats, others: Floats) -> Floats:
    """Values whose squares' mean is that of others."""
    own, theirs = (np.mean(np.square(each), axis=-1, keepdims=True) for each in (values, others))
    found: Floats = values * np.sqrt(theirs) / np.sqrt(np.maximum(own, np.float32(1e-5)))
    return found


def _gelu(values: Floats) -> Floats:
    inner = np.tanh(_GELU * (values + np.float32(0.044715) * values * values * values))
    found: Floats = np.float32(0.5) * values * (1 + inner)
    return found
