"""The NumPy decoder of families with layer norms: GPT-2, Phi, StarCoder 2, Cohere.

What they share with others is `maskdial_export.direct.reference`'s: attention within a text, and
rotation. As that, it is written from transformers' modeling files and not from the graph writer.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from maskdial_export.direct.gemma4_reference import Gemma3nReference, Gemma4Reference
from maskdial_export.direct.latent_reference import LATENT, LatentReference
from maskdial_export.direct.mamba_reference import MAMBAS, MambaReference
from maskdial_export.direct.recurrent_reference import silu
from maskdial_export.direct.reference import Floats, Reference
from maskdial_export.direct.renamed import RenamedWeights, Renaming
from maskdial_export.direct.weights import Weights

# Their modules -> those of Llama
_NAMES: Mapping[str, Renaming] = {
    "gpt2": (
        (r"transformer\.wte", "model.embed_tokens"),
        (r"transformer\.wpe", "model.embed_positions"),
        (r"transformer\.ln_f", "model.norm"),
        (r"transformer\.h", "model.layers"),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"attn\.c_attn", "self_attn.qkv_proj"),
        (r"attn\.c_proj", "self_attn.o_proj"),
        (r"c_fc", "up_proj"),
        (r"mlp\.c_proj", "mlp.down_proj"),
    ),
    "phi": (
        (r"final_layernorm", "norm"),
        (r"self_attn\.dense", "self_attn.o_proj"),
        (r"fc1", "up_proj"),
        (r"fc2", "down_proj"),
    ),
    "starcoder2": ((r"c_fc", "up_proj"), (r"c_proj", "down_proj")),
    "cohere": (),
    "cohere2": (),
}
_COHERE = ("cohere", "cohere2")
_GPT2 = {
    "n_embd": ("hidden_size", 768),
    "n_layer": ("num_hidden_layers", 12),
    "n_head": ("num_attention_heads", 12),
    "activation_function": ("hidden_act", "gelu_new"),
}
_EPSILONS = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")


def make_reference(config: Mapping[str, Any], weights: Weights) -> Reference:
    """The decoder that a configuration describes."""
    if config["model_type"] in LATENT:
        return LatentReference(config, weights)
    if config["model_type"] in MAMBAS:
        return MambaReference(config, weights)
    if config["model_type"] == "gemma4_text":
        return Gemma4Reference(config, weights)
    if config["model_type"] == "gemma3n_text":
        return Gemma3nReference(config, weights)
    kind = LayerNormReference if config["model_type"] in _NAMES else Reference
    return kind(config, weights)


class LayerNormReference(Reference):
    """A decoder with layer norms, of which some compute attention and MLP side by side."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        kind = str(config["model_type"])
        found = dict(config)
        for theirs, (ours, usual) in _GPT2.items() if kind == "gpt2" else ():
            found[ours] = config.get(theirs, usual)
        stated = [config[key] for key in _EPSILONS if key in config]
        found["rms_norm_eps"] = stated[0] if stated else 1e-5
        found.setdefault("tie_word_embeddings", kind != "phi")
        super().__init__(found, RenamedWeights(weights, _NAMES[kind]))

    def logits(self, hidden: Floats) -> Floats:
        found = super().logits(hidden)
        if "lm_head.bias" in self._names:
            found = found + self._weights.values("lm_head.bias")
        if self._kind in _COHERE:
            found = found * np.float32(self._config.get("logit_scale", 0.0625))
        return found

    def _layer(self, index: int, states: Floats) -> Floats:
        prefix = f"model.layers.{index}"
        first = self._norm(states, f"{prefix}.input_layernorm")
        attended = self._attention(index, first)
        if f"{prefix}.post_attention_layernorm.weight" not in self._names:  # side by side
            return states + attended + self._mlp(prefix, first)
        states = states + attended
        second = self._norm(states, f"{prefix}.post_attention_layernorm")
        return states + self._mlp(prefix, second)

    def _norm(self, values: Floats, name: str) -> Floats:
        centered = values - values.mean(axis=-1, keepdims=True)
        variance = np.mean(np.square(centered), axis=-1, keepdims=True)
        scaled = centered / np.sqrt(variance + np.float32(self._epsilon))
        normalized: Floats = scaled * self._weights.values(f"{name}.weight")
        if f"{name}.bias" in self._names:
            normalized = normalized + self._weights.values(f"{name}.bias")
        return normalized

    def _mlp(self, prefix: str, values: Floats) -> Floats:
        inner = self._linear(values, f"{prefix}.mlp.up_proj")
        if self._kind in _COHERE:
            inner = silu(self._linear(values, f"{prefix}.mlp.gate_proj")) * inner
        else:
            cube = inner + np.float32(0.044715) * inner**3
            bent = np.tanh(np.float32(math.sqrt(2 / math.pi)) * cube)
            inner = np.float32(0.5) * inner * (1 + bent)
        return self._linear(inner, f"{prefix}.mlp.down_proj")

    def _scale(self) -> float:
        return super()._scale() if self._config.get("scale_attn_weights", True) else 1.0

    def _slides(self, index: int) -> bool:
        config = self._config
        if self._kind == "starcoder2":
            return config.get("sliding_window") is not None
        if self._kind != "cohere2":
            return False
        kinds = config.get("layer_types")
        if kinds is not None:
            return bool(kinds[index] == "sliding_attention")
        return (index + 1) % int(config.get("sliding_window_pattern") or 4) != 0

    def _turns(self, index: int) -> bool:
        return self._kind != "gpt2" and (self._kind != "cohere2" or self._slides(index))
