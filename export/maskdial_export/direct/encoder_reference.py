"""A plain NumPy encoder, to compare a written graph with.

It is written from transformers' modeling files and sentence-transformers' modules, of encoders that
transformers lacks from text-embeddings-inference's models, and not from the graph writer, with
which it shares nothing but the weights: it reads the checkpoint's files itself, and computes one
text at a time in float32. It is slow, and meant for some dozen tokens.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial_export.checkpoint.json_file import read_json
from maskdial_export.checkpoint.sentence import POOLINGS, SENTENCE_CONFIG, module_folders
from maskdial_export.direct.neobert_reference import NeoBERTReference
from maskdial_export.direct.reference import Reference
from maskdial_export.direct.weights import Weights

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_BASES = {
    "camembert": "roberta",
    "xlm-roberta": "roberta",
    "deberta-v2": "deberta",
    "jina_bert": "bert",
    "modernbert": "model",
}
_ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "distilbert", "electra", "gte", "modernbert", "mpnet"),
        *("deberta-v2", "jina_bert", "new", "nomic_bert", "roberta", "xlm-roberta"),
    }
)
_THETAS = {"gte": 160_000.0, "new": 10_000.0, "nomic_bert": 1000.0}  # queries and keys turn
_ROBERTA = ("roberta", "xlm-roberta", "camembert", "mpnet")


class EncoderReference:
    """The encoder, with its head, that a checkpoint's files describe."""

    def __init__(self, files: Any, weights: Weights, **stated: Any) -> None:
        """``files``: the checkpoint, with ``path`` and ``read_json``; ``stated``: entries of
        config.json in place of the file's, such as of a model with another head."""
        self._files = files
        self._weights = weights
        self._names = weights.shapes()
        config = files.read_json("config.json") | stated
        self._config: Mapping[str, Any] = config
        self._kind = str(config["model_type"])
        if config.get("position_embedding_type") == "alibi":
            self._kind = "jina_bert"
        self._class = str(config["architectures"][0])
        pools = any(kind == "Pooling" for kind, _ in module_folders(files))
        self._embeds = pools or self._class.endswith("Model")
        self._decoder: Reference | NeoBERTReference | None = None
        if self._kind == "neobert":
            self._decoder = NeoBERTReference(config, files.weights)
        elif self._kind not in _ENCODERS:
            both_ways = {"is_causal": False, "rms_norm_eps": 1e-5} if self._is_made_so else {}
            self._decoder = Reference({**both_ways, **config}, weights)
        if self._decoder is not None:
            return
        self._base = "" if self._embeds else f"{_BASES.get(self._kind, self._kind)}."
        self._modern = self._kind == "modernbert"
        key, usual = ("norm_eps", 1e-5) if self._modern else ("layer_norm_eps", 1e-12)
        self._epsilon = config.get("layer_norm_epsilon") or config.get(key, usual)
        heads, layers = ("n_head", "n_layer") if "n_embd" in config else ("n_heads", "n_layers")
        self._heads = int(config.get("num_attention_heads") or config[heads])
        self._count = int(config.get("num_hidden_layers") or config[layers])

    def output(self, ids: Ids, types: Ids) -> Floats:
        """Logits (length, columns), or those or the vector of the whole text, (columns,)."""
        hidden = self._hidden(ids, types)
        if self._embeds:
            return self._vector(hidden)
        kind = self._class.rpartition("For")[2]
        if self._is_made_so:
            return self._made_so(hidden, kind)
        if self._decoder is not None:
            logits = self._linear(hidden, "score")
            if kind == "TokenClassification":
                return logits
            words = np.flatnonzero(ids != self._config["pad_token_id"])
            last: Floats = logits[words[-1] if len(words) else 0]
            return last
        if kind == "MaskedLM":
            return self._words(hidden)
        if kind == "SequenceClassification":
            return self._classified(hidden)
        if self._kind == "modernbert":
            return self._linear(self._modern_head(hidden), "classifier")
        name = "qa_outputs" if kind == "QuestionAnswering" else "classifier"
        return self._linear(hidden, name)

    @property
    def _is_made_so(self) -> bool:
        """Whether it is an encoder that is made as a decoder."""
        return self._kind in ("eurobert", "neobert")

    def _made_so(self, hidden: Floats, kind: str) -> Floats:
        """The heads of EuroBERT and NeoBERT."""
        if kind in ("MaskedLM", "NeoBERTLMHead"):
            name = "decoder" if self._kind == "neobert" else "lm_head"
            if f"{name}.weight" in self._names and not self._config.get("tie_word_embeddings"):
                return self._linear(hidden, name)
            logits = hidden @ self._weights.values("model.embed_tokens.weight").T
            bias = f"{name}.bias"
            return logits + self._weights.values(bias) if bias in self._names else logits
        if kind == "TokenClassification":
            return self._linear(hidden, "classifier")
        pooling = self._config.get("classifier_pooling", "late")
        if self._kind == "neobert":
            inner = np.tanh(self._linear(hidden[:1], "dense"))
        elif pooling == "bos":
            inner = _gelu(self._linear(hidden[:1], "dense"))
        elif pooling == "mean":
            inner = _gelu(self._linear(hidden.mean(axis=0, keepdims=True), "dense"))
        else:
            inner = _gelu(self._linear(hidden, "dense"))
        found: Floats = self._linear(inner, "classifier").mean(axis=0)
        return found

    def _linear(self, values: Floats, name: str) -> Floats:
        product = values @ self._weights.values(f"{name}.weight").T
        if f"{name}.bias" in self._names:
            product = product + self._weights.values(f"{name}.bias")
        return product

    def _norm(self, values: Floats, name: str, epsilon: float | None = None) -> Floats:
        centered = values - values.mean(axis=-1, keepdims=True)
        variance = np.mean(np.square(centered), axis=-1, keepdims=True)
        small = np.float32(self._epsilon if epsilon is None else epsilon)
        normalized = centered / np.sqrt(variance + small) * self._weights.values(f"{name}.weight")
        if f"{name}.bias" in self._names:
            normalized = normalized + self._weights.values(f"{name}.bias")
        found: Floats = normalized.astype(np.float32)
        return found

    def _act(self, values: Floats) -> Floats:
        usual = {"albert": "gelu_new", "nomic_bert": "silu"}.get(self._kind, "gelu")
        names = "activation_function", "hidden_act", "hidden_activation", "activation"
        given = next((self._config[name] for name in names if self._config.get(name)), usual)
        return _function({"swiglu": "silu", "geglu": "gelu"}.get(given, given))(values)

    def _hidden(self, ids: Ids, types: Ids) -> Floats:
        if self._decoder is not None:
            return self._decoder.hidden(ids)
        states = self._embedded(ids, types)
        for index in range(self._count):
            layer = self._modern_layer if self._modern else self._layer
            states = layer(index, states)
        return self._norm(states, f"{self._base}final_norm") if self._modern else states

    def _rows(self, name: str, indices: Ids) -> Floats:
        rows = [self._weights.values(name, slice(each, each + 1)) for each in indices.tolist()]
        found: Floats = np.concatenate(rows)
        return found

    def _embedded(self, ids: Ids, types: Ids) -> Floats:
        base = f"{self._base}embeddings"
        if self._kind == "modernbert":
            return self._norm(self._rows(f"{base}.tok_embeddings.weight", ids), f"{base}.norm")
        total = self._rows(f"{base}.word_embeddings.weight", ids)
        places = np.arange(len(ids))
        if self._kind in _ROBERTA:  # create_position_ids_from_input_ids
            padding = self._config.get("pad_token_id", 1) or 0
            real = (ids != padding).astype(np.int64)
            places = np.cumsum(real) * real + padding
        if f"{base}.position_embeddings.weight" in self._names:
            total = total + self._rows(f"{base}.position_embeddings.weight", places)
        table = f"{base}.token_type_embeddings.weight"
        if table in self._names:
            total = total + self._rows(table, types)
        states = self._norm(total, f"{base}.LayerNorm")
        for name in ("encoder.embedding_hidden_mapping_in", "embeddings_project"):
            if f"{self._base}{name}.weight" in self._names:
                states = self._linear(states, f"{self._base}{name}")
        return states

    def _layer(self, index: int, states: Floats) -> Floats:
        """Post-norm: BERT's, DistilBERT's, ALBERT's."""
        base, rest = self._base, tuple[str, ...]()
        if self._kind == "distilbert":
            layer = f"{base}transformer.layer.{index}"
            inner = [f"{layer}.attention.{name}_lin" for name in "qkv"]
            rest = (
                "attention.out_lin",
                "sa_layer_norm",
                "ffn.lin1",
                "ffn.lin2",
                "output_layer_norm",
            )
        elif self._kind == "albert":
            group = int(index / (self._count / self._config.get("num_hidden_groups", 1)))
            layer = f"{base}encoder.albert_layer_groups.{group}.albert_layers.0"
            inner = [f"{layer}.attention.{name}" for name in ("query", "key", "value")]
            rest = ("attention.dense", "attention.LayerNorm", "ffn", "ffn_output")
            rest = (*rest, "full_layer_layer_norm")
        elif self._kind == "mpnet":
            layer = f"{base}encoder.layer.{index}"
            inner = [f"{layer}.attention.attn.{name}" for name in "qkv"]
            rest = ("attention.attn.o", "attention.LayerNorm", "intermediate.dense")
            rest = (*rest, "output.dense", "output.LayerNorm")
        elif self._kind == "deberta-v2":
            layer = f"{base}encoder.layer.{index}"
            inner = [f"{layer}.attention.self.{name}_proj" for name in ("query", "key", "value")]
            rest = ("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense")
            rest = (*rest, "output.dense", "output.LayerNorm")
        elif self._kind == "jina_bert":
            return self._jina_layer(f"{base}encoder.layer.{index}", states)
        elif self._kind in _THETAS:
            layer = f"{base}layers.{index}"
            inner = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
            rest = ("self_attn.o_proj", "post_attention_layernorm", "mlp.up_proj")
            rest = (*rest, "mlp.down_proj", "post_mlp_layernorm")
        else:
            layer = f"{base}encoder.layer.{index}"
            inner = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
            rest = ("attention.output.dense", "attention.output.LayerNorm", "intermediate.dense")
            rest = (*rest, "output.dense", "output.LayerNorm")
        out, first_norm, up, down, second_norm = (f"{layer}.{name}" for name in rest)
        query, key, value = (self._linear(states, name) for name in inner)
        if self._kind in _THETAS:
            query, key = (
                self._turned(part, self._theta(), self._slower()) for part in (query, key)
            )
        further = None
        if self._kind == "deberta-v2":
            further = self._by_distance(query, key, inner)
        attended = self._linear(self._attention(query, key, value, None, further), out)
        states = self._norm(attended + states, first_norm)
        if f"{layer}.mlp.router.layer.weight" in self._names:
            inside = self._mixed(f"{layer}.mlp", states)
        elif f"{layer}.mlp.gate_proj.weight" in self._names:
            gate = self._act(self._linear(states, f"{layer}.mlp.gate_proj"))
            inside = self._linear(gate * self._linear(states, up), down)
        else:
            inside = self._linear(self._act(self._linear(states, up)), down)
        return self._norm(inside + states, second_norm)

    def _theta(self) -> float:
        config = self._config
        theta = config.get("rotary_emb_base") or config.get("rope_theta") or _THETAS[self._kind]
        theta = (config.get("rope_parameters") or {}).get("rope_theta", theta)
        return float(theta) * float((config.get("rope_scaling") or {}).get("factor", 1))

    def _slower(self) -> float:
        """What gte v1.5 divides all speeds by, beside the larger base."""
        factor = float((self._config.get("rope_scaling") or {}).get("factor", 1))
        return math.exp(math.log(factor) * 2 * self._heads / self._config.get("hidden_size", 1))

    def _mixed(self, name: str, values: Floats) -> Floats:
        """nomic-embed-text-v2-moe's experts: the likeliest ones, by their own likelihood."""
        scores = self._linear(values, f"{name}.router.layer")
        likely = np.exp(scores - scores.max(axis=-1, keepdims=True))
        likely = likely / likely.sum(axis=-1, keepdims=True)
        count, total = likely.shape[1], np.zeros_like(values)
        for token, each in enumerate(likely):
            for expert in np.argsort(-each, kind="stable")[: self._config["moe_top_k"]]:
                one = f"{name}.experts.{expert}"
                inner = self._act(self._linear(values[token][None], f"{one}.up"))
                total[token] += each[expert] * self._linear(inner, f"{one}.down")[0]
        assert count == self._config["num_experts"], "the router knows all"
        bias = f"{name}.experts.bias"
        return total + self._weights.values(bias) if bias in self._names else total

    def _jina_layer(self, layer: str, states: Floats) -> Floats:
        """jina-embeddings-v2's; that for code has more norms, and its MLP's halves exchanged."""
        inner = [f"{layer}.attention.self.{name}" for name in ("query", "key", "value")]
        query, key, value = (self._linear(states, name) for name in inner)
        norms = [f"{layer}.attention.self.layer_norm_{name}" for name in "qk"]
        of_code = f"{norms[0]}.weight" in self._names
        if of_code:
            query, key = self._norm(query, norms[0]), self._norm(key, norms[1])
        out = self._linear(
            self._attention(query, key, value, None), f"{layer}.attention.output.dense"
        )
        attended = self._norm(out + states, f"{layer}.attention.output.LayerNorm")
        if not of_code:
            both = self._linear(attended, f"{layer}.mlp.gated_layers")
            gate, other = np.split(both, 2, axis=-1)
            inside = self._linear(_gelu(gate) * other, f"{layer}.mlp.wo")
            return self._norm(inside + attended, f"{layer}.mlp.layernorm")
        attended = self._norm(states + attended, f"{layer}.layer_norm_1")
        gate, other = (
            self._linear(attended, f"{layer}.mlp.{each}_layer") for each in ("gate", "up")
        )
        inside = self._linear(_gelu(gate) * other, f"{layer}.mlp.down_layer")
        return self._norm(inside + attended, f"{layer}.layer_norm_2")

    def _modern_layer(self, index: int, states: Floats) -> Floats:
        layer, config = f"{self._base}layers.{index}", self._config
        source = states if index == 0 else self._norm(states, f"{layer}.attn_norm")
        query, key, value = np.split(self._linear(source, f"{layer}.attn.Wqkv"), 3, axis=-1)
        listed = config.get("layer_types")
        period = config.get("global_attn_every_n_layers", 3)
        near = listed[index] == "sliding_attention" if listed else index % period != 0
        rope = (config.get("rope_parameters") or {}).get(
            "sliding_attention" if near else "full_attention"
        ) or {}
        old = config.get("local_rope_theta" if near else "global_rope_theta")
        theta = rope.get("rope_theta") or old or (10_000.0 if near else 160_000.0)
        window = config.get("local_attention", 128) // 2 if near else None
        query, key = (self._turned(part, float(theta)) for part in (query, key))
        attended = self._attention(query, key, value, window)
        states = states + self._linear(attended, f"{layer}.attn.Wo")
        gate, other = np.split(
            self._linear(self._norm(states, f"{layer}.mlp_norm"), f"{layer}.mlp.Wi"), 2, axis=-1
        )
        return states + self._linear(self._act(gate) * other, f"{layer}.mlp.Wo")

    def _turned(self, values: Floats, theta: float, slower: float = 1.0) -> Floats:
        heads = values.reshape(len(values), self._heads, -1)
        size = heads.shape[2]
        speeds = theta ** (-np.arange(0, size, 2) / size) / slower
        angles = np.arange(len(values))[:, None] * speeds
        cos, sin = (each.astype(np.float32)[:, None] for each in (np.cos(angles), np.sin(angles)))
        left, right = heads[..., : size // 2], heads[..., size // 2 :]
        turned = np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
        found: Floats = turned.reshape(values.shape)
        return found

    def _attention(
        self,
        query: Floats,
        key: Floats,
        value: Floats,
        reach: int | None,
        further: Floats | None = None,
    ) -> Floats:
        """``reach``: how many tokens to either side are seen; None: all. ``further``: what is added
        to products before they are divided by the root of as many summands' size."""
        parts = [
            each.reshape(len(each), self._heads, -1).swapaxes(0, 1) for each in (query, key, value)
        ]
        scores, size = parts[0] @ parts[1].swapaxes(1, 2), parts[0].shape[2]
        if further is not None:
            scores, size = scores + further, 3 * size
        scores = scores / np.float32(math.sqrt(size))
        if self._kind == "mpnet":
            scores = scores + self._distances(len(query))
        if self._kind == "jina_bert":
            places = np.arange(len(query))
            away = np.abs(places[:, None] - places[None, :]).astype(np.float32)
            scores = scores - _slopes(self._heads)[:, None, None] * away
        if reach is not None:
            places = np.arange(len(query))
            far = np.abs(places[:, None] - places[None, :]) > reach
            scores = np.where(far, np.float32(-np.inf), scores)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares = shares / shares.sum(axis=-1, keepdims=True)
        joined: Floats = (shares @ parts[2]).swapaxes(0, 1).reshape(len(query), -1)
        return joined

    def _by_distance(self, query: Floats, key: Floats, inner: list[str]) -> Floats:
        """DeBERTa's products of queries and keys with what stands for their distance."""
        config, length = self._config, len(query)
        table = self._weights.values(f"{self._base}encoder.rel_embeddings.weight")
        table = self._norm(table, f"{self._base}encoder.LayerNorm")
        of_query, of_key = (self._linear(table, name) for name in inner[:2])
        rows, middle = int(config["position_buckets"]), int(config["position_buckets"]) // 2
        farthest = config.get("max_relative_positions", -1)
        if farthest < 1:
            farthest = config.get("max_position_embeddings", 512)

        def row(distance: int) -> int:
            away = abs(distance)
            if away > middle:
                share = math.log(away / middle) / math.log((farthest - 1) / middle)
                away = math.ceil(share * (middle - 1) - 1e-6) + middle
            return min(max(rows + (away if distance > 0 else -away), 0), 2 * rows - 1)

        places = np.array([[row(i - j) for j in range(length)] for i in range(length)])
        heads = [each.reshape(len(each), self._heads, -1) for each in (query, key)]
        tables = [each.reshape(len(each), self._heads, -1) for each in (of_query, of_key)]
        to_rows = np.einsum("ihd,ijhd->hij", heads[0], tables[1][places])
        from_rows = np.einsum("jhd,ijhd->hij", heads[1], tables[0][places])
        found: Floats = to_rows + from_rows
        return found

    def _distances(self, length: int) -> Floats:
        """MPNet's bias of scores, (heads, length, length)."""
        table = self._weights.values(f"{self._base}encoder.relative_attention_bias.weight")
        half, places = len(table) // 2, range(length)
        exact = half // 2

        def bucket(query: int, key: int) -> int:
            away = abs(key - query)
            if away >= exact:
                share = math.log(away / exact) / math.log(128 / exact)
                away = min(exact + int(share * (half - exact) + 1e-6), half - 1)
            return away + (half if key > query else 0)

        rows = np.array([[bucket(query, key) for key in places] for query in places])
        bias: Floats = table[rows].transpose(2, 0, 1)
        return bias

    def _words(self, hidden: Floats) -> Floats:
        """The heads over the vocabulary, whose matrix is the embedding table."""
        kind = self._kind
        if kind == "modernbert":
            states, bias = self._modern_head(hidden), "decoder.bias"
        else:
            dense, norm, bias = {
                "albert": ("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
                "distilbert": ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias"),
                "electra": (
                    *("generator_predictions.dense", "generator_predictions.LayerNorm"),
                    "generator_lm_head.bias",
                ),
                "bert": (
                    *("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
                    "cls.predictions.bias",
                ),
                "deberta-v2": (
                    *("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
                    "cls.predictions.bias",
                ),
                "gte": ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder.bias"),
                "new": ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder.bias"),
                "jina_bert": (
                    *("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
                    "cls.predictions.bias",
                ),
                "nomic_bert": (
                    *("cls.predictions.transform.dense", "cls.predictions.transform.layer_norm"),
                    "cls.predictions.bias",
                ),
            }.get(kind, ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"))
            states = self._linear(hidden, dense)
            fixed = kind in _ROBERTA or kind in ("electra", "gte", "new")
            states = self._norm(_function("gelu")(states) if fixed else self._act(states), norm)
        name = "tok_embeddings" if kind == "modernbert" else "word_embeddings"
        table = self._weights.values(f"{self._base}embeddings.{name}.weight")
        return states @ table.T + self._weights.values(bias)

    def _modern_head(self, hidden: Floats) -> Floats:
        return self._norm(_function("gelu")(self._linear(hidden, "head.dense")), "head.norm")

    def _classified(self, hidden: Floats) -> Floats:
        kind, first = self._kind, hidden[:1]
        if kind == "modernbert":
            mean = self._config.get("classifier_pooling", "cls") == "mean"
            pooled = hidden.mean(axis=0, keepdims=True) if mean else first
            logits = self._linear(self._modern_head(pooled), "classifier")
        elif kind == "distilbert":
            inner = np.maximum(self._linear(first, "pre_classifier"), 0)
            logits = self._linear(inner, "classifier")
        elif kind == "deberta-v2":
            inner = _function("gelu")(self._linear(first, "pooler.dense"))
            logits = self._linear(inner, "classifier")
        elif kind in _ROBERTA or kind == "electra":
            function = _function("gelu" if kind == "electra" else "tanh")
            inner = function(self._linear(first, "classifier.dense"))
            logits = self._linear(inner, "classifier.out_proj")
        else:
            base = _BASES.get(kind, kind)
            pooler = "albert.pooler" if kind == "albert" else f"{base}.pooler.dense"
            logits = self._linear(np.tanh(self._linear(first, pooler)), "classifier")
        found: Floats = logits[0]
        return found

    def _vector(self, hidden: Floats) -> Floats:
        """sentence-transformers' modules."""
        vector, steps = hidden.mean(axis=0), 0
        for kind, folder in module_folders(self._files):
            if kind == "Pooling":
                vector = _pooled(hidden, read_json(folder / "config.json"))
            elif kind == "Normalize":
                vector, steps = vector / max(float(np.linalg.norm(vector)), 1e-12), steps + 1
            elif kind == "LayerNorm":
                vector, steps = self._norm(vector, f"pooler.steps.{steps}.norm", 1e-5), steps + 1
            elif kind == "Dense":
                vector, steps = self._stepped(vector, steps, folder), steps + 1
        kept = self._files.read_json(SENTENCE_CONFIG).get("truncate_dim")
        found: Floats = vector[:kept].astype(np.float32)
        return found

    def _stepped(self, vector: Floats, index: int, folder: Path) -> Floats:
        name = read_json(folder / "config.json").get("activation_function") or "Tanh"
        product = self._linear(vector[None], f"pooler.steps.{index}.linear")[0]
        return _function(str(name).rpartition(".")[2].lower())(product)


def _slopes(count: int) -> Floats:
    """ALiBi's, as its authors' code computes them (arXiv:2108.12409)."""
    if math.log2(count).is_integer():
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return np.array([start ** (head + 1) for head in range(count)], np.float32)
    fewer = 2 ** math.floor(math.log2(count))
    others = _slopes(2 * fewer)[0::2][: count - fewer]
    return np.concatenate([_slopes(fewer), others])


def _pooled(hidden: Floats, settings: Mapping[str, Any]) -> Floats:
    length = len(hidden)
    weights = np.arange(1, length + 1, dtype=np.float32)[:, None]
    ways = {
        "cls": hidden[0],
        "max": hidden.max(axis=0),
        "mean": hidden.mean(axis=0),
        "mean_sqrt_len": hidden.sum(axis=0) / np.float32(math.sqrt(length)),
        "weighted_mean": (hidden * weights).sum(axis=0) / weights.sum(),
        "last": hidden[-1],
    }
    names = {
        "cls_token": "cls",
        "lasttoken": "last",
        "max_tokens": "max",
        "mean_tokens": "mean",
        "mean_sqrt_len_tokens": "mean_sqrt_len",
        "weightedmean_tokens": "weighted_mean",
        "weightedmean": "weighted_mean",
    }
    given = settings.get("pooling_mode")
    if given is not None:
        chosen = [given] if isinstance(given, str) else list(given)
        chosen = [names.get(each, each) for each in chosen]
    else:
        turned_on = {
            names.get(key.removeprefix("pooling_mode_"), key)
            for key, on in settings.items()
            if key.startswith("pooling_mode_") and on
        }
        chosen = [name for name in POOLINGS if name in turned_on]
    found: Floats = np.concatenate([ways[name] for name in dict.fromkeys(chosen)])
    return found


def _function(name: str) -> Callable[[Floats], Floats]:
    return _FUNCTIONS[name]


def _gelu(values: Floats) -> Floats:
    erf = np.array([math.erf(each) for each in (values / math.sqrt(2)).ravel().tolist()])
    found: Floats = (0.5 * values * (1 + erf.reshape(values.shape))).astype(np.float32)
    return found


def _gelu_new(values: Floats) -> Floats:
    inner = np.float32(math.sqrt(2 / math.pi)) * (values + np.float32(0.044715) * values**3)
    found: Floats = np.float32(0.5) * values * (1 + np.tanh(inner))
    return found


def _sigmoid(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        found: Floats = (1 / (1 + np.exp(-values))).astype(np.float32)
    return found


def _silu(values: Floats) -> Floats:
    return values * _sigmoid(values)


def _relu(values: Floats) -> Floats:
    found: Floats = np.maximum(values, 0)
    return found


def _tanh(values: Floats) -> Floats:
    found: Floats = np.tanh(values)
    return found


_FUNCTIONS: Mapping[str, Callable[[Floats], Floats]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_new,
    "identity": lambda values: values,
    "relu": _relu,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "swish": _silu,
    "tanh": _tanh,
}
