"""Recurrent layers in plain NumPy: one token after the other, as their papers write them.

Nothing here is shared with the graph writer. LFM2's convolutions are those of transformers'
``modeling_lfm2``, gated delta nets (arXiv:2412.06464, equation 10) those of ``modeling_qwen3_next``
and ``modeling_qwen3_5``, Mamba 2 (arXiv:2405.21060) that of ``modeling_granitemoehybrid``.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial_export.direct.weights import Weights

Floats = NDArray[np.float32]


class RecurrentReference:
    """The recurrent layers of a configuration."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._names = weights.shapes()

    def has(self, layer: str) -> bool:
        """Whether a layer is recurrent."""
        return any(f"{layer}.{end}" in self._names for end in _MARKS)

    def compute(
        self, layer: str, values: Floats, ends: NDArray[np.int64], scales: Floats | None = None
    ) -> Floats:
        """What a layer adds: (num_tokens, hidden_size), of texts that end before ``ends``.

        ``scales``: what the columns of Mamba's first product are multiplied by.
        """
        if f"{layer}.conv.in_proj.weight" in self._names:
            return self._short_convolution(f"{layer}.conv", values, ends)
        if f"{layer}.linear_attn.A_log" in self._names:
            return self._delta_net(f"{layer}.linear_attn", values, ends)
        return self._mamba(f"{layer}.mamba", values, ends, scales)

    def _short_convolution(self, name: str, values: Floats, ends: NDArray[np.int64]) -> Floats:
        first, second, inner = np.split(self._linear(values, f"{name}.in_proj"), 3, axis=-1)
        mixed = self._convolved(first * inner, f"{name}.conv", ends)
        return self._linear(second * mixed, f"{name}.out_proj")

    def _delta_net(self, name: str, values: Floats, ends: NDArray[np.int64]) -> Floats:
        config = self._config
        keys = int(config.get("linear_num_key_heads", 16))
        heads = int(config.get("linear_num_value_heads", 32))
        key_size = int(config.get("linear_key_head_dim", 128))
        size, count = int(config.get("linear_value_head_dim", 128)), len(values)
        each = heads // keys
        if f"{name}.in_proj_qkvz.weight" in self._names:
            packed = self._linear(values, f"{name}.in_proj_qkvz").reshape(count, keys, -1)
            places = np.cumsum([key_size, key_size, each * size])
            *parts, gate = (part.reshape(count, -1) for part in np.split(packed, places, axis=-1))
            joined = np.concatenate(parts, axis=-1)
            both = self._linear(values, f"{name}.in_proj_ba").reshape(count, keys, -1)
            beta, step = both[..., :each].reshape(count, -1), both[..., each:].reshape(count, -1)
        else:
            joined, gate = (self._linear(values, f"{name}.in_proj_{part}") for part in ("qkv", "z"))
            beta, step = (self._linear(values, f"{name}.in_proj_{part}") for part in "ba")
        mixed = silu(self._convolved(joined, f"{name}.conv1d", ends))
        places = np.cumsum([keys * key_size, keys * key_size])
        query, key, value = np.split(mixed, places, axis=-1)
        query, key = (
            np.repeat(_unit(part.reshape(count, keys, key_size)), each, axis=1)
            for part in (query, key)
        )
        query = query / np.float32(np.sqrt(key_size))
        value = value.reshape(count, heads, size)
        decay = np.exp(
            self._decay(name) * _softplus(step + self._weights.values(f"{name}.dt_bias"))
        )
        beta = (1 / (1 + np.exp(-beta))).astype(np.float32)
        output = np.empty_like(value)
        state = np.zeros((heads, key_size, size), np.float32)
        for token in range(count):
            if token in ends:
                state[:] = 0
            state = state * decay[token][:, None, None]
            held = np.einsum("hk,hkv->hv", key[token], state)
            change = (value[token] - held) * beta[token][:, None]
            state = state + key[token][:, :, None] * change[:, None, :]
            output[token] = np.einsum("hk,hkv->hv", query[token], state)
        normed = _normalized(output, self._epsilon) * self._weights.values(f"{name}.norm.weight")
        gated = normed * silu(gate.reshape(count, heads, size))
        return self._linear(gated.reshape(count, -1), f"{name}.out_proj")

    def _mamba(
        self, name: str, values: Floats, ends: NDArray[np.int64], scales: Floats | None
    ) -> Floats:
        config, count = self._config, len(values)
        heads = len(self._weights.values(f"{name}.D"))
        groups = int(config.get("mamba_n_groups", 1))
        width = self._names[f"{name}.out_proj.weight"][1]
        channels = self._names[f"{name}.conv1d.weight"][0]
        product = self._linear(values, f"{name}.in_proj")
        product = product if scales is None else product * scales
        gate, joined, step = np.split(product, [width, width + channels], axis=-1)
        mixed = silu(self._convolved(joined, f"{name}.conv1d", ends))
        inner, key, query = np.split(mixed, [width, (width + channels) // 2], axis=-1)
        inner = inner.reshape(count, heads, -1)
        key, query = (
            np.repeat(part.reshape(count, groups, -1), heads // groups, axis=1)
            for part in (key, query)
        )
        least, most = _limits(config)
        step = _softplus(step + self._weights.values(f"{name}.dt_bias"))
        step = np.clip(step, np.float32(least), np.float32(most))
        decay = np.exp(self._decay(name) * step)
        output = np.empty_like(inner)
        state = np.zeros((heads, key.shape[-1], inner.shape[-1]), np.float32)
        for token in range(count):
            if token in ends:
                state[:] = 0
            added = key[token][:, :, None] * (step[token][:, None] * inner[token])[:, None, :]
            state = state * decay[token][:, None, None] + added
            output[token] = np.einsum("hk,hkv->hv", query[token], state)
        output = output + self._weights.values(f"{name}.D")[:, None] * inner
        gated = output.reshape(count, width) * silu(gate)
        if f"{name}.norm.weight" in self._names:
            parts = _normalized(gated.reshape(count, groups, -1), self._epsilon)
            gated = parts.reshape(count, width) * self._weights.values(f"{name}.norm.weight")
        return self._linear(gated, f"{name}.out_proj")

    @property
    def _epsilon(self) -> float:
        return float(self._config["rms_norm_eps"])

    def _decay(self, name: str) -> Floats:
        logarithms: Floats = -np.exp(self._weights.values(f"{name}.A_log"))
        return logarithms

    def _convolved(self, values: Floats, name: str, ends: NDArray[np.int64]) -> Floats:
        """Of each channel by itself, over a token and those before it in its text."""
        weight = self._weights.values(f"{name}.weight")[:, 0]
        taps = weight.shape[1]
        parts = []
        for part in np.split(values, ends):
            padded = np.concatenate([np.zeros((taps - 1, part.shape[1]), np.float32), part])
            windows = np.lib.stride_tricks.sliding_window_view(padded, taps, axis=0)
            parts.append(np.einsum("tck,ck->tc", windows, weight))
        mixed: Floats = np.concatenate(parts)
        if f"{name}.bias" in self._names:
            mixed = mixed + self._weights.values(f"{name}.bias")
        return mixed

    def _linear(self, values: Floats, name: str) -> Floats:
        product = values @ self._weights.values(f"{name}.weight").T
        if f"{name}.bias" in self._names:
            product = product + self._weights.values(f"{name}.bias")
        return product


_MARKS = ("conv.in_proj.weight", "linear_attn.A_log", "mamba.A_log")


def silu(values: Floats) -> Floats:
    """A value times its sigmoid."""
    with np.errstate(over="ignore"):
        active: Floats = values / (1 + np.exp(-values))
    return active


def _softplus(values: Floats) -> Floats:
    found: Floats = np.logaddexp(np.float32(0), values)
    return found


def _unit(heads: Floats) -> Floats:
    squares = np.sum(np.square(heads), axis=-1, keepdims=True)
    unit: Floats = heads / np.sqrt(squares + np.float32(1e-6))
    return unit


def _normalized(values: Floats, epsilon: float) -> Floats:
    squares = np.mean(np.square(values), axis=-1, keepdims=True)
    normed: Floats = values / np.sqrt(squares + np.float32(epsilon))
    return normed


def _limits(config: Mapping[str, Any]) -> tuple[float, float]:
    """Of steps; infinity is an object in JSON."""
    least, most = config.get("time_step_limit") or (0.0, np.inf)
    return float(least), np.inf if isinstance(most, dict) else float(most)
