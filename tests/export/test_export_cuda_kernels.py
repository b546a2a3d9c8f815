"""Every operator of a half-precision graph has a CUDA kernel.

ONNX Runtime runs a node without one on the CPU, and copies its inputs and outputs in every pass.
"""

from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

import onnx_ir as ir
import pytest
from onnx_ir import DataType

from maskdial_export.checkpoint.source import find
from maskdial_export.model import load_checkpoint
from maskdial_export.quantize.quantize import HALF, IntegerPrecision, quantize
from maskdial_export.tracing.graph import optimize, save

Types = frozenset[DataType]

_FLOATS: Types = frozenset({DataType.FLOAT, DataType.FLOAT16})
_INDICES: Types = frozenset({DataType.INT32, DataType.INT64})
_BOOL: Types = frozenset({DataType.BOOL})
_INT32: Types = frozenset({DataType.INT32})
_INT64: Types = frozenset({DataType.INT64})
_HALF: Types = frozenset({DataType.FLOAT16})
_NUMBERS = _FLOATS | _INDICES
_ANY = _NUMBERS | _BOOL
_MS = "com.microsoft"


def _each(names: str, *types: Types, domain: str = "") -> dict[tuple[str, str], tuple[Types, ...]]:
    return {(domain, name): types for name in names.split()}


# Operator -> what each of its inputs may be, of the types that our graphs have; the last one is for
# all that follow. After docs/OperatorKernels.md of ONNX Runtime, and as onnxruntime-gpu 1.31.1
# itself places a node of each. CumSum has kernels for floats, too, which compute each prefix anew:
# in time quadratic in a text's length, so they are not for hidden states.
KERNELS = {
    **_each("Ceil Cos Gelu Gemm LayerNormalization Log MatMul Relu Sigmoid", _FLOATS),
    **_each("SimplifiedLayerNormalization Sin Softmax Tanh", _FLOATS),
    **_each("Abs Add Div Greater GreaterOrEqual Less LessOrEqual Mul Neg Pow Sign Sub", _NUMBERS),
    **_each("Cast Concat Equal Shape Transpose", _ANY),
    **_each("Expand Reshape Split Squeeze Unsqueeze", _ANY, _INT64),
    **_each("Gather GatherElements Slice", _ANY, _INDICES),
    **_each("And Not", _BOOL),
    **_each("Clip", _FLOATS | _INT64),
    **_each("CumSum", _INT64),
    **_each("Range", _INDICES | {DataType.FLOAT}),
    **_each("ReduceL2", _FLOATS, _INT64),
    **_each("ReduceSum Tile", _NUMBERS, _INT64),
    **_each("Where", _BOOL, _NUMBERS),
    **_each("BiasGelu FusedMatMul SkipSimplifiedLayerNormalization", _FLOATS, domain=_MS),
    **_each("GroupQueryAttention", *[_HALF] * 5, _INT32, _INT32, _HALF, domain=_MS),
    **_each("MatMulNBits", _FLOATS, frozenset({DataType.UINT8}), _FLOATS, domain=_MS),
    **_each("MultiHeadAttention", *[_FLOATS] * 4, _INT32, _FLOATS, domain=_MS),
    **_each("RotaryEmbedding", _FLOATS, _INT64, _FLOATS, domain=_MS),
}

CAUSAL = ("gpt2", "gpt-neox", "llama", "qwen3", "phi3", "gemma2")
MASKED = (
    "bert",
    "roberta",
    "deberta-v2",
    "modernbert-classify",
    "albert-question-answering",
    "bert-embed",
    "modernbert-embed",
)
QUICK = ("gpt2", "gemma2", "llama:full", "bert", "deberta-v2", "modernbert-embed")
"""At least one of each kind of attention and position; the others are marked."""


def type_of(value: ir.Value) -> DataType | None:
    """A value's element type, inferred from its producer if the file has none."""
    producer = value.producer()
    if value.dtype is not None or producer is None:
        return value.dtype
    if producer.op_type == "Cast":
        return DataType(producer.attributes.get_int("to"))
    source = producer.inputs[0]
    return None if source is None else type_of(source)


def without_kernel(graph: ir.Graph) -> set[str]:
    """Inputs of operators whose types are not in the table."""
    missing = set()
    for node in graph:
        allowed = KERNELS.get((node.domain, node.op_type), (frozenset(),))
        for index, value in enumerate(node.inputs):
            types = allowed[min(index, len(allowed) - 1)]
            if value is not None and type_of(value) not in types:
                missing.add(f"{node.op_type}, input {index}: {type_of(value)}")
    return missing


@pytest.mark.parametrize("precision", ["fp16", "int4-fp16"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.zoo)
        for name in (*CAUSAL, *MASKED, "llama:full")
    ],
)
def test_every_operator_has_a_kernel(
    name: str, precision: str, graphs: Callable[[str, str], ir.Graph]
) -> None:
    graph = graphs(name, precision)
    assert without_kernel(graph) == set()
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    assert bool(products) == (precision == "int4-fp16")
    (output, *presents) = graph.outputs
    assert output.dtype == DataType.FLOAT
    pasts = [value for value in graph.inputs if value.name and value.name.startswith("past_")]
    assert bool(pasts) == (name in CAUSAL)
    assert all(value.dtype == DataType.FLOAT16 for value in [*pasts, *presents])


@pytest.mark.parametrize("name", ["bert", "llama:full"])
def test_attention_in_half_precision_is_told_where_rows_begin(
    name: str, graphs: Callable[[str, str], ir.Graph]
) -> None:
    """Otherwise only a slow kernel supports rows of different lengths."""
    attention = [n for n in graphs(name, "fp16") if n.op_type == "MultiHeadAttention"]
    (mask,) = {node.inputs[4] for node in attention}
    producer = None if mask is None else mask.producer()
    assert producer is not None
    assert producer.op_type == "Concat"
    lengths, *starts = producer.inputs
    assert lengths is not None
    assert lengths.name == "lengths"
    assert len(starts) == 2


@pytest.mark.parametrize(
    ("name", "precision", "missing"),
    [
        ("llama", "fp32", "GroupQueryAttention"),
        ("bert", "int8", "MatMulIntegerToFloat"),
        ("bert-embed", "fp32", "CumSum"),  # quadratic in the length on CUDA
    ],
)
def test_operators_without_a_kernel_are_found(
    name: str, precision: str, missing: str, graphs: Callable[[str, str], ir.Graph]
) -> None:
    assert any(each.startswith(missing) for each in without_kernel(graphs(name, precision)))


@pytest.fixture(scope="module")
def graphs(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], ir.Graph]:
    """A checkpoint's saved graph at a precision; half precision is traced once for each."""
    folder = tmp_path_factory.mktemp("graphs")
    traced: dict[str, ir.Model] = {}

    def trace(name: str, half: bool) -> ir.Model:
        folder = str(checkpoint(name.removesuffix(":full")))
        source = find(folder, "auto", revision=None, allow_pickle=False)
        loaded = load_checkpoint(source.under("full") if name.endswith(":full") else source)
        return optimize((loaded.half() if half else loaded).trace())

    def get(name: str, precision: str) -> ir.Graph:
        half = precision in HALF
        if half and name not in traced:
            traced[name] = trace(name, half)
        model = traced[name].clone() if half else trace(name, half)
        if precision in get_args(IntegerPrecision):
            # One scale for a row, as masked models may have it
            quantize(model, cast(IntegerPrecision, precision), by_row=precision == "int8")
        save(model, folder / "model.onnx")
        return ir.load(folder / "model.onnx").graph

    return get
