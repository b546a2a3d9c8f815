"""Encoders whose code stands on the Hub, not in transformers: written directly from a folder as it
is published, against torch modules that compute what that code does."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import EuroBertConfig, EuroBertModel

from maskdial.bundle.manifest import GRAPH
from maskdial_export.direct import encoder_export
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.direct.encoder_reference import EncoderReference
from maskdial_export.direct.weights import Weights
from maskdial_export.errors import ExportError
from maskdial_export.quantize.gate import Gate
from maskdial_export.route import export_any_way
from maskdial_export.session import Loaded, MaskedSession, kernels_here
from tests.export.conftest import VOCABULARY, add_json, make_tokenizer, write_modules
from tests.export.gguf_files import WORD_PIECES_SIZE, basics, word_pieces, write_gguf
from tests.export.test_direct_encoders import ANY_LOSS, direct

WIDTH, HEADS, INNER, SIZE = 48, 3, 64, 16
Forward = Callable[[dict[str, torch.Tensor], Mapping[str, Any], torch.Tensor], torch.Tensor]


def linear(weights: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(values, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def norm(
    weights: dict[str, torch.Tensor], name: str, values: torch.Tensor, eps: float = 1e-12
) -> torch.Tensor:
    scale, shift = weights[f"{name}.weight"], weights[f"{name}.bias"]
    return nn.functional.layer_norm(values, values.shape[-1:], scale, shift, eps)


def by_heads(values: torch.Tensor) -> torch.Tensor:
    return values.view(len(values), HEADS, SIZE).transpose(0, 1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Of heads, (heads, length, size); gives (length, width)."""
    found = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    return found.transpose(0, 1).flatten(1)


def turn_halves(values: torch.Tensor, speeds: torch.Tensor) -> torch.Tensor:
    """Rotation of columns half a head apart."""
    angles = torch.outer(torch.arange(values.shape[1]).float(), speeds)
    both = torch.cat([angles, angles], dim=-1)
    left, right = values.chunk(2, dim=-1)
    return values * both.cos() + torch.cat([-right, left], dim=-1) * both.sin()


def speeds_of(theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, SIZE, 2).float() / SIZE)


def embedded(
    weights: dict[str, torch.Tensor], base: str, ids: torch.Tensor, last: str, eps: float = 1e-12
) -> torch.Tensor:
    total = weights[f"{base}embeddings.word_embeddings.weight"][ids]
    types = weights.get(f"{base}embeddings.token_type_embeddings.weight")
    return norm(weights, f"{base}{last}", total if types is None else total + types[0], eps)


def gte(
    weights: dict[str, torch.Tensor], config: Mapping[str, Any], ids: torch.Tensor
) -> torch.Tensor:
    base = "new." if "new.embeddings.word_embeddings.weight" in weights else ""
    states = embedded(weights, base, ids, "embeddings.LayerNorm")
    scaling = config["rope_scaling"]
    speeds = speeds_of(config["rope_theta"])
    if scaling is not None:  # NTKScalingRotaryEmbedding
        factor = scaling["factor"]
        speeds = speeds_of(config["rope_theta"] * factor) / factor ** (2 / SIZE)
    for index in range(config["num_hidden_layers"]):
        layer = f"{base}encoder.layer.{index}"
        parts = linear(weights, f"{layer}.attention.qkv_proj", states).chunk(3, dim=-1)
        query, key, value = (by_heads(part) for part in parts)
        attended = attend(turn_halves(query, speeds), turn_halves(key, speeds), value)
        attended = linear(weights, f"{layer}.attention.o_proj", attended)
        states = norm(weights, f"{layer}.attn_ln", states + attended)
        up, gate = linear(weights, f"{layer}.mlp.up_gate_proj", states).chunk(2, dim=-1)
        inner = linear(weights, f"{layer}.mlp.down_proj", nn.functional.gelu(gate) * up)
        states = norm(weights, f"{layer}.mlp_ln", states + inner)
    return states


def slopes(count: int) -> torch.Tensor:
    """As the authors of ALiBi give them."""
    closest = 2 ** math.floor(math.log2(count))
    first = [2 ** (-8 / closest * each) for each in range(1, closest + 1)]
    rest = [2 ** (-4 / closest * each) for each in range(1, 2 * (count - closest) + 1, 2)]
    return torch.tensor(first + rest)


