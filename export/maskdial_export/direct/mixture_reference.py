"""Mixtures of experts in plain NumPy, written from transformers' modeling files."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial_export.direct.recurrent_reference import silu
from maskdial_export.direct.weights import Weights

Floats = NDArray[np.float32]


class MixtureReference:
    """The experts of a configuration."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._names = weights.shapes()
        self._kind = str(config["model_type"])
        self._block = _BLOCKS.get(self._kind, "mlp")
        self._gate = _GATES.get(self._kind, "gate")

    def has(self, layer: str) -> bool:
        """Whether a layer has experts."""
        return f"{layer}.{self._block}.{self._gate}.weight" in self._names

    def compute(self, layer: str, values: Floats) -> Floats:
        """What they add: (num_tokens, hidden_size). Each expert's weights are read once."""
        name = f"{layer}.{self._block}"
        best, shares = self._choose(name, values)
        total = np.zeros_like(values)
        for expert in range(self._names[f"{name}.{self._gate}.weight"][0]):
            tokens, places = np.nonzero(best == expert)
            if len(tokens):
                found = self._expert(f"{name}.experts.{expert}", values[tokens])
                total[tokens] += found * shares[tokens, places][:, None]
        common = f"{name}.shared_expert"
        if f"{common}s.up_proj.weight" in self._names:  # GLM's, which has no gate
            return total + self._gated_mlp(f"{common}s", values, _PROJECTIONS)
        if f"{common}.up_proj.weight" not in self._names:
            return total
        shared = self._gated_mlp(common, values, _PROJECTIONS)
        return total + shared * _sigmoid(self._linear(values, f"{common}_gate"))

    def _choose(self, name: str, values: Floats) -> tuple[NDArray[np.int64], Floats]:
        """The experts of each token, and their weights: (num_tokens, num_experts_per_tok) each."""
        config, kind = self._config, self._kind
        scores = self._linear(values, f"{name}.{self._gate}")
        if kind in _SIGMOIDS:
            scores = _sigmoid(scores)
        elif kind not in _CHOOSE_FIRST:
            scores = _softmax(scores)
        ranked = scores
        for correction in ("expert_bias", "gate.e_score_correction_bias"):
            if f"{name}.{correction}" in self._names:
                ranked = scores + self._weights.values(f"{name}.{correction}")
        if self._in_groups():
            ranked = self._within_groups(ranked)
        count = int(config.get("num_experts_per_tok") or 2)
        best = np.argsort(-ranked, axis=-1, kind="stable")[:, :count]
        shares = np.take_along_axis(scores, best, axis=-1)
        if kind in _CHOOSE_FIRST:
            return best, _softmax(shares)
        if kind != "deepseek_v2" and config.get("norm_topk_prob", kind in _NORMALIZES):
            least = np.float32(_SIGMOIDS.get(kind, 0))
            shares = shares / (shares.sum(axis=-1, keepdims=True) + least)
        return best, shares * np.float32(config.get("routed_scaling_factor", 1.0))

    def _in_groups(self) -> bool:
        if self._kind == "deepseek_v2":
            return bool(self._config.get("topk_method") == "group_limited_greedy")
        return self._kind in ("deepseek_v3", "glm4_moe_lite", "nemotron_h")

    def _within_groups(self, ranked: Floats) -> Floats:
        """Without the experts of groups whose best, or two best, are lower than others'."""
        count, chosen = int(self._config["n_group"]), int(self._config["topk_group"])
        apart = ranked.reshape(len(ranked), count, -1)
        most = 1 if self._kind == "deepseek_v2" else 2
        ranks = np.sort(apart, axis=-1)[..., -most:].sum(axis=-1)
        best = np.argsort(-ranks, axis=-1, kind="stable")[:, :chosen]
        masked = np.full_like(apart, -np.inf)
        np.put_along_axis(
            masked, best[..., None], np.take_along_axis(apart, best[..., None], axis=1), axis=1
        )
        return masked.reshape(ranked.shape)

    def _expert(self, name: str, values: Floats) -> Floats:
        if self._kind != "gpt_oss":
            named = ("w1", "w3", "w2") if self._kind in _NUMBERED else _PROJECTIONS
            return self._gated_mlp(name, values, named)
        limit = np.float32(self._config.get("swiglu_limit", 7.0))
        alpha = np.float32(self._config.get("swiglu_alpha", 1.702))
        gate = np.minimum(self._linear(values, f"{name}.gate_proj"), limit)
        up = np.clip(self._linear(values, f"{name}.up_proj"), -limit, limit)
        return self._linear((up + 1) * gate * _sigmoid(alpha * gate), f"{name}.down_proj")

    def _gated_mlp(self, name: str, values: Floats, named: tuple[str, str, str]) -> Floats:
        gate, up, down = (f"{name}.{each}" for each in named)
        if f"{gate}.weight" not in self._names:  # Nemotron's
            return self._linear(np.square(np.maximum(self._linear(values, up), 0)), down)
        return self._linear(silu(self._linear(values, gate)) * self._linear(values, up), down)

    def _linear(self, values: Floats, name: str) -> Floats:
        product = values @ self._weights.values(f"{name}.weight").T
        if f"{name}.bias" in self._names:
            product = product + self._weights.values(f"{name}.bias")
        return product


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_SIGMOIDS = {
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "nemotron_h"), 1e-20),
    "lfm2_moe": 1e-6,
}
"""Families whose weights are sigmoids, and what is added to their sum."""
_BLOCKS = {
    "granitemoe": "block_sparse_moe",
    "granitemoehybrid": "block_sparse_moe",
    "lfm2_moe": "feed_forward",
    "mixtral": "block_sparse_moe",
}
_GATES = {
    "gpt_oss": "router",
    **dict.fromkeys(("granitemoe", "granitemoehybrid"), "router.layer"),
}
_NUMBERED = ("lfm2_moe", "mixtral")
_CHOOSE_FIRST = ("gpt_oss", "granitemoe", "granitemoehybrid")
_NORMALIZES = (
    *("deepseek_v3", "glm4_moe", "glm4_moe_lite", "lfm2_moe", "mixtral", "nemotron_h"),
    *("qwen3_5_moe_text", "qwen3_next"),
)


def _softmax(scores: Floats) -> Floats:
    likely: Floats = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: Floats = likely / likely.sum(axis=-1, keepdims=True)
    return shares


def _sigmoid(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        found = 1 / (1 + np.exp(-values))
    return found.astype(np.float32)
