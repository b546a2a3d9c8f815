"""The forms of attention and products that models need, on the device and on the CPU.

Each takes seconds of compiling shaders in software, so most are left to ``make test-webgpu``.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from maskdial.bundle.manifest import Heads, KVLayout
from maskdial.errors import BundleError
from maskdial.runtime.memory import HostMemory
from maskdial.runtime.providers.webgpu import PROVIDER
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("adapter")]

VOCAB, HEADS, KV_HEADS, HEAD_DIM, MAX_LENGTH, SLOTS = 64, 4, 2, 16, 48, 3
WIDTH = HEADS * HEAD_DIM
LAYOUT = KVLayout(layers=(Heads(KV_HEADS, HEAD_DIM),))
PACKED = (HEADS + 2 * KV_HEADS) * HEAD_DIM
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"do_rotary": 1},
    "interleaved": {"do_rotary": 1, "rotary_interleaved": 1},
    "window": {"local_window_size": 5},
    "sinks": {"sinks": True},
    "bias": {"bias": True},
    "int4": {"bits": 4, "block": 32},
    "int4 of 128": {"bits": 4, "block": 128},
    "int8 of 32": {"bits": 8, "block": 32},
}
IN_EVERY_RUN = ("window",)


def build_graph(
    path: Path,
    *,
    sinks: bool = False,
    bias: bool = False,
    bits: int = 0,
    block: int = 0,
    **form: Any,
) -> None:
    """One layer of attention over packed keys and values, between embeddings and a head."""
    rng = np.random.default_rng(0)
    weights = {
        "tokens": rng.standard_normal((VOCAB, WIDTH)).astype(np.float32),
        "packed": rng.standard_normal((WIDTH, PACKED)).astype(np.float32) / 4,
        "flat": np.array([-1, WIDTH], np.int64),
    }
    node, inputs = helper.make_node, ["qkv", "", "", "past_key.0", "past_value.0"]
    inputs += ["seqlens_k", "total_sequence_length", "", "", "", "", ""]
    before: list[Any] = []
    if form.get("do_rotary"):
        angles = np.arange(MAX_LENGTH)[:, None] * 0.5 ** np.arange(HEAD_DIM // 2)
        weights["cos"], weights["sin"] = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
        inputs[7:9] = "cos", "sin"
    if sinks:
        weights["sinks"] = rng.standard_normal(HEADS).astype(np.float32)
        inputs[11] = "sinks"
    if bias:  # (1, heads, new tokens, total), as ALiBi's
        slopes = -0.3 * np.arange(1, HEADS + 1, dtype=np.float32)[:, None]
        weights["slopes"] = (slopes * np.arange(MAX_LENGTH)[::-1])[None, :, None].astype(np.float32)
        weights |= {"zero": np.array(0), "one": np.array(1), "third": np.array([1])}
        before = [
            node("Cast", ["total_sequence_length"], ["total"], to=TensorProto.INT64),
            node("Range", ["zero", "total", "one"], ["keys"]),
            node("Gather", ["slopes", "keys"], ["of_keys"], axis=3),
            node("Shape", ["input_ids"], ["ids_shape"]),
            node("Gather", ["ids_shape", "third"], ["num_new"]),
            node("Concat", ["third", "third", "num_new", "third"], ["sizes"], axis=0),
            node("Expand", ["of_keys", "sizes"], ["attention_bias"]),
        ]
        inputs[10] = "attention_bias"
    while not inputs[-1]:
        inputs.pop()
    head = node("MatMul", ["wanted", "head"], ["logits"])
    if bits:
        blocks = -(-WIDTH // block)
        weights["head"] = rng.integers(0, 256, (VOCAB, blocks, block * bits // 8), np.uint8)
        weights["scales"] = rng.random((VOCAB * blocks,), np.float32) / 2 ** (bits - 3)
        sizes = {"K": WIDTH, "N": VOCAB, "bits": bits, "block_size": block}
        head = node(
            "MatMulNBits", ["wanted", "head", "scales"], ["logits"], domain="com.microsoft", **sizes
        )
    else:
        weights["head"] = rng.standard_normal((WIDTH, VOCAB)).astype(np.float32)
    nodes = [
        node("Gather", ["tokens", "input_ids"], ["hidden"]),
        node("MatMul", ["hidden", "packed"], ["qkv"]),
        *before,
        node(
            "GroupQueryAttention",
            inputs,
            ["attended", "present_key.0", "present_value.0"],
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
            **form,
        ),
        node("Add", ["hidden", "attended"], ["sum"]),
        node("Reshape", ["sum", "flat"], ["all_rows"]),
        node("Gather", ["all_rows", "rows"], ["wanted"]),
        head,
    ]
    info, cache = helper.make_tensor_value_info, ["batch", KV_HEADS, "max_length", HEAD_DIM]
    graph = helper.make_graph(
        nodes,
        "causal",
        [
            info("input_ids", TensorProto.INT64, ["batch", "new_tokens"]),
            info("seqlens_k", TensorProto.INT32, ["batch"]),
            info("total_sequence_length", TensorProto.INT32, []),
            info("rows", TensorProto.INT64, ["num_rows"]),
            info("past_key.0", TensorProto.FLOAT, cache),
            info("past_value.0", TensorProto.FLOAT, cache),
        ],
        [
            info("logits", TensorProto.FLOAT, ["num_rows", VOCAB]),
            info("present_key.0", TensorProto.FLOAT, cache),
            info("present_value.0", TensorProto.FLOAT, cache),
        ],
        [numpy_helper.from_array(each, name) for name, each in weights.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)


def logits_of(graph: Path, provider: str, memory: Any) -> list[np.ndarray[Any, Any]]:
    """Of prompts in three slots, one of them in two pieces, a copy, and ragged steps."""
    runner = Runner(
        Session(graph, SessionOptions(provider, 1)),
        LAYOUT,
        memory=memory,
        slots=SLOTS,
        max_length=MAX_LENGTH,
        vocab_size=VOCAB,
    )
    tokens = np.random.default_rng(1).integers(0, VOCAB, 40)
    logits = [
        np.array(runner.prefill(0, tokens[:13], 0, 13)),
        np.array(runner.prefill(2, tokens[:20], 0)),
        np.array(runner.prefill(2, tokens[20:29], 20)),
    ]
    runner.cache.copy(2, 1, 25)
    lengths = np.array([13, 25, 29])
    for step in range(3):
        rows = np.arange(3) if step else np.array([0, 2])
        logits.append(np.array(runner.decode(tokens[step : step + 3], lengths, rows)))
        lengths[rows] += 1
    return logits


def test_a_cap_is_refused(tmp_path: Path) -> None:
    """The plug-in ignores it."""
    graph = tmp_path / "model.onnx"
    build_graph(graph, softcap=2.0)
    with pytest.raises(BundleError, match="ignores the cap of its scores"):
        Session(graph, SessionOptions("webgpu", 1))


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.webgpu)
        for name in FORMS
    ],
)
def test_a_form_is_the_cpus(form: str, tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    build_graph(graph, **FORMS[form])
    wanted = logits_of(graph, "cpu", HostMemory())
    found = logits_of(graph, "webgpu", PROVIDER.memory())
    for computed, expected in zip(found, wanted, strict=True):
        assert np.abs(computed - expected).max() <= 1e-5 * np.abs(expected).max()