def jina(
    weights: dict[str, torch.Tensor], config: Mapping[str, Any], ids: torch.Tensor
) -> torch.Tensor:
    base = "bert." if "bert.embeddings.word_embeddings.weight" in weights else ""
    states = embedded(weights, base, ids, "embeddings.LayerNorm")
    places = torch.arange(len(ids))
    away = (places[:, None] - places[None]).abs()
    bias = -slopes(HEADS)[:, None, None] * away
    for index in range(config["num_hidden_layers"]):
        layer = f"{base}encoder.layer.{index}"
        inner = f"{layer}.attention.self"
        query, key, value = (
            linear(weights, f"{inner}.{name}", states) for name in ("query", "key", "value")
        )
        of_code = f"{inner}.layer_norm_q.weight" in weights
        if of_code:
            query = norm(weights, f"{inner}.layer_norm_q", query)
            key = norm(weights, f"{inner}.layer_norm_k", key)
        attended = attend(by_heads(query), by_heads(key), by_heads(value), bias)
        attended = linear(weights, f"{layer}.attention.output.dense", attended)
        attended = norm(weights, f"{layer}.attention.output.LayerNorm", attended + states)
        if of_code:
            attended = norm(weights, f"{layer}.layer_norm_1", states + attended)
            both = linear(weights, f"{layer}.mlp.up_gated_layer", attended)
            up, gate = both.chunk(2, dim=-1)
            inside = linear(weights, f"{layer}.mlp.down_layer", up * nn.functional.gelu(gate))
            states = norm(weights, f"{layer}.layer_norm_2", attended + inside)
        else:
            gate, up = linear(weights, f"{layer}.mlp.gated_layers", attended).chunk(2, dim=-1)
            inside = linear(weights, f"{layer}.mlp.wo", nn.functional.gelu(gate) * up)
            states = norm(weights, f"{layer}.mlp.layernorm", attended + inside)
    return states


def nomic(
    weights: dict[str, torch.Tensor], config: Mapping[str, Any], ids: torch.Tensor
) -> torch.Tensor:
    eps, speeds = config["layer_norm_epsilon"], speeds_of(config["rotary_emb_base"])
    states = embedded(weights, "", ids, "emb_ln", eps)
    for index in range(config["n_layer"]):
        layer = f"encoder.layers.{index}"
        parts = linear(weights, f"{layer}.attn.Wqkv", states).chunk(3, dim=-1)
        query, key, value = (by_heads(part) for part in parts)
        attended = attend(turn_halves(query, speeds), turn_halves(key, speeds), value)
        attended = linear(weights, f"{layer}.attn.out_proj", attended)
        states = norm(weights, f"{layer}.norm1", attended + states, eps)
        if f"{layer}.mlp.router.layer.weight" in weights:
            inner = experts_of(weights, f"{layer}.mlp", config, states)
        elif f"{layer}.mlp.fc1.weight" in weights:
            inner = nn.functional.gelu(linear(weights, f"{layer}.mlp.fc1", states))
            inner = linear(weights, f"{layer}.mlp.fc2", inner)
        else:
            up, gate = (linear(weights, f"{layer}.mlp.fc1{each}", states) for each in "12")
            inner = linear(weights, f"{layer}.mlp.fc2", up * nn.functional.silu(gate))
        states = norm(weights, f"{layer}.norm2", inner + states, eps)
    return states


def experts_of(
    weights: dict[str, torch.Tensor], name: str, config: Mapping[str, Any], states: torch.Tensor
) -> torch.Tensor:
    count = config["num_experts"]
    likely = linear(weights, f"{name}.router.layer", states).softmax(dim=-1)
    shares, chosen = likely.topk(config["moe_top_k"], dim=-1)
    first, second = (
        weights[f"{name}.experts.mlp.{each}"].view(count, INNER, WIDTH) for each in ("w1", "w2")
    )
    inner = nn.functional.gelu(torch.einsum("lh,efh->lef", states, first))
    outer = torch.einsum("lef,efh->leh", inner, second)
    total = (outer.gather(1, chosen[..., None].expand(-1, -1, WIDTH)) * shares[..., None]).sum(1)
    return total + weights[f"{name}.experts.bias"]


