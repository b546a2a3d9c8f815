"""Gemma 4 in plain NumPy, written from transformers' modeling file, not from the graph writer."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from maskdial_export.direct.reference import Floats, Ids, Reference
from maskdial_export.direct.weights import Weights

_GELU = np.float32(math.sqrt(2 / math.pi))


class Gemma4Reference(Reference):
    """A decoder with heads of two sizes, and layers that read others' keys and values."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        super().__init__(config, weights)
        self._is_shifted = False
        count = int(config["num_hidden_layers"])
        given = config.get("layer_types")
        kinds = given or ["sliding_attention" if (i + 1) % 6 else "" for i in range(count)]
        self._near = [kind == "sliding_attention" for kind in kinds]
        if not given:
            self._near[-1] = False
        self._first_shared = count - int(config.get("num_kv_shared_layers") or 0)
        self._kept: dict[bool, tuple[Floats, Floats]] = {}
        self._inputs: Floats | None = None

    def hidden(self, *texts: Ids) -> Floats:
        """The hidden states that the output layer reads, (num_tokens, hidden_size)."""
        self._ends = np.cumsum([len(text) for text in texts])[:-1]
        tokens = np.concatenate(texts)
        root = np.float32(math.sqrt(self._hidden_size))
        states = self._rows("model.embed_tokens.weight", tokens) * root
        self._inputs = self._layer_inputs(tokens, states)
        for index in range(len(self._near)):
            states = self._layer(index, states)
        return self._norm(states, "model.norm")

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
        rope = self._config.get("rope_parameters") or {
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.25,
            },
        }
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


def _gelu(values: Floats) -> Floats:
    inner = np.tanh(_GELU * (values + np.float32(0.044715) * values * values * values))
    found: Floats = np.float32(0.5) * values * (1 + inner)
    return found
