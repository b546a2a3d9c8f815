"""The NumPy decoder of families of Mamba 2 beside attention: Nemotron-H, Falcon-H1, Bamba.

What they share with others is `maskdial_export.direct.reference`'s. As that, it is written from
transformers' modeling files and not from the graph writer.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from maskdial_export.direct.reference import Floats, Reference
from maskdial_export.direct.renamed import RenamedWeights, Renaming
from maskdial_export.direct.weights import Weights

_FED: Renaming = (
    (r"final_layernorm", "norm"),
    (r"pre_ff_layernorm", "post_attention_layernorm"),
    (r"feed_forward", "mlp"),
)
# Their modules -> those of Llama, and of Granite's Mamba
_NAMES: Mapping[str, Renaming] = {
    "bamba": _FED,
    "falcon_h1": _FED,
    "nemotron_h": (
        (r"model\.embeddings", "model.embed_tokens"),
        (r"norm_f", "norm"),
        (r"(layers\.\d+)\.norm", r"\1.input_layernorm"),
        (r"mixer\.([qkvo]_proj)", r"self_attn.\1"),
        (r"mixer\.(gate|experts|shared_experts|up_proj|down_proj)\b", r"mlp.\1"),
        (r"mixer", "mamba"),
    ),
}
MAMBAS = frozenset(_NAMES)


class MambaReference(Reference):
    """A decoder with Mamba 2 in the place of attention, or beside it."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        found, kind = dict(config), str(config["model_type"])
        if kind == "nemotron_h":
            pattern = config.get("layers_block_type") or config["hybrid_override_pattern"]
            found["num_hidden_layers"] = len(pattern)
            found["rms_norm_eps"] = config.get("layer_norm_epsilon", 1e-5)
            found["mamba_n_groups"] = config.get("n_groups", 8)
            found["time_step_limit"] = [config.get("time_step_min", 0.001), np.inf]
            found["head_dim"] = config.get("head_dim", 128)
        renamed = RenamedWeights(weights, _NAMES[kind])
        super().__init__(found, renamed)

    def logits(self, hidden: Floats) -> Floats:
        return super().logits(hidden) * np.float32(self._config.get("lm_head_multiplier", 1.0))

    def _times(self, what: str) -> float:
        return float(self._config.get(f"{what}_multiplier", 1.0))

    def _layer(self, index: int, states: Floats) -> Floats:
        prefix = f"model.layers.{index}"
        values = self._norm(states, f"{prefix}.input_layernorm")
        if self._kind == "falcon_h1":
            scale, vector = self._times("ssm_in"), self._of_columns(prefix)
            mixed = self._recurrent.compute(
                prefix, values * np.float32(scale), self._ends, vector
            ) * np.float32(self._times("ssm_out"))
            attended = self._attention(index, values * np.float32(self._times("attention_in")))
            states = states + mixed + attended * np.float32(self._times("attention_out"))
        elif self._recurrent.has(prefix) or f"{prefix}.self_attn.q_proj.weight" in self._names:
            states = states + self._mix(index, values)
        else:
            return states + self._feed(prefix, values)
        if self._kind == "nemotron_h":
            return states
        return states + self._mlp(prefix, self._norm(states, f"{prefix}.post_attention_layernorm"))

    def _of_columns(self, prefix: str) -> Floats:
        """What the columns of Mamba's first product are multiplied by."""
        heads, width = (
            self._names[f"{prefix}.mamba.{name}"][axis]
            for name, axis in (("D", 0), ("out_proj.weight", 1))
        )
        shared = (self._names[f"{prefix}.mamba.conv1d.weight"][0] - width) // 2
        times = self._config.get("ssm_multipliers") or [1.0] * 5
        return np.repeat(np.array(times, np.float32), [width, width, shared, shared, heads])

    def _mlp(self, prefix: str, values: Floats) -> Floats:
        name, up = f"{prefix}.mlp", self._linear(values, f"{prefix}.mlp.up_proj")
        if self._kind == "nemotron_h":
            return self._linear(np.square(np.maximum(up, 0)), f"{name}.down_proj")
        first, last = self._config.get("mlp_multipliers") or (1.0, 1.0)
        gate = self._linear(values, f"{name}.gate_proj") * np.float32(first)
        inner = up * gate / (1 + np.exp(-gate))
        return self._linear(inner, f"{name}.down_proj") * np.float32(last)

    def _linear(self, values: Floats, name: str) -> Floats:
        found = super()._linear(values, name)
        if name.endswith("self_attn.k_proj"):
            found = found * np.float32(self._times("key"))
        return found

    def _turns(self, index: int) -> bool:
        return self._kind != "nemotron_h"