def neobert(
    weights: dict[str, torch.Tensor], config: Mapping[str, Any], ids: torch.Tensor
) -> torch.Tensor:
    eps = config["norm_eps"]

    def scaled(name: str, values: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(values, (WIDTH,), weights[f"model.{name}.weight"], eps)

    def turn(values: torch.Tensor) -> torch.Tensor:
        """Of (length, heads, size): neighbors are one complex number."""
        angles = torch.outer(torch.arange(len(values)).float(), speeds_of(10_000.0))
        turns = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = torch.view_as_complex(values.reshape(*values.shape[:2], -1, 2))
        return torch.view_as_real(pairs * turns).flatten(2)

    states = weights["model.encoder.weight"][ids]
    for index in range(config["num_hidden_layers"]):
        layer = f"transformer_encoder.{index}"
        name = f"model.{layer}"
        packed = linear(weights, f"{name}.qkv", scaled(f"{layer}.attention_norm", states))
        query, key, value = packed.view(len(ids), HEADS, 3 * SIZE).chunk(3, dim=-1)
        parts = (part.transpose(0, 1) for part in (turn(query), turn(key), value))
        states = states + linear(weights, f"{name}.wo", attend(*parts))
        both = linear(weights, f"{name}.ffn.w12", scaled(f"{layer}.ffn_norm", states))
        gate, up = both.chunk(2, dim=-1)
        states = states + linear(weights, f"{name}.ffn.w3", nn.functional.silu(gate) * up)
    return scaled("layer_norm", states)


GTE = {
    "model_type": "new",
    "architectures": ["NewModel"],
    "auto_map": {
        "AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig",
        "AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel",
        "AutoModelForMaskedLM": "Alibaba-NLP/new-impl--modeling.NewForMaskedLM",
    },
    "attention_probs_dropout_prob": 0.0,
    "classifier_dropout": None,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": WIDTH,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "max_position_embeddings": 96,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "pack_qkv": True,
    "pad_token_id": 0,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 2.0, "type": "ntk"},
    "rope_theta": 500_000,
    "torch_dtype": "float32",
    "transformers_version": "4.39.1",
    "type_vocab_size": 0,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": len(VOCABULARY),
}
JINA = {
    "_name_or_path": "jinaai/jina-bert-implementation",
    "model_max_length": 8192,
    "model_type": "bert",
    "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {
        "AutoConfig": "jinaai/jina-bert-implementation--configuration_bert.JinaBertConfig",
        "AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel",
    },
    "attention_probs_dropout_prob": 0.0,
    "emb_pooler": "mean",
    "feed_forward_type": "geglu",
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 96,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": len(VOCABULARY),
}
NOMIC = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
    },
    "activation_function": "gelu",
    "add_pooling_layer": False,
    "attn_pdrop": 0.0,
    "causal": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-05,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 2,
    "moe_normalize_expert_weights": False,
    "moe_resid_pdrop": 0.0,
    "moe_top_k": 2,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_inner": INNER,
    "n_layer": 2,
    "n_positions": 96,
    "num_experts": 4,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": True,
    "resid_pdrop": 0.0,
    "rotary_emb_base": 10000.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 1,
    "vocab_size": len(VOCABULARY),
}
DENSE = {
    "activation_function": "swiglu",
    "moe_every_n_layers": 0,
    "num_experts": 0,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "qkv_proj_bias": False,
    "rotary_scaling_factor": 2,
    "type_vocab_size": 2,
}
NEOBERT = {
    "architectures": ["NeoBERTLMHead"],
    "auto_map": {
        "AutoConfig": "model.NeoBERTConfig",
        "AutoModel": "model.NeoBERT",
        "AutoModelForMaskedLM": "model.NeoBERTLMHead",
        "AutoModelForSequenceClassification": "model.NeoBERTForSequenceClassification",
    },
    "classifier_init_range": 0.02,
    "decoder_init_range": 0.02,
    "dim_head": SIZE,
    "embedding_init_range": 0.02,
    "hidden_size": WIDTH,
    "intermediate_size": 92,
    "kwargs": {"classifier_init_range": 0.02, "trust_remote_code": True},
    "max_length": 96,
    "model_type": "neobert",
    "norm_eps": 1e-05,
    "num_attention_heads": HEADS,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "pretrained_model_name_or_path": "google-bert/bert-base-uncased",
    "torch_dtype": "float32",
    "transformers_version": "4.48.2",
    "trust_remote_code": True,
    "vocab_size": len(VOCABULARY),
}
WEIGHTS = "model.safetensors"
CODE = "jinaai/jina-bert-v2-qk-post-norm"
Shapes = dict[str, tuple[int, ...]]


