"""NeoBERT in plain NumPy, from what its makers' code computes: projections by heads, RMS norms
before attention and MLP, and rotation of neighboring columns as complex numbers.

It reads the checkpoint's own tensors, where the graph has parts of them in another order.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from maskdial_export.direct.recurrent_reference import silu
from maskdial_export.direct.reference import Floats, Ids
from maskdial_export.direct.weights import Weights

_THETA = 10_000.0


class NeoBERTReference:
    """The encoder that a configuration describes."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        """``weights``: as the checkpoint has them."""
        self._config = config
        self._weights = weights
        self._base = "model." if "model.encoder.weight" in weights.shapes() else ""

    def hidden(self, ids: Ids) -> Floats:
        """The hidden states of a text, (length, hidden_size)."""
        table = f"{self._base}encoder.weight"
        rows = [self._weights.values(table, slice(each, each + 1)) for each in ids.tolist()]
        states: Floats = np.concatenate(rows)
        for index in range(self._config["num_hidden_layers"]):
            layer = f"transformer_encoder.{index}"
            states = states + self._attended(layer, self._norm(states, f"{layer}.attention_norm"))
            both = self._product(self._norm(states, f"{layer}.ffn_norm"), f"{layer}.ffn.w12")
            gate, up = np.split(both, 2, axis=-1)
            states = states + self._product(silu(gate) * up, f"{layer}.ffn.w3")
        return self._norm(states, "layer_norm")

    def _attended(self, layer: str, values: Floats) -> Floats:
        length, heads = len(values), self._config["num_attention_heads"]
        by_heads = self._product(values, f"{layer}.qkv").reshape(length, heads, -1)
        query, key, value = np.split(by_heads, 3, axis=-1)
        scores = np.einsum("ihd,jhd->hij", self._turned(query), self._turned(key))
        scores = scores / np.float32(np.sqrt(query.shape[-1]))
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = shares / shares.sum(axis=-1, keepdims=True)
        joined = np.einsum("hij,jhd->ihd", shares, value).reshape(length, -1)
        return self._product(joined, f"{layer}.wo")

    def _turned(self, heads: Floats) -> Floats:
        size = heads.shape[-1]
        speeds = _THETA ** (-np.arange(0, size, 2) / size)
        turns = np.exp(1j * np.arange(len(heads))[:, None] * speeds)[:, None]
        pairs = heads[..., 0::2] + 1j * heads[..., 1::2]
        turned = pairs * turns
        found: Floats = np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape)
        return found.astype(np.float32)

    def _norm(self, values: Floats, name: str) -> Floats:
        epsilon = np.float32(self._config.get("norm_eps", 1e-6))
        roots = np.sqrt(np.mean(np.square(values), axis=-1, keepdims=True) + epsilon)
        found: Floats = values / roots * self._weights.values(f"{self._base}{name}.weight")
        return found

    def _product(self, values: Floats, name: str) -> Floats:
        found: Floats = values @ self._weights.values(f"{self._base}{name}.weight").T
        return found
