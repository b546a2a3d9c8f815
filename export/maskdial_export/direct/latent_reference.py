"""The NumPy decoder of families with latent attention: DeepSeek 2 and 3, GLM-4.7-Flash, MiniCPM 3.

What they share with others is `maskdial_export.direct.reference`'s. As that, it is written from
transformers' modeling files and not from the graph writer.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from maskdial_export.direct.reference import Floats, Reference
from maskdial_export.direct.weights import Weights

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
_EPSILON = 1e-6  # of the norms within, whatever the configuration says


class LatentReference(Reference):
    """A decoder whose keys and values are products of one short row."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        super().__init__(config, weights)
        self._kv_heads = self._heads
        self._turning, self._still = (
            int(config[f"qk_{part}_head_dim"]) for part in ("rope", "nope")
        )
        self._size = self._turning  # of what is turned

    def logits(self, hidden: Floats) -> Floats:
        base = self._config.get("dim_model_base", 256)
        if self._kind == "minicpm3" and base is not None:
            hidden = hidden / np.float32(self._hidden_size / base)
        return super().logits(hidden)

    def _times(self, what: str) -> float:
        """MiniCPM's, of embeddings and of what a layer adds."""
        if self._kind != "minicpm3":
            return super()._times(what)
        if what == "embedding":
            return float(self._config.get("scale_emb", 12))
        depth = self._config.get("scale_depth", 1.4)
        return 1.0 if depth is None else depth / math.sqrt(self._config["num_hidden_layers"])

    def _attention(self, index: int, values: Floats) -> Floats:
        name, count = f"{self._base}layers.{index}.self_attn", len(values)
        if f"{name}.q_proj.weight" in self._names:
            query = self._linear(values, f"{name}.q_proj")
        else:
            row = self._inner_norm(self._linear(values, f"{name}.q_a_proj"), f"{name}.q_a")
            query = self._linear(row, f"{name}.q_b_proj")
        both = self._linear(values, f"{name}.kv_a_proj_with_mqa")
        row, shared = both[:, : -self._turning], both[:, -self._turning :]
        inner = self._linear(self._inner_norm(row, f"{name}.kv_a"), f"{name}.kv_b_proj")
        query, inner = (part.reshape(count, self._heads, -1) for part in (query, inner))
        parts = zip(*(np.split(part, self._ends) for part in (query, inner, shared)), strict=True)
        joined = np.concatenate([self._attend_latent(index, *each) for each in parts])
        return self._linear(joined, f"{name}.o_proj")

    def _attend_latent(self, index: int, query: Floats, inner: Floats, shared: Floats) -> Floats:
        """Within one text."""
        turned = self._rotated(shared[:, None], slides=False)
        key = np.concatenate(
            [inner[..., : self._still], np.repeat(turned, self._heads, axis=1)], axis=-1
        )
        query = np.concatenate(
            [query[..., : self._still], self._rotated(query[..., self._still :], slides=False)],
            axis=-1,
        )
        return self._attend(index, query, key, inner[..., self._still :])

    def _inner_norm(self, values: Floats, name: str) -> Floats:
        squares = np.mean(np.square(values), axis=-1, keepdims=True)
        normed = values / np.sqrt(squares + np.float32(_EPSILON))
        scaled: Floats = normed * self._weights.values(f"{name}_layernorm.weight")
        return scaled

    def _turns(self, index: int) -> bool:
        return False  # before the heads are joined, above

    def _pairs_neighbors(self) -> bool:
        return self._kind != "minicpm3" and bool(self._config.get("rope_interleave", True))

    def _scale(self) -> float:
        scale = (self._still + self._turning) ** -0.5
        rope = self._rope(slides=False)
        kind, times = rope.get("rope_type") or rope.get("type"), rope.get("mscale_all_dim") or 0
        if kind in (None, "default") or rope.get("factor", 1) <= 1:
            return float(scale)
        return float(scale * (1 + 0.1 * times * math.log(rope["factor"])) ** 2)
