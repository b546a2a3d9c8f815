"""The shipped model with both masks against transformers, under each of its masks.

The checkpoint that the bundle was made from does not ship, so the model is put together again from
the graph's weights: only the weights come from there, the arithmetic is transformers' own.
"""

import asyncio
import math
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from transformers import Qwen3Config, Qwen3ForCausalLM

from maskdial.bundle.bundle import Bundle, load_bundles
from maskdial.bundle.tokenizer import Tokenizer
from maskdial.causal.model import CausalModel
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.config import Config
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.loading import start_model
from maskdial.runtime.session import Session, SessionOptions

NEW_TOKENS = 48
A_STEP = 0.25  # in log-probability: what one rounding step may make of it
PROMPTS = [
    "Once upon a time there was a little",
    "The old man looked at the sea and",
    '"Where are you going?" said the',
    "In the morning the king called his three sons and told them that " * 12,
    "It was winter.",
    "She",
    "The cat and the mouse",
    "Far away, where the swallows fly when it is winter,",
]
BLANKS = [
    "The old king lived in a [MASK] by the sea.",
    "[MASK]!",
    "The [MASK] barked at the cat all through the night, and in the morning it was [MASK].",
    "In the morning the [MASK] called his three sons and told them that " * 12,
]


def rebuild(bundle: Bundle) -> Qwen3ForCausalLM:
    """The transformers model with the weights of an exported int8 Qwen3 graph, and its rounding."""
    graph = onnx.load(bundle.graph).graph
    weights = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    state = {}
    for name, array in weights.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight":
            state[name.removeprefix("model.")] = array
        elif kind == "int8":
            # A table has rows of its own scale, a product's matrix columns; it stands transposed.
            product = array.astype(np.float32) * weights[f"{module}.scale"]
            state[f"{module}.weight"] = product if module == "model.embed_tokens" else product.T
    model = Qwen3ForCausalLM(make_config(graph, weights, state)).eval()
    tensors = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
    model.load_state_dict(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]})
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(round_rows)
    return model


def make_config(
    graph: onnx.GraphProto, weights: dict[str, NDArray[Any]], state: dict[str, NDArray[Any]]
) -> Qwen3Config:
    """The shape, as the arrays and the tables of the positions' angles have it."""
    attention = next(node for node in graph.node if node.op_type == "GroupQueryAttention")
    cos, sin = (weights[name] for name in attention.input[7:9])
    angles = np.arctan2(sin[1].astype(np.float64), cos[1].astype(np.float64))
    head_dim = 2 * len(angles)
    first = "model.layers.0."
    norms = {
        onnx.helper.get_attribute_value(attribute)
        for node in graph.node
        if "LayerNormalization" in node.op_type
        for attribute in node.attribute
        if attribute.name == "epsilon"
    }
    (epsilon,) = norms
    vocab_size, hidden_size = state["model.embed_tokens.weight"].shape
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=len(state[first + "mlp.up_proj.weight"]),
        num_hidden_layers=sum(name.endswith("mlp.up_proj.weight") for name in state),
        num_attention_heads=len(state[first + "self_attn.q_proj.weight"]) // head_dim,
        num_key_value_heads=len(state[first + "self_attn.k_proj.weight"]) // head_dim,
        head_dim=head_dim,
        max_position_embeddings=len(cos),
        rope_parameters={
            "rope_type": "default",
            # The last angle is theta ** (2 / head_dim - 1).
            "rope_theta": float(angles[-1] ** (1 / (2 / head_dim - 1))),
        },
        rms_norm_eps=epsilon,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )


