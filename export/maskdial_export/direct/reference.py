"""A plain NumPy decoder, to compare a written graph with.

It is written from transformers' modeling files and not from the graph writer, with which it shares
nothing but the weights: it reads config.json itself, and computes in float32, one matrix at a time.
It is slow, and meant for a few dozen tokens, or one reading of some thousand.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial_export.direct.mixture_reference import MixtureReference
from maskdial_export.direct.recurrent_reference import RecurrentReference, silu
from maskdial_export.direct.weights import Weights, in_turn, row_chunks

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class Reference:
    """The decoder that a configuration describes."""

    def __init__(self, config: Mapping[str, Any], weights: Weights) -> None:
        self._config = config
        self._weights = weights
        self._names = weights.shapes()
        self._kind = str(config["model_type"])
        self._is_gemma = self._kind.startswith("gemma")
        self._is_granite = self._kind.startswith("granite")
        self._is_shifted = self._is_gemma or self._kind in _QWEN_HYBRIDS
        epsilon = config.get("norm_eps", 1e-5) if self._kind in _LFM2 else config["rms_norm_eps"]
        self._epsilon = float(epsilon)
        self._hidden_size = int(config["hidden_size"])
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config.get("num_key_value_heads") or self._heads)
        usual = {"qwen3": 128, "seed_oss": 128, "gpt_oss": 64, "glm4": 128, "ministral3": 128}.get(
            self._kind
        )
        if usual is None:
            usual = 256 if self._is_shifted else 0
        # A decoder that embeds has no module around it
        self._base = "" if "embed_tokens.weight" in self._names else "model."
        self._ahead = config.get("use_bidirectional_attention") or not config.get("is_causal", True)
        self._ends: Ids = np.zeros(0, np.int64)
        self._mixture = MixtureReference(config, weights)
        self._recurrent = RecurrentReference(config, weights)
        self._size = int(config.get("head_dim") or usual or self._hidden_size // self._heads)

    def hidden(self, *texts: Ids) -> Floats:
        """The hidden states that the output layer reads, (num_tokens, hidden_size).

        Those of several texts lie one after the other, and each weight is read once for all.
        """
        config = self._config
        table = f"{self._base}embed_tokens.weight"
        self._ends = np.cumsum([len(text) for text in texts])[:-1]
        tokens, places = np.unique(np.concatenate(texts), return_inverse=True)
        rows = [self._weights.values(table, slice(each, each + 1)) for each in tokens.tolist()]
        states = np.concatenate(rows)[places]
        if "model.embed_positions.weight" in self._names:
            learned = self._weights.values("model.embed_positions.weight")
            states = states + np.concatenate([learned[: len(text)] for text in texts])
        if self._is_gemma:
            states = states * np.float32(math.sqrt(self._hidden_size))
        states = states * np.float32(self._times("embedding"))
        for index in range(int(config["num_hidden_layers"])):
            states = self._layer(index, states)
        last = "embedding_norm" if self._kind in _LFM2 else "norm"
        return self._norm(states, f"{self._base}{last}")

    def logits(self, hidden: Floats) -> Floats:
        """The logits of hidden states: (num_rows, hidden_size) to (num_rows, vocab_size)."""
        config = self._config
        tied = config.get("tie_word_embeddings", self._is_gemma or self._kind in _TIED)
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        logits = self._product(hidden, name)
        if self._is_granite:
            logits = logits / np.float32(config.get("logits_scaling", 1.0))
        cap = config.get("final_logit_softcapping", 30.0 if self._kind == "gemma2" else None)
        return logits if not cap else np.tanh(logits / np.float32(cap)) * np.float32(cap)

    def _layer(self, index: int, states: Floats) -> Floats:
        prefix = f"{self._base}layers.{index}"
        four_norms = f"{prefix}.pre_feedforward_layernorm.weight" in self._names
        norms_after = self._kind in ("exaone4", "olmo2", "olmo3")
        residual = states
        if norms_after:
            states = residual + self._norm(
                self._attention(index, states), f"{prefix}.post_attention_layernorm"
            )
            after = self._norm(self._mlp(prefix, states), f"{prefix}.post_feedforward_layernorm")
            return states + after
        first, second = "input_layernorm", "post_attention_layernorm"
        if self._kind in _LFM2:
            first, second = "operator_norm", "ffn_norm"
        states = self._mix(index, self._norm(states, f"{prefix}.{first}"))
        if self._kind == "glm4":
            states = residual + self._norm(states, f"{prefix}.post_self_attn_layernorm")
            inner = self._mlp(prefix, self._norm(states, f"{prefix}.{second}"))
            return states + self._norm(inner, f"{prefix}.post_mlp_layernorm")
        if four_norms:  # Gemma 2 and 3
            states = residual + self._norm(states, f"{prefix}.post_attention_layernorm")
            inner = self._mlp(prefix, self._norm(states, f"{prefix}.pre_feedforward_layernorm"))
            return states + self._norm(inner, f"{prefix}.post_feedforward_layernorm")
        times = np.float32(self._times("residual"))
        states = residual + states * times
        inner = self._feed(prefix, self._norm(states, f"{prefix}.{second}"))
        return states + inner * times

    def _times(self, what: str) -> float:
        """What embeddings, or what a layer adds, are multiplied by."""
        if not self._is_granite:
            return 1.0
        return float(self._config.get(f"{what}_multiplier", 1.0))

    def _norm(self, values: Floats, name: str) -> Floats:
        weight = self._weights.values(f"{name}.weight")
        weight = weight + np.float32(1) if self._is_shifted else weight
        squares = np.mean(np.square(values), axis=-1, keepdims=True)
        roots = np.sqrt(squares + np.float32(self._epsilon))
        normalized: Floats = values / roots * weight
        return normalized

    def _linear(self, values: Floats, name: str) -> Floats:
        product = self._product(values, f"{name}.weight")
        if f"{name}.bias" in self._names:
            product = product + self._weights.values(f"{name}.bias")
        return product

    def _product(self, values: Floats, name: str) -> Floats:
        """Rows times a matrix, of which a part is in memory at a time.

        The few rows are the right factor, with which BLAS is twice as fast as with them as the
        left one.
        """
        parts = row_chunks(*self._names[name][:2])
        turned = np.ascontiguousarray(values.T)
        # An export's BLAS has one thread, so parts are multiplied on all cores
        products = in_turn(lambda rows: self._weights.values(name, rows) @ turned, parts)
        return np.ascontiguousarray(np.concatenate(list(products)).T)

    def _feed(self, prefix: str, values: Floats) -> Floats:
        """The MLP of a layer, or its mixture of experts, or both."""
        if not self._mixture.has(prefix):
            return self._mlp(prefix, values)
        mixed = self._mixture.compute(prefix, values)
        if f"{prefix}.shared_mlp.input_linear.weight" in self._names:
            mixed = mixed + self._mlp(prefix, values)
        return mixed

    def _mlp(self, prefix: str, values: Floats) -> Floats:
        first, second, last = (f"{prefix}.mlp.{name}_proj" for name in ("gate", "up", "down"))
        packed = f"{prefix}.mlp.gate_up_proj"
        if self._kind in _LFM2:
            first, second, last = (f"{prefix}.feed_forward.{name}" for name in ("w1", "w3", "w2"))
        if self._kind == "granitemoehybrid":
            packed, last = (f"{prefix}.shared_mlp.{part}_linear" for part in ("input", "output"))
        if f"{packed}.weight" in self._names:
            gate, up = np.split(self._linear(values, packed), 2, axis=-1)
        else:
            gate, up = self._linear(values, first), self._linear(values, second)
        if self._is_gemma:
            root = np.float32(math.sqrt(2 / math.pi))
            inner = np.tanh(root * (gate + np.float32(0.044715) * gate * gate * gate))
            active = np.float32(0.5) * gate * (1 + inner)
        else:
            active = silu(gate)
        return self._linear(active * up, last)

    def _mix(self, index: int, values: Floats) -> Floats:
        """The attention of a layer, or what is recurrent in its place."""
        layer = f"{self._base}layers.{index}"
        if self._recurrent.has(layer):
            return self._recurrent.compute(layer, values, self._ends)
        return self._attention(index, values)

    def _attention(self, index: int, values: Floats) -> Floats:
        name = f"{self._base}layers.{index}.self_attn"
        if f"{name}.qkv_proj.weight" in self._names:
            sizes = [self._heads * self._size, (self._heads + self._kv_heads) * self._size]
            query, key, value = np.split(self._linear(values, f"{name}.qkv_proj"), sizes, axis=-1)
        else:
            query, key, value = (self._linear(values, f"{name}.{each}_proj") for each in "qkv")
        if self._kind in _ROW_NORMS:
            query, key = self._norm(query, f"{name}.q_norm"), self._norm(key, f"{name}.k_norm")
        heads = [part.reshape(len(values), -1, self._size) for part in (query, key, value)]
        gate = None
        if self._kind in _QWEN_HYBRIDS:
            heads[0] = query.reshape(len(values), -1, 2 * self._size)
            heads[0], gate = np.split(heads[0], 2, axis=-1)
        norm = "layernorm" if self._kind in _LFM2 else "norm"
        if self._kind not in _ROW_NORMS and f"{name}.q_{norm}.weight" in self._names:
            heads[0] = self._norm(heads[0], f"{name}.q_{norm}")
            heads[1] = self._norm(heads[1], f"{name}.k_{norm}")
        parts = zip(*(np.split(part, self._ends) for part in heads), strict=True)
        joined = np.concatenate([self._attend(index, *each) for each in parts])
        if gate is not None:
            joined = joined / (1 + np.exp(-gate.reshape(joined.shape)))
        return self._linear(joined, f"{name}.{'out_proj' if self._kind in _LFM2 else 'o_proj'}")

    def _attend(self, index: int, query: Floats, key: Floats, value: Floats) -> Floats:
        """Within one text: of (num_tokens, heads, size), (num_tokens, columns)."""
        slides = self._slides(index)
        if self._turns(index):
            query, key = self._rotated(query, slides), self._rotated(key, slides)
        groups = self._heads // self._kv_heads
        query, key, value = (part.swapaxes(0, 1) for part in (query, key, value))
        key, value = np.repeat(key, groups, axis=0), np.repeat(value, groups, axis=0)
        scores = query @ key.swapaxes(1, 2) * np.float32(self._scale())
        cap = self._config.get("attn_logit_softcapping", 50.0 if self._kind == "gemma2" else None)
        if cap:
            scores = np.tanh(scores / np.float32(cap)) * np.float32(cap)
        positions = np.arange(query.shape[1])
        distance = positions[:, None] - positions[None, :]
        if self._ahead:
            distance = np.abs(distance)
        hidden = distance < 0
        if slides:
            with_one = self._kind in ("exaone4", "mistral", "olmo3")
            usual = 4096 if self._is_gemma or with_one else None
            usual = 128 if self._kind == "gpt_oss" else usual
            window = self._config.get("sliding_window", usual)
            if self._ahead:  # half of it to either side
                window = window // 2 + 1
            hidden |= distance >= window
        scores = np.where(hidden, np.float32(-np.inf), scores)
        sinks = f"{self._base}layers.{index}.self_attn.sinks"
        if sinks in self._names:  # the score of a key that has no value
            further = self._weights.values(sinks)[:, None, None]
            scores = np.concatenate(
                [scores, np.broadcast_to(further, (*scores.shape[:2], 1))], axis=-1
            )
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = (shares / shares.sum(axis=-1, keepdims=True))[..., : len(positions)]
        attended: Floats = (shares @ value).swapaxes(0, 1).reshape(len(positions), -1)
        return attended

    def _scale(self) -> float:
        if self._is_granite:
            return float(self._config.get("attention_multiplier", 1.0))
        if self._kind in ("gemma2", "gemma3_text"):
            return 1 / math.sqrt(self._config.get("query_pre_attn_scalar", 256))
        return 1 / math.sqrt(self._size)

    def _slides(self, index: int) -> bool:
        """Whether a layer attends within a window."""
        config = self._config
        kinds: Any = config.get("layer_types")
        if self._kind == "ministral3":
            return config.get("sliding_window") is not None
        if self._kind in ("mistral", "mixtral", "phi3"):
            return config.get("sliding_window", 4096 if self._kind == "mistral" else 0) is not None
        if self._kind == "exaone4" and kinds is None:
            every = int(config.get("sliding_window_pattern") or 4)
            return config.get("sliding_window", 4096) is not None and (index + 1) % every != 0
        if self._kind == "exaone4":
            return bool(kinds[index] == "sliding_attention")
        if kinds is not None:
            always = self._is_gemma or self._kind in ("gpt_oss", "olmo3")
            turned_on = always or bool(config.get("use_sliding_window"))
            return turned_on and kinds[index] == "sliding_attention"
        if self._kind in ("gemma2", "gpt_oss"):
            return index % 2 == 0
        if self._kind == "olmo3":
            return (index + 1) % 4 != 0
        if self._kind == "gemma3_text":
            period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
            return (index + 1) % int(period or 6) != 0
        return False

    def _turns(self, index: int) -> bool:
        """Whether a layer has positions."""
        if self._kind == "granitemoehybrid":
            return bool(self._config.get("position_embedding_type") == "rope")
        if self._kind == "exaone4":
            return self._config.get("sliding_window", 4096) is None or self._slides(index)
        if self._kind != "smollm3":
            return True
        listed = self._config.get("no_rope_layers")
        interval = int(self._config.get("no_rope_layer_interval") or 4)
        return bool((index + 1) % interval) if listed is None else bool(listed[index])

    def _pairs_neighbors(self) -> bool:
        """Whether columns side by side turn together, and not those of two halves."""
        return self._kind in ("cohere", "cohere2", "glm4")

    def _rope(self, slides: bool) -> dict[str, Any]:
        config = self._config
        found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        if "full_attention" in found or "sliding_attention" in found:
            found = dict(found["sliding_attention" if slides else "full_attention"])
        elif self._kind == "gemma3_text" and slides:
            found = {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
        if self._kind == "gpt_oss" and not found:
            found = {"rope_type": "yarn", "factor": 32.0, "truncate": False}
            found["original_max_position_embeddings"] = 4096
        if self._kind == "olmo3" and slides and not config.get("rope_parameters"):
            found = {}
        part = 0.25 if self._kind in _QWEN_HYBRIDS else 1.0
        part = 0.5 if self._kind in ("bamba", "glm4", "glm4_moe", "phi") else part
        return {
            "rope_theta": config.get("rope_theta") or _THETAS.get(self._kind, 1e4),
            "partial_rotary_factor": config.get("partial_rotary_factor") or part,
            **found,
        }

    def _rotated(self, heads: Floats, slides: bool) -> Floats:
        """Turns (num_tokens, heads, size) by the tokens' places, in float64."""
        rope = self._rope(slides)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        size = int(self._size * rope["partial_rotary_factor"])
        speeds = float(rope["rope_theta"]) ** (-np.arange(0, size, 2) / size)
        times = 1.0
        if kind == "linear":
            speeds = speeds / rope["factor"]
        elif kind == "llama3":
            turns = rope["original_max_position_embeddings"] * speeds / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            share = np.clip((turns - low) / (high - low), 0, 1)
            speeds = speeds * (share + (1 - share) / rope["factor"])
        elif kind == "yarn":
            speeds, times = _yarn(rope, speeds, size)
        elif kind == "longrope":
            speeds = speeds / np.array(rope["short_factor"])
            first = rope.get("original_max_position_embeddings") or self._config.get(
                "original_max_position_embeddings"
            )
            assert first is not None, "longrope begins somewhere"
            longer = rope.get("factor") or self._config["max_position_embeddings"] / first
            times = rope.get("attention_factor") or (
                math.sqrt(1 + math.log(longer) / math.log(first)) if longer > 1 else 1.0
            )
        angles = np.arange(len(heads))[:, None] * speeds
        cos, sin = (
            (times * each).astype(np.float32)[:, None] for each in (np.cos(angles), np.sin(angles))
        )
        if self._pairs_neighbors():
            first, second = heads[..., :size:2], heads[..., 1:size:2]
            pairs = [first * cos - second * sin, second * cos + first * sin]
            turned = np.stack(pairs, axis=-1).reshape(*heads.shape[:-1], size)
            return np.concatenate([turned, heads[..., size:]], axis=-1)
        first_half, second_half = heads[..., : size // 2], heads[..., size // 2 : size]
        return np.concatenate(
            [
                first_half * cos - second_half * sin,
                second_half * cos + first_half * sin,
                heads[..., size:],
            ],
            axis=-1,
        )


_ROW_NORMS = ("olmo2", "olmo3", "olmoe")
_LFM2 = ("lfm2", "lfm2_moe")
_QWEN_HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_TIED = ("minicpm3", "smollm3", "youtu", *_LFM2)
_THETAS = {
    **dict.fromkeys(("gemma3_text", "mixtral", *_LFM2), 1e6),
    "gpt_oss": 150_000.0,
    **dict.fromkeys(("cohere", "olmo3"), 5e5),
    "smollm3": 2e6,
}


def _yarn(rope: Mapping[str, Any], speeds: NDArray[Any], size: int) -> tuple[NDArray[Any], float]:
    """The speeds of YaRN (arXiv:2309.00071, section 3.2), and what the tables are multiplied by."""
    factor, first = float(rope["factor"]), rope["original_max_position_embeddings"]
    edges = []
    for count in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1):
        wavelength = first / (count * 2 * math.pi)
        edges.append(size * math.log(wavelength) / (2 * math.log(rope["rope_theta"])))
    if rope.get("truncate", True):
        edges = [math.floor(edges[0]), math.ceil(edges[1])]
    low, high = max(edges[0], 0), min(edges[1], size - 1)
    share = np.clip((np.arange(size // 2) - low) / max(high - low, 1e-3), 0, 1)
    logarithm = 0.1 * math.log(factor) if factor > 1 else 0.0
    times = 1 + logarithm
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        times = (1 + logarithm * rope["mscale"]) / (1 + logarithm * rope["mscale_all_dim"])
    return speeds * (share / factor + 1 - share), float(rope.get("attention_factor") or times)