def table_shapes(base: str, types: int, last: str) -> Shapes:
    found: Shapes = {f"{base}embeddings.word_embeddings.weight": (len(VOCABULARY), WIDTH)}
    if types:
        found[f"{base}embeddings.token_type_embeddings.weight"] = (types, WIDTH)
    return found | vectors(f"{base}{last}")


def vectors(*names: str) -> Shapes:
    return {f"{name}.{each}": (WIDTH,) for name in names for each in ("weight", "bias")}


def matrix(name: str, outputs: int, inputs: int, has_bias: bool = True) -> Shapes:
    found: Shapes = {f"{name}.weight": (outputs, inputs)}
    return found | ({f"{name}.bias": (outputs,)} if has_bias else {})


def gte_shapes(base: str = "", types: int = 0) -> Shapes:
    found = table_shapes(base, types, "embeddings.LayerNorm")
    for index in range(2):
        layer = f"{base}encoder.layer.{index}"
        found |= matrix(f"{layer}.attention.qkv_proj", 3 * WIDTH, WIDTH)
        found |= matrix(f"{layer}.attention.o_proj", WIDTH, WIDTH)
        found |= matrix(f"{layer}.mlp.up_gate_proj", 2 * INNER, WIDTH, False)
        found |= matrix(f"{layer}.mlp.down_proj", WIDTH, INNER)
        found |= vectors(f"{layer}.attn_ln", f"{layer}.mlp_ln")
    return found


def jina_shapes(of_code: bool = False, base: str = "") -> Shapes:
    found = table_shapes(base, 2, "embeddings.LayerNorm")
    for index in range(2):
        layer = f"{base}encoder.layer.{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            found |= matrix(f"{layer}.attention.{name}", WIDTH, WIDTH)
        found |= vectors(f"{layer}.attention.output.LayerNorm")
        up, down, last = "gated_layers", "wo", "mlp.layernorm"
        if of_code:
            up, down, last = "up_gated_layer", "down_layer", "layer_norm_2"
            norms = [f"{layer}.attention.self.layer_norm_{each}" for each in "qk"]
            found |= vectors(*norms, f"{layer}.layer_norm_1")
        found |= matrix(f"{layer}.mlp.{up}", 2 * INNER, WIDTH, False)
        found |= matrix(f"{layer}.mlp.{down}", WIDTH, INNER)
        found |= vectors(f"{layer}.{last}")
    return found


def nomic_shapes(dense: bool = False) -> Shapes:
    found = table_shapes("", 2 if dense else 1, "emb_ln")
    for index in range(2):
        layer = f"encoder.layers.{index}"
        found |= matrix(f"{layer}.attn.Wqkv", 3 * WIDTH, WIDTH, not dense)
        found |= matrix(f"{layer}.attn.out_proj", WIDTH, WIDTH, not dense)
        found |= vectors(f"{layer}.norm1", f"{layer}.norm2")
        if dense:
            found |= matrix(f"{layer}.mlp.fc11", INNER, WIDTH, False)
            found |= matrix(f"{layer}.mlp.fc12", INNER, WIDTH, False)
            found |= matrix(f"{layer}.mlp.fc2", WIDTH, INNER, False)
        elif index % 2 == 0:
            found |= matrix(f"{layer}.mlp.fc1", INNER, WIDTH)
            found |= matrix(f"{layer}.mlp.fc2", WIDTH, INNER)
        else:
            found |= matrix(f"{layer}.mlp.router.layer", 4, WIDTH, False)
            found |= {
                f"{layer}.mlp.experts.mlp.{each}": (4 * INNER, WIDTH) for each in ("w1", "w2")
            }
            found[f"{layer}.mlp.experts.bias"] = (WIDTH,)
    return found


