"""Attention over texts without padding: what ONNX Runtime's operators for it save on a GPU.

    python -m tools.gpu_session.packed cuda REPORT.json

A layer's attention of BERT-base over ragged texts, once padded (`MultiHeadAttention` with the
texts' lengths, as our exports have it), once packed (`PackedMultiHeadAttention`). Both are compared
with NumPy, and timed. There is no packed kernel for the CPU, where only the first runs. The server
uses no packed operator: this is to tell whether it should.
"""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

HEADS, WIDTH = 12, 64
HIDDEN = HEADS * WIDTH
_TOLERANCE = 5e-3  # of averages of normal numbers in half precision
_PASSES = 50
_OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]


def padded_graph(element: int) -> ModelProto:
    """Inputs ``query``, ``key`` and ``value`` (texts, longest, hidden) of a type of `TensorProto`,
    ``lengths`` int32 (texts,); output ``context``, of the inputs' shape, undefined in the padding.
    """
    node = helper.make_node(
        "MultiHeadAttention",
        ["query", "key", "value", "", "lengths"],
        ["context"],
        domain="com.microsoft",
        num_heads=HEADS,
    )
    shape: list[str | int] = ["texts", "longest", HIDDEN]
    return _model([node], element, shape, [_value("lengths", TensorProto.INT32, ["texts"])])


def packed_graph(element: int) -> ModelProto:
    """Inputs ``query``, ``key`` and ``value`` (tokens, hidden), ``token_offset`` int32 (texts,
    longest) and ``cumulative`` int32 (texts + 1,); output ``context`` (tokens, hidden).
    """
    node = helper.make_node(
        "PackedMultiHeadAttention",
        ["query", "key", "value", "", "token_offset", "cumulative"],
        ["context"],
        domain="com.microsoft",
        num_heads=HEADS,
    )
    offsets = _value("token_offset", TensorProto.INT32, ["texts", "longest"])
    cumulative = _value("cumulative", TensorProto.INT32, ["texts_and_one"])
    return _model([node], element, ["tokens", HIDDEN], [offsets, cumulative])


def token_offsets(lengths: NDArray[np.int32]) -> NDArray[np.int32]:
    """Where the padded batch has each token, then where it has padding, int32 (texts, longest):
    what ONNX Runtime's `RemovePadding` gives.
    """
    valid = np.arange(lengths.max()) < lengths[:, None]
    flat = np.concatenate([np.flatnonzero(valid), np.flatnonzero(~valid)])
    return flat.reshape(valid.shape).astype(np.int32)


def expected(qkv: NDArray[Any], lengths: NDArray[np.int32]) -> NDArray[np.float64]:
    """The attention of packed queries, keys and values, (3, tokens, hidden), text by text."""
    context = []
    for text in np.split(qkv.astype(np.float64), np.cumsum(lengths)[:-1], axis=1):
        query, key, value = text.reshape(3, -1, HEADS, WIDTH).transpose(0, 2, 1, 3)
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(WIDTH)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended = shares / shares.sum(-1, keepdims=True) @ value
        context.append(attended.transpose(1, 0, 2).reshape(-1, HIDDEN))
    return np.concatenate(context)


def measure(provider: str, texts: int, longest: int) -> dict[str, Any]:
    """Compares and times both graphs on ragged texts of up to so many tokens, in fp16 on CUDA.

    Raises:
        AssertionError: one of them computes something else.
    """
    element = TensorProto.FLOAT if provider == "cpu" else TensorProto.FLOAT16
    dtype = helper.tensor_dtype_to_np_dtype(element)
    rng = np.random.default_rng(0)
    lengths = rng.integers(longest // 8, longest + 1, texts).astype(np.int32)
    lengths[0] = longest
    valid = np.arange(longest) < lengths[:, None]
    qkv = rng.standard_normal((3, int(lengths.sum()), HIDDEN)).astype(dtype)
    padded = np.zeros((3, texts, longest, HIDDEN), dtype)
    padded[:, valid] = qkv
    names = ("query", "key", "value")
    wanted = expected(qkv, lengths)
    result: dict[str, Any] = {"texts": texts, "tokens": int(lengths.sum()), "padded": valid.size}
    feeds: Mapping[str, NDArray[Any]] = dict(zip(names, padded, strict=True))
    context, result["padded_ms"] = _timed(
        padded_graph(element), provider, {**feeds, "lengths": lengths}
    )
    result["padded_error"] = float(np.abs(context[valid] - wanted).max())
    if provider != "cpu":
        cumulative = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        feeds = dict(zip(names, qkv, strict=True))
        feeds = {**feeds, "token_offset": token_offsets(lengths), "cumulative": cumulative}
        context, result["packed_ms"] = _timed(packed_graph(element), provider, feeds)
        result["packed_error"] = float(np.abs(context - wanted).max())
    assert max(value for name, value in result.items() if "error" in name) < _TOLERANCE, result
    return result


def _timed(
    graph: ModelProto, provider: str, feeds: Mapping[str, NDArray[Any]]
) -> tuple[NDArray[Any], float]:
    """The output, and the milliseconds of a pass over inputs that are on the device."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", str(int(provider != "cpu")))
    name = "CPUExecutionProvider" if provider == "cpu" else "CUDAExecutionProvider"
    session = ort.InferenceSession(graph.SerializeToString(), options, providers=[name])
    binding = session.io_binding()
    for each, array in feeds.items():
        binding.bind_ortvalue_input(each, ort.OrtValue.ortvalue_from_numpy(array, provider, 0))
    binding.bind_output("context", provider)
    times = []
    for _ in range(_PASSES):
        started = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        times.append(time.perf_counter() - started)
    (context,) = binding.copy_outputs_to_cpu()
    return context, 1000 * float(np.median(times))


def _model(nodes: list[Any], element: int, shape: list[str | int], others: list[Any]) -> ModelProto:
    inputs = [_value(name, element, shape) for name in ("query", "key", "value")]
    outputs = [_value("context", element, shape)]
    graph = helper.make_graph(nodes, "attention", [*inputs, *others], outputs)
    return helper.make_model(graph, opset_imports=_OPSETS, ir_version=9)


def _value(name: str, element: int, shape: list[str | int]) -> Any:
    return helper.make_tensor_value_info(name, element, shape)


def main(provider: str, report: str) -> int:
    """Writes the report."""
    if provider == "cuda":
        from maskdial.runtime.providers.cuda import load_libraries

        load_libraries()
    sizes = ((4, 32),) if provider == "cpu" else ((32, 128), (128, 128), (32, 512))
    results = [measure(provider, *size) for size in sizes]
    Path(report).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(results)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
