"""The sampler graphs: as shipped, and with CUDA kernels for every operator."""

from collections import Counter
from itertools import product
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from maskdial.causal.sampling.sampler_graph import FOLDER, VOCAB_SIZE, Kind, graph_name
from tools.sampler_graphs import OPSET, main, sampler_graph

GRAPHS = list(product(Kind, (False, True)))

# The CUDA kernels of ONNX Runtime that the graphs may use, from its docs/OperatorKernels.md: the
# version of the operator that they were registered for, and types of the first input. A kernel
# without an upper bound is taken for that very version only.
_NUMBERS = {"double", "float", "int64"}
CUDA_KERNELS: dict[str, tuple[int, set[str]]] = {
    "Add": (14, _NUMBERS),
    "And": (7, {"bool"}),
    "Cast": (13, _NUMBERS | {"bool"}),
    "Clip": (13, _NUMBERS),
    "CumSum": (14, _NUMBERS),
    "Div": (14, _NUMBERS),
    "GatherElements": (13, _NUMBERS | {"bool"}),
    "Greater": (13, _NUMBERS),
    "GreaterOrEqual": (16, _NUMBERS),
    "Less": (13, _NUMBERS),
    "LessOrEqual": (16, _NUMBERS),
    "LogSoftmax": (13, {"double", "float"}),
    "Max": (13, _NUMBERS),
    "Min": (13, _NUMBERS),
    "Mul": (14, _NUMBERS),
    "Pad": (18, {"bool", "double", "float"}),
    "ReduceSum": (13, _NUMBERS),
    "Reshape": (14, _NUMBERS | {"bool"}),
    "ScatterElements": (18, _NUMBERS | {"bool"}),
    "Slice": (13, _NUMBERS | {"bool"}),
    "Softmax": (13, {"double", "float"}),
    "Sub": (14, _NUMBERS),
    "TopK": (11, _NUMBERS),
    "Where": (16, {"bool"}),
}
_WHERE_TYPES = _NUMBERS
_LONGEST_SUM = 512


def loaded(kind: Kind, penalized: bool, vocab_size: int, folder: Path) -> onnx.ModelProto:
    """A shipped graph after ONNX Runtime's optimization, with types and shapes."""
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name(VOCAB_SIZE, vocab_size)
    options.optimized_model_filepath = str(folder / "loaded.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    ort.InferenceSession(
        str(FOLDER / graph_name(kind, penalized)), options, providers=["CPUExecutionProvider"]
    )
    return onnx.shape_inference.infer_shapes(
        onnx.load(folder / "loaded.onnx"), strict_mode=True, data_prop=True
    )


def values_of(model: onnx.ModelProto) -> dict[str, onnx.TypeProto.Tensor]:
    graph = model.graph
    values = {v.name: v.type.tensor_type for v in (*graph.input, *graph.value_info, *graph.output)}
    for tensor in graph.initializer:
        value = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        values[tensor.name] = value.tensor_type
    return values


def type_name(value: onnx.TypeProto.Tensor) -> str:
    return str(onnx.TensorProto.DataType.Name(value.elem_type)).lower()


def test_the_shipped_graphs_are_those_that_are_built(tmp_path: Path) -> None:
    main([str(tmp_path)])
    names = {graph_name(kind, penalized) for kind, penalized in GRAPHS}
    assert {path.name for path in FOLDER.iterdir()} == names
    for name in names:
        assert onnx.load(FOLDER / name) == onnx.load(tmp_path / name)
        assert (FOLDER / name).stat().st_size < 10_000


@pytest.mark.parametrize(("kind", "penalized"), GRAPHS)
def test_the_graphs_are_valid(kind: Kind, penalized: bool) -> None:
    onnx.checker.check_model(onnx.load(FOLDER / graph_name(kind, penalized)), full_check=True)
    assert sampler_graph(kind, penalized).opset_imports == {"": OPSET}


@pytest.mark.parametrize(("kind", "penalized"), GRAPHS)
@pytest.mark.parametrize("vocab_size", [7, 256, 49_152, 50_257])
def test_each_operator_has_a_cuda_kernel(
    kind: Kind, penalized: bool, vocab_size: int, tmp_path: Path
) -> None:
    model = loaded(kind, penalized, vocab_size, tmp_path)
    values = values_of(model)
    assert {o.domain: o.version for o in model.opset_import}[""] == OPSET
    for node in model.graph.node:
        assert not node.domain
        version, types = CUDA_KERNELS[node.op_type]
        assert onnx.defs.get_schema(node.op_type, OPSET).since_version == version
        assert type_name(values[node.input[0]]) in types
        if node.op_type == "Where":
            assert type_name(values[node.input[1]]) in _WHERE_TYPES


@pytest.mark.parametrize(("kind", "penalized"), GRAPHS)
def test_cumulative_sums_are_short(kind: Kind, penalized: bool, tmp_path: Path) -> None:
    """The CUDA kernel takes quadratic time; 2**18 tokens are more than any vocabulary has."""
    model = loaded(kind, penalized, 2**18, tmp_path)
    values = values_of(model)
    lengths = [
        values[node.input[0]].shape.dim[1].dim_value
        for node in model.graph.node
        if node.op_type == "CumSum"
    ]
    assert all(0 < length <= _LONGEST_SUM for length in lengths)
    assert bool(lengths) == (kind is not Kind.GREEDY)


@pytest.mark.parametrize(
    ("kind", "num_nodes", "num_penalized"),
    [(Kind.GREEDY, 4, 11), (Kind.FEW, 30, 38), (Kind.ALL, 28, 36)],
)
def test_sizes_of_the_vocabulary_are_constants(
    kind: Kind, num_nodes: int, num_penalized: int, tmp_path: Path
) -> None:
    """Each node is a kernel to launch: nothing is left of what computes shapes."""
    for penalized, expected in ((False, num_nodes), (True, num_penalized)):
        model = loaded(kind, penalized, 49_152, tmp_path)
        operators = Counter(node.op_type for node in model.graph.node)
        assert operators.total() == expected
        assert not operators.keys() & {"Shape", "Concat", "Mod", "Neg", "Squeeze"}