def neobert_shapes() -> Shapes:
    words = len(VOCABULARY)
    found: Shapes = {"model.encoder.weight": (words, WIDTH), "model.layer_norm.weight": (WIDTH,)}
    for index in range(2):
        layer = f"model.transformer_encoder.{index}"
        found |= matrix(f"{layer}.qkv", 3 * WIDTH, WIDTH, False)
        found |= matrix(f"{layer}.wo", WIDTH, WIDTH, False)
        found |= matrix(f"{layer}.ffn.w12", 2 * INNER, WIDTH, False)
        found |= matrix(f"{layer}.ffn.w3", WIDTH, INNER, False)
        found |= {f"{layer}.{name}_norm.weight": (WIDTH,) for name in ("attention", "ffn")}
    return found | matrix("decoder", words, WIDTH)


@dataclass(frozen=True)
class Published:
    """A checkpoint in the form of its makers, and what their code computes."""

    config: Mapping[str, Any]
    shapes: Shapes
    forward: Forward
    architecture: str


PUBLISHED = {
    "gte-en": Published(GTE, gte_shapes(), gte, "NewModel"),
    "gte-multilingual": Published(
        GTE | {"type_vocab_size": 1, "rope_scaling": {"factor": 8.0, "type": "ntk"}},
        gte_shapes("new.", 1) | matrix("classifier", 2, WIDTH),
        gte,
        "NewModel",
    ),
    "gte-plain": Published(GTE | {"rope_scaling": None}, gte_shapes(), gte, "NewModel"),
    "jina-en": Published(JINA, jina_shapes(), jina, "JinaBertModel"),
    "jina-code": Published(
        JINA
        | {"_name_or_path": "", "auto_map": {"AutoModel": f"{CODE}--modeling_bert.JinaBertModel"}},
        jina_shapes(of_code=True),
        jina,
        "JinaBertModel",
    ),
    "jina-reranker": Published(JINA, jina_shapes(base="bert."), jina, "JinaBertModel"),
    "nomic-v2-moe": Published(NOMIC, nomic_shapes(), nomic, "NomicBertModel"),
    "neobert": Published(NEOBERT, neobert_shapes(), neobert, "NeoBERTModel"),
    "nomic-v1": Published(NOMIC | DENSE, nomic_shapes(dense=True), nomic, "NomicBertModel"),
}


def make(name: str, folder: Path, further: Shapes | None = None, **settings: Any) -> Path:
    """A folder as it is published, with random weights; one with settings does not pool."""
    found = PUBLISHED[name]
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for key, shape in (found.shapes | (further or {})).items():
        weights[key] = 0.3 * torch.randn(shape, generator=generator)
        if len(shape) == 1 and key.endswith("weight"):  # of norms
            weights[key] += 1
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**found.config, **settings}))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    inputs = ["input_ids", "attention_mask"]
    add_json(folder / "tokenizer_config.json", model_input_names=inputs)
    if not settings:
        write_modules(folder, "mean_tokens", True)
    return folder


def ids_of(length: int) -> torch.Tensor:
    return torch.arange(length) * 7 % (len(VOCABULARY) - 5) + 5


