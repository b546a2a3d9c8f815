"""The shipped causal bundle against transformers' `generate`, token for token.

The checkpoint that the bundle was made from does not ship, so the model is put together again from
the graph's weights: only the weights come from there, the arithmetic is transformers' own.
"""

import asyncio
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from transformers import LlamaConfig, LlamaForCausalLM

from maskdial.bundle import load_bundle
from maskdial.causal.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.config import Config
from maskdial.metrics import Metrics
from maskdial.served import STARTER_FOLDER, CausalModel, load_model
from maskdial.tokenizer import Tokenizer

BUNDLE = STARTER_FOLDER / "causal"
NEW_TOKENS = 48
A_STEP = 0.2  # in log-probability: what one rounding step may make of it
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


def rebuild(folder: Path) -> LlamaForCausalLM:
    """The transformers model with the weights of an exported int8 Llama graph, and its rounding."""
    graph = onnx.load(folder / "model.onnx").graph
    weights = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    norms, matrices = [], []
    for node in graph.node:
        held = [weights[name] for name in node.input if name in weights]
        if "LayerNormalization" in node.op_type:
            norms.append(held[0])
        elif node.op_type == "MatMulIntegerToFloat":
            integers, _step, scale, _zero_point = held
            matrices.append((integers.astype(np.float32) * scale).T)
    attention = next(node for node in graph.node if node.op_type == "GroupQueryAttention")
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in attention.attribute}
    cos = next(weights[name] for name in attention.input if name == "cos")
    embedding = next(weights[node.input[0]] for node in graph.node if node.op_type == "Gather")
    num_layers = (len(norms) - 1) // 2
    *matrices, head = matrices
    assert len(matrices) == 5 * num_layers, "qkv, output, gate, up and down of each layer"
    config = LlamaConfig(
        vocab_size=embedding.shape[0],
        hidden_size=embedding.shape[1],
        intermediate_size=matrices[2].shape[0],
        num_hidden_layers=num_layers,
        num_attention_heads=attributes["num_heads"],
        num_key_value_heads=attributes["kv_num_heads"],
        head_dim=2 * cos.shape[1],
        max_position_embeddings=cos.shape[0],
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        eos_token_id=0,
        pad_token_id=0,
    )
    state = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": norms[-1],
        "lm_head.weight": head,
    }
    kv_size = config.num_key_value_heads * config.head_dim
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}."
        qkv, output, gate, up, down = matrices[5 * layer : 5 * layer + 5]
        query, key, value = np.split(qkv, [qkv.shape[0] - 2 * kv_size, qkv.shape[0] - kv_size])
        state |= {
            prefix + "self_attn.q_proj.weight": query,
            prefix + "self_attn.k_proj.weight": key,
            prefix + "self_attn.v_proj.weight": value,
            prefix + "self_attn.o_proj.weight": output,
            prefix + "mlp.gate_proj.weight": gate,
            prefix + "mlp.up_proj.weight": up,
            prefix + "mlp.down_proj.weight": down,
            prefix + "input_layernorm.weight": norms[2 * layer],
            prefix + "post_attention_layernorm.weight": norms[2 * layer + 1],
        }
    model = LlamaForCausalLM(config).eval()
    tensors = {name: torch.from_numpy(array.copy()) for name, array in state.items()}
    model.load_state_dict(tensors)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(round_rows)
    return model


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
def prompts() -> list[list[int]]:
    manifest = load_bundle("causal", BUNDLE).manifest
    tokenizer = Tokenizer.from_file(BUNDLE / "tokenizer.json", manifest.special_tokens)
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


@pytest.fixture(scope="module")
def texts(prompts: list[list[int]]) -> dict[str, list[Text]]:
    """Alone and together, with prompts in one piece and in pieces."""
    found = {}
    for chunk in (256, 1):
        config = Config(slots=8, prefill_chunk_tokens=chunk)
        model = load_model("causal", BUNDLE, config, Metrics(()))
        assert isinstance(model, CausalModel)
        try:
            found[f"alone, chunks of {chunk} or more"] = [
                generate(model, [each])[0] for each in prompts
            ]
            found[f"together, chunks of {chunk} or more"] = generate(model, prompts)
        finally:
            model.engine.stop(0)
    return found


def test_greedy_tokens_are_those_of_transformers(
    prompts: list[list[int]], texts: dict[str, list[Text]]
) -> None:
    """Token by token, transformers reading what we wrote before.

    Where its sums differ in the last bit, an activation may be rounded the other way, and two
    tokens that are as likely to one such step may change places.
    """
    reference = rebuild(BUNDLE)
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