def round_rows(_module: torch.nn.Module, read: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """What a product reads: each row in 255 steps around 0, up to its own largest magnitude."""
    (rows,) = read
    step = rows.abs().amax(dim=-1, keepdim=True) / 127
    return ((rows / step).round() * step,)


Text = list[tuple[int, float]]
"""Token ids with their log-probabilities."""


def generate(model: CausalModel, prompts: list[list[int]]) -> list[Text]:
    """Greedy texts of prompts that run at the same time."""

    async def one(prompt: list[int]) -> Text:
        params = SamplingParams(max_new_tokens=NEW_TOKENS)
        async with model.engine.stream(Sequence(prompt, params)) as stream:
            return [(event.token_id, event.logprob) async for event in stream]

    async def everyone() -> list[Text]:
        return await asyncio.gather(*(one(prompt) for prompt in prompts))

    return asyncio.run(everyone())


@pytest.fixture(scope="module")
def bundles() -> tuple[Bundle, ...]:
    """The same weights under the causal mask and under the full one."""
    return load_bundles("hybrid", STARTER_FOLDER / "hybrid")


@pytest.fixture(scope="module")
def reference(bundles: tuple[Bundle, ...]) -> Qwen3ForCausalLM:
    return rebuild(bundles[0])


def encode(bundle: Bundle, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(bundle.tokenizer, bundle.manifest.special_tokens)
    return [tokenizer.encode(text).ids for text in texts]


@pytest.fixture(scope="module")
def prompts(bundles: tuple[Bundle, ...]) -> list[list[int]]:
    return encode(bundles[0], PROMPTS)


@pytest.fixture(scope="module")
def texts(bundles: tuple[Bundle, ...], prompts: list[list[int]]) -> dict[str, list[Text]]:
    """Alone and together, with prompts in one piece and in pieces."""
    found = {}
    for chunk in (256, 1):
        config = Config(slots=8, prefill_chunk_tokens=chunk)
        model = start_model(bundles[0], config, Metrics())
        assert isinstance(model, CausalModel)
        try:
            found[f"alone, chunks of {chunk} or more"] = [
                generate(model, [each])[0] for each in prompts
            ]
            found[f"together, chunks of {chunk} or more"] = generate(model, prompts)
        finally:
            model.stop()
    return found


def test_greedy_tokens_are_those_of_transformers(
    reference: Qwen3ForCausalLM, prompts: list[list[int]], texts: dict[str, list[Text]]
) -> None:
    """Token by token, transformers reading what we wrote before.

    Where its sums differ in the last bit, an activation may be rounded the other way, and two
    tokens that are as likely to one such step may change places.
    """
    num_tokens = num_equal = 0
    for index, prompt in enumerate(prompts):
        found = texts["alone, chunks of 256 or more"][index]
        ids = [token_id for token_id, _ in found]
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(dim=-1)
        for row, (token_id, logprob) in zip(logprobs, found, strict=True):
            assert float(row[token_id]) == pytest.approx(logprob, abs=A_STEP)
            assert float(row.max() - row[token_id]) < A_STEP
            num_equal += int(row.argmax()) == token_id
        num_tokens += len(ids)
    assert num_tokens >= len(prompts) * NEW_TOKENS / 2
    assert num_equal >= 0.98 * num_tokens


def test_log_probabilities_are_the_same_to_the_last_bit(texts: dict[str, list[Text]]) -> None:
    first, *others = texts.values()
    assert all(other == first for other in others)


def test_every_tokens_probabilities_under_the_full_mask_are_those_of_transformers(
    reference: Qwen3ForCausalLM, bundles: tuple[Bundle, ...]
) -> None:
    """Of a ragged batch. What a token is like is read in the row before it, as in generation."""
    full = bundles[1]
    encoded = encode(full, BLANKS)
    length = max(map(len, encoded))
    feeds = {
        "input_ids": np.array([ids + [0] * (length - len(ids)) for ids in encoded]),
        "lengths": np.array([len(ids) for ids in encoded], np.int32),
        "rows": np.array(
            [row * length + at for row, ids in enumerate(encoded) for at in range(1, len(ids))]
        ),
    }
    found = Session(full.graph, SessionOptions("cpu", 1, False)).run(feeds)
    expected = []
    for ids in encoded:
        everything = torch.zeros(1, 1, len(ids), len(ids))
        with torch.no_grad():
            expected.append(
                reference(torch.tensor([ids]), attention_mask=everything).logits[0, :-1]
            )
    wanted = torch.cat(expected).log_softmax(dim=-1)
    ours = torch.tensor(found).log_softmax(dim=-1)
    apart = (ours.exp() - wanted.exp()).abs().sum(-1) / 2
    assert float(apart.max()) < 0.05, "total variation distance"
    likely = wanted > math.log(0.001)
    assert float((ours - wanted).abs()[likely].max()) < A_STEP
    chosen = wanted.gather(1, ours.argmax(-1, keepdim=True)).squeeze(1)
    assert float((wanted.amax(-1) - chosen).max()) < A_STEP, "another choice, and no near tie"