@pytest.mark.parametrize("name", PUBLISHED)
def test_they_compute_what_their_makers_code_does(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    source = make(name, tmp_path / "checkpoint")
    written = direct(source, tmp_path / "bundle")
    assert (written.architecture, written.task) == (published.architecture, "embed")
    assert written.parity.reference == "numpy"
    texts, weights = [ids_of(length) for length in (40, 1, 17)], load_file(source / WEIGHTS)
    for kernels in dict.fromkeys([None, kernels_here()]):
        session = MaskedSession(Loaded(tmp_path / "bundle" / GRAPH, kernels=kernels))
        found = session.run(
            [each.numpy() for each in texts], [np.zeros_like(each) for each in texts]
        )
        for vector, ids in zip(found, texts, strict=True):
            states = published.forward(weights, published.config, ids)
            expected = nn.functional.normalize(states.mean(dim=0), dim=0).numpy()
            np.testing.assert_allclose(vector, expected, rtol=0, atol=2e-5)


HEADS_OF: dict[str, tuple[str, str, Shapes]] = {
    "NewForSequenceClassification": (
        "gte-multilingual",
        "new.pooler.dense",
        matrix("new.pooler.dense", WIDTH, WIDTH) | matrix("classifier", 1, WIDTH),
    ),
    "JinaBertForSequenceClassification": (
        "jina-reranker",
        "bert.pooler.dense",
        matrix("bert.pooler.dense", WIDTH, WIDTH) | matrix("classifier", 1, WIDTH),
    ),
    "NeoBERTForSequenceClassification": (
        "neobert",
        "dense",
        matrix("dense", WIDTH, WIDTH) | matrix("classifier", 1, WIDTH),
    ),
}


@pytest.mark.parametrize("architecture", HEADS_OF)
def test_rerankers(architecture: str, tmp_path: Path) -> None:
    """gte-multilingual-reranker, jina-reranker-v1 and a NeoBERT that was tuned."""
    name, dense, shapes = HEADS_OF[architecture]
    source = make(name, tmp_path / "checkpoint", shapes, architectures=[architecture], num_labels=1)
    written = direct(source, tmp_path / "bundle")
    assert (written.architecture, written.task) == (architecture, "classify")
    assert len(written.labels) == 1
    ids, weights = ids_of(23), load_file(source / WEIGHTS)
    found = MaskedSession(Loaded(tmp_path / "bundle" / GRAPH)).run(
        [ids.numpy()], [np.zeros_like(ids)]
    )
    states = PUBLISHED[name].forward(weights, PUBLISHED[name].config, ids)
    expected = linear(weights, "classifier", linear(weights, dense, states[0]).tanh())
    np.testing.assert_allclose(found[0], expected.numpy(), rtol=0, atol=1e-4)
    with pytest.raises(NotDirectError, match="for classify, and --task asks for rerank"):
        direct(source, tmp_path / "other", task="rerank")


def test_neobert_fills_masks(tmp_path: Path) -> None:
    """Its output layer is not the table of tokens."""
    source = make("neobert", tmp_path / "checkpoint", max_length=80)
    written = direct(source, tmp_path / "bundle")
    assert (written.architecture, written.task) == ("NeoBERTForMaskedLM", "fill-mask")
    assert written.max_length == 80
    ids, weights = ids_of(23), load_file(source / WEIGHTS)
    session = MaskedSession(Loaded(tmp_path / "bundle" / GRAPH))
    found = session.run([ids.numpy()], [np.zeros_like(ids)])[0]
    expected = linear(weights, "decoder", neobert(weights, NEOBERT, ids))
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-4)


