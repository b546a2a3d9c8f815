"""Tiny EAGLE-3 heads, in both layouts of checkpoints, and what they predict, in plain torch."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor

SIZE, HEADS, DIM, INNER = 32, 2, 16, 48
EPS, THETA = 1e-6, 10_000.0
NUM_LAYERS, PLACES = 4, (1, 2, 3)
Tensors = dict[str, Tensor]


def make_target(tokenizer: Any, max_length: int) -> Any:
    """A Llama of random weights but for its head, which goes in a circle of letters."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=INNER,
        max_position_embeddings=max_length,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=None,
        initializer_range=0.1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    circle = [tokenizer.token_to_id(letter) for letter in "abcdefg"]
    with torch.no_grad():
        table = model.model.embed_tokens.weight.normal_()
        head = torch.zeros_like(table)
        head[circle] = 0.3 * table[circle[-1:] + circle[:-1]]  # each is like the one before it
        model.lm_head.weight.copy_(head)
    return model


def make_head(num_drafted: int, vocab_size: int, *, num_places: int = len(PLACES)) -> Tensors:
    """Random weights by SafeAILab's names, of a head that predicts every other token or so."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return 0.15 * torch.randn(*shape, generator=generator)

    def norm(size: int = SIZE) -> Tensor:
        return 1 + normal(size)

    token_ids = torch.randperm(vocab_size, generator=generator)[:num_drafted].sort().values
    return {
        "fc.weight": normal(SIZE, num_places * SIZE),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        **{
            f"midlayer.self_attn.{name}_proj.weight": normal(HEADS * DIM, 2 * SIZE)
            for name in "qkv"
        },
        "midlayer.self_attn.o_proj.weight": normal(SIZE, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": normal(INNER, SIZE),
        "midlayer.mlp.up_proj.weight": normal(INNER, SIZE),
        "midlayer.mlp.down_proj.weight": normal(SIZE, INNER),
        "norm.weight": norm(),
        "lm_head.weight": normal(num_drafted, SIZE),
        "d2t": token_ids - torch.arange(num_drafted),
        "t2d": torch.isin(torch.arange(vocab_size), token_ids),
    }


def make_circling(folder: Path, tokenizer: Any, max_length: int) -> None:
    """A target in the folder, and in ``head`` one that mostly goes in the same circle."""
    target = make_target(tokenizer, max_length)
    target.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    table: Tensor = target.model.embed_tokens.weight
    circle = [tokenizer.token_to_id(letter) for letter in "abcdefg"]
    others = [each for each in range(5, 40) if each not in circle]
    drafted = torch.tensor(sorted(circle + others))
    tensors = make_head(len(drafted), len(table))
    # A token attends to those like it, and takes what its embedding is
    one = torch.eye(SIZE)
    for name, factor in (("q", 1.5), ("k", 1.5), ("v", 3.0)):
        tensors[f"midlayer.self_attn.{name}_proj.weight"][:, :SIZE] += factor * one
    tensors["midlayer.self_attn.o_proj.weight"] += one
    before = dict(zip(circle, circle[-1:] + circle[:-1], strict=True))
    rows = [
        table[before[each]] if each in before else torch.zeros(SIZE) for each in drafted.tolist()
    ]
    tensors["lm_head.weight"] = 0.3 * torch.stack(rows).detach()
    tensors["d2t"] = drafted - torch.arange(len(drafted))
    tensors["t2d"] = torch.isin(torch.arange(len(table)), drafted)
    save(tensors, folder / "head", target, max_position_embeddings=16)  # as far as it was trained


def save(tensors: Tensors, folder: Path, target: Any, **settings: Any) -> None:
    """Saves a head in SafeAILab's layout, as SpecForge does."""
    folder.mkdir(exist_ok=True)
    layers = {"eagle_aux_hidden_state_layer_ids": [place - 1 for place in PLACES]}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"use_aux_hidden_state": True, **layers},
        "draft_vocab_size": len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else None,
        **layer_settings(target),
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(contiguous, folder / "model.safetensors")


def save_speculator(tensors: Tensors, folder: Path, target: Any, **settings: Any) -> None:
    """Saves a head in the layout of the speculators package."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "eagle_aux_hidden_state_layer_ids": list(PLACES),
        "transformer_layer_config": layer_settings(target),
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    renamed = {name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()}
    renamed["verifier_norm.weight"] = torch.ones(SIZE)
    safetensors.torch.save_file(renamed, folder / "model.safetensors")


def layer_settings(target: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": SIZE,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": target.config.vocab_size,
        "max_position_embeddings": target.config.max_position_embeddings,
    }


def predict(
    tensors: Mapping[str, Tensor],
    target: Any,
    token_ids: Tensor,
    num_steps: int = 1,
    settings: Mapping[str, Any] | None = None,
) -> Tensor:
    """The logits after a text, and after each draft token that follows: (num_steps, num_drafted).

    The paper's figure 5 and section 3.1, token by token, without a cache.
    """
    given = settings or {}
    text = [*token_ids.tolist()]
    states = target.model(token_ids[None], output_hidden_states=True).hidden_states
    parts = [states[place][0] for place in PLACES]
    if given.get("fc_norm"):
        parts = [_norm(x, tensors[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)]
    joined = torch.cat(parts, -1)
    if given.get("norm_before_fc"):
        joined = _norm(joined, tensors["input_norm.weight"])
    # The feature of the newest token is not known: each is read with the token after it
    features = (joined @ tensors["fc.weight"].T)[: len(text) - 1]
    found = []
    for _ in range(num_steps):
        embeds = target.model.embed_tokens.weight[text[1:]]
        states = _layer(tensors, embeds, features, bool(given.get("norm_before_residual")))
        last = _norm(states[-1], tensors["norm.weight"])
        found.append(tensors["lm_head.weight"] @ last)
        best = int(found[-1].argmax())
        text.append(best + int(tensors["d2t"][best]))
        own = last if given.get("norm_output") else states[-1]
        features = torch.cat([features, own[None]])
    return torch.stack(found)


def _layer(
    tensors: Mapping[str, Tensor], embeds: Tensor, features: Tensor, norm_first: bool
) -> Tensor:
    def weight(name: str) -> Tensor:
        return tensors[f"midlayer.{name}.weight"]

    normed = _norm(features, weight("hidden_norm"))
    both = torch.cat([_norm(embeds, weight("input_layernorm")), normed], -1)
    length = len(both)
    q, k, v = (
        (both @ weight(f"self_attn.{name}_proj").T).view(length, HEADS, DIM).transpose(0, 1)
        for name in "qkv"
    )
    scores = _rotated(q) @ _rotated(k).transpose(1, 2) / math.sqrt(DIM)
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf)
    attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1)
    states = (normed if norm_first else features) + attended @ weight("self_attn.o_proj").T
    read = _norm(states, weight("post_attention_layernorm"))
    gate = torch.nn.functional.silu(read @ weight("mlp.gate_proj").T)
    return states + (gate * (read @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T


def _norm(states: Tensor, weight: Tensor) -> Tensor:
    return weight * states * (states.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()


def _rotated(heads: Tensor) -> Tensor:
    angles = torch.arange(heads.shape[1])[:, None] * THETA ** (-torch.arange(0, DIM, 2) / DIM)
    turns = torch.polar(torch.ones_like(angles), angles)
    first, second = heads.chunk(2, -1)
    turned = torch.complex(first, second) * turns
    return torch.cat([turned.real, turned.imag], -1)