def test_they_can_be_int8_and_become_fp32_where_that_loses_too_much(tmp_path: Path) -> None:
    """The tracer knows none of them, so no layers are kept back."""
    source = make("nomic-v2-moe", tmp_path / "checkpoint")
    manifest = direct(source, tmp_path / "int8", "int8", gate=ANY_LOSS)
    assert manifest.quality is not None
    ids = ids_of(40).numpy()
    vectors = [
        MaskedSession(Loaded(bundle / GRAPH, kernels=kernels_here())).run([ids], [ids * 0])[0]
        for bundle in (tmp_path / "int8", tmp_path / "fp32")
        if bundle.exists() or direct(source, bundle)
    ]
    assert vectors[0] @ vectors[1] > 0.99
    assert (
        export_any_way(str(source), tmp_path / "any", gate=Gate(max_loss=0.0)).precision == "fp32"
    )


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("gte-en", {"logn_attention_scale": True}),
        ("gte-en", {"pack_qkv": False}),
        ("gte-en", {"layer_norm_type": "rms_norm"}),
        ("gte-en", {"position_embedding_type": "absolute"}),
        ("gte-en", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}}),
        ("gte-en", {"rope_scaling": {"type": "yarn", "factor": 2.0}}),
        ("gte-en", {"rope_scaling": {"type": "ntk", "factor": -1.0}}),
        ("gte-en", {"rope_scaling": {"type": "ntk", "factor": 0.5}}),
        ("jina-en", {"hidden_act": "relu"}),
        ("jina-en", {"feed_forward_type": "reglu"}),
        ("jina-en", {"architectures": ["JinaBertForMultipleChoice"]}),
        ("nomic-v2-moe", {"moe_normalize_expert_weights": True}),
        ("nomic-v2-moe", {"num_shared_experts": 1}),
        ("nomic-v2-moe", {"prenorm": True}),
        ("nomic-v2-moe", {"rotary_emb_scale_base": 512}),
        ("nomic-v2-moe", {"rotary_emb_interleaved": True}),
        ("nomic-v2-moe", {"moe_top_k": 5}),
        ("nomic-v2-moe", {"activation_function": "swiglu"}),
        ("nomic-v2-moe", {"mlp_fc1_bias": False}),
        ("neobert", {"dim_head": 8}),
        ("neobert", {"ngpt": True}),
        ("neobert", {"architectures": ["NeoBERTForTokenClassification"]}),
    ],
)
def test_what_is_not_known_is_an_error(name: str, entry: dict[str, Any], tmp_path: Path) -> None:
    source = make(name, tmp_path / "checkpoint")
    direct(source, tmp_path / "bundle")
    make_again = {**PUBLISHED[name].config, **entry}
    if "architectures" in entry:
        (source / "modules.json").unlink()
    (source / "config.json").write_text(json.dumps(make_again))
    with pytest.raises(NotDirectError, match="known"):
        direct(source, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("gte-en", {"rope_scaling": {"type": "ntk", "factor": 4.0}}),
        ("gte-en", {"rope_theta": 10_000}),
        ("jina-en", {"num_attention_heads": 6}),
        ("nomic-v2-moe", {"moe_top_k": 1}),
        ("nomic-v2-moe", {"rotary_emb_base": 1000.0}),
        ("neobert", {"norm_eps": 0.1}),
    ],
)
def test_a_wrong_setting_does_not_pass(
    name: str, entry: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Edited(EncoderReference):
        def __init__(self, files: Any, weights: Weights) -> None:
            read = files.read_json
            told = {**PUBLISHED[name].config, **entry}
            given = SimpleNamespace(path=files.path, weights=files.weights)
            given.read_json = lambda file: told if file == "config.json" else read(file)
            super().__init__(given, weights)

    source = make(name, tmp_path / "checkpoint")
    monkeypatch.setattr(encoder_export, "EncoderReference", Edited)
    with pytest.raises(ExportError, match="the graph and the reference disagree"):
        direct(source, tmp_path / "bundle")


def test_code_of_others_is_not_passed_over(tmp_path: Path) -> None:
    """A class of another name may compute something else; nothing of it is run."""
    source = make("gte-en", tmp_path / "checkpoint")
    add_json(source / "config.json", auto_map={"AutoModel": "modeling_mine.NewModel"})
    with pytest.raises(NotDirectError, match=r"auto_map .*modeling_mine.* is not known"):
        direct(source, tmp_path / "bundle")
    with pytest.raises(ExportError, match="has no model type 'new'"):
        export_any_way(str(source), tmp_path / "bundle")


def test_eurobert_as_published(tmp_path: Path) -> None:
    """Its makers' config.json, from before transformers had it, against transformers' class."""
    sizes: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": SIZE,
        "max_position_embeddings": 96,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "mask_token_id": 4,
    }
    torch.manual_seed(0)
    turns = {"rope_type": "default", "rope_theta": 250_000.0}
    model = EuroBertModel(EuroBertConfig(**sizes, rope_parameters=turns)).eval()
    source = tmp_path / "checkpoint"
    source.mkdir()
    stored = {f"model.{name}": value for name, value in model.state_dict().items()}
    head = {"lm_head.weight": torch.zeros(len(VOCABULARY), WIDTH)}
    save_file(stored | head, source / WEIGHTS, {"format": "pt"})
    code = {
        "AutoConfig": "configuration_eurobert.EuroBertConfig",
        "AutoModel": "modeling_eurobert.EuroBertModel",
        "AutoModelForPreTraining": "modeling_eurobert.EuroBertPreTrainedModel",
        "AutoModelForMaskedLM": "modeling_eurobert.EuroBertForMaskedLM",
        "AutoModelForSequenceClassification": "modeling_eurobert.EuroBertForSequenceClassification",
    }
    told = sizes | {
        "architectures": ["EuroBertForMaskedLM"],
        "auto_map": code,
        "attention_bias": False,
        "clf_pooling": "late",
        "hidden_act": "silu",
        "hidden_dropout": 0.0,
        "mask_token": "<|mask|>",
        "mlp_bias": False,
        "model_type": "eurobert",
        "pad_token": "<|end_of_text|>",
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 250_000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (source / "config.json").write_text(json.dumps(told))
    make_tokenizer().save(str(source / "tokenizer.json"))
    write_modules(source, "mean_tokens", True)
    written = direct(source, tmp_path / "bundle")
    assert (written.architecture, written.task) == ("EuroBertModel", "embed")
    session = MaskedSession(Loaded(tmp_path / "bundle" / GRAPH))
    for ids in (ids_of(96), ids_of(1)):
        found = session.run([ids.numpy()], [np.zeros_like(ids)])[0]
        with torch.no_grad():
            states = model(ids[None]).last_hidden_state[0]
        expected = nn.functional.normalize(states.mean(dim=0), dim=0).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def metadata(writer: gguf.GGUFWriter, config: SimpleNamespace) -> None:
    word_pieces(writer)
    basics(writer, config)
    writer.add_causal_attention(False)
    writer.add_layer_norm_eps(1e-12)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    if config.architecture == "nomic-bert-moe":
        writer.add_rope_freq_base(10_000.0)
        writer.add_moe_every_n_layers(2)
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)


def as_stacked(name: str, values: Any, _config: Any) -> Iterator[tuple[str, Any]]:
    """The converter has three dimensions for experts, and no bias behind them."""
    if name.endswith(("mlp.w1", "mlp.w2")):
        stacked = values.reshape(4, INNER, WIDTH)
        turned = stacked.swapaxes(1, 2) if name.endswith("w2") else stacked
        yield f"{name}.weight", turned
    elif not name.endswith("experts.bias"):
        yield name, values


@pytest.mark.parametrize(
    ("name", "architecture"), [("jina-en", "jina-bert-v2"), ("nomic-v2-moe", "nomic-bert-moe")]
)
@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_gguf(name: str, architecture: str, kind: str | None, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    weights = load_file(make(name, tmp_path / "checkpoint") / WEIGHTS)
    table = "embeddings.word_embeddings.weight"
    weights[table] = torch.randn(WORD_PIECES_SIZE, WIDTH, generator=torch.manual_seed(1))
    shape = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": 2}
    config = SimpleNamespace(
        architecture=architecture,
        num_attention_heads=HEADS,
        max_position_embeddings=96,
        tie_word_embeddings=False,
        **shape,
    )
    model = SimpleNamespace(config=config, state_dict=lambda: weights)
    matrices = ("ffn_down", "ffn_down_exps")  # the others have too few columns for a block
    path = write_gguf(
        tmp_path / "model.gguf",
        architecture,
        model,
        lambda writer: metadata(writer, config),
        as_stacked,
        {} if kind is None else {f"{each}.weight": kind for each in matrices},
    )
    precision = None if kind else "fp32"
    written = direct(path, tmp_path / "bundle", precision, gate=ANY_LOSS if kind else Gate())
    assert written.precision == ("int8" if kind else "fp32")
    ids = torch.arange(30) * 7 % (WORD_PIECES_SIZE - 5) + 5
    session = MaskedSession(Loaded(tmp_path / "bundle" / GRAPH, kernels=kernels_here()))
    found = session.run([ids.numpy()], [np.zeros_like(ids)])[0]
    bias = "encoder.layers.1.mlp.experts.bias"
    weights |= {bias: torch.zeros(WIDTH)} if bias in weights else {}
    told = {**published.config, "layer_norm_epsilon": 1e-12}
    states = published.forward(weights, told, ids)
    expected = nn.functional.normalize(states.mean(dim=0), dim=0).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 if kind else 2e-5)
