"""The library of kernels, installed or built once for all processes, and graphs of one operator."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from filelock import FileLock
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from maskdial.errors import ConfigError
from maskdial.kernels.build import build, find_compiler, library_path
from maskdial.kernels.installed import Kernels

LIBRARY = "TESTS_KERNELS"
"""A variable that names a library to test, such as one with sanitizers."""

TYPES = {
    np.dtype(np.float32): onnx.TensorProto.FLOAT,
    np.dtype(np.float64): onnx.TensorProto.DOUBLE,
    np.dtype(np.int16): onnx.TensorProto.INT16,
    np.dtype(np.int32): onnx.TensorProto.INT32,
    np.dtype(np.int64): onnx.TensorProto.INT64,
}

Run = Callable[..., NDArray[np.float32]]


def fma(a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]) -> NDArray[np.float32]:
    """a * b + c of float32 numbers in one rounding.

    The product is exact in float64. The sum is rounded to odd there, so that rounding it again,
    to float32, is rounding it once (Boldo and Melquiond, "Emulation of a FMA and correctly rounded
    sums", 2008); Knuth's sum of two numbers gives what the first rounding lost.
    """
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    shift = total - product
    lost = (product - (total - shift)) + (c - shift)
    bits = total.view(np.int64)
    toward_zero = (lost != 0) & ((lost < 0) == (total > 0))
    odd = np.where(lost != 0, (bits - toward_zero) | 1, bits)
    rounded: NDArray[np.float32] = odd.view(np.float64).astype(np.float32)
    return rounded


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if os.environ.get(LIBRARY):
        return Kernels.load(Path(os.environ[LIBRARY]))
    installed = library_path()  # named by its sources
    if installed.exists():
        return Kernels.load(installed)
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "kernels.lock"):
        try:
            find_compiler()
        except ConfigError as error:
            pytest.skip(error.message)
        library = library_path(folder)
        return Kernels.load(library if library.exists() else build(folder))


def linear_session(
    library: Path,
    num_columns: int | str,
    weights: dict[str, NDArray[Any] | None],
    *,
    op_type: str = "Linear",
    rows: tuple[str, ...] = ("x",),
    results: tuple[str, ...] = ("y",),
    threads: int = 1,
    constant: bool = True,
    **attributes: float,
) -> ort.InferenceSession:
    """A session of one operator; ``weights`` come after ``rows``, None for one left out."""
    if not op_type.endswith(("Linear4", "Linear8")):
        attributes = {"by_row": 0, "transposed": 0} | attributes
    attributes = {"gelu": 0} | attributes
    given = {name: array for name, array in weights.items() if array is not None}
    names = [name if name in given else "" for name in weights]
    node = helper.make_node(op_type, [*rows, *names], results, domain="maskdial", **attributes)
    shapes = {"x": [None, num_columns]}
    inputs = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shapes.get(name))
        for name in rows
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in given.items()]
    if not constant:
        inputs += [
            helper.make_tensor_value_info(each.name, each.data_type, each.dims)
            for each in initializers
        ]
    outputs = [helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, None) for y in results]
    graph = helper.make_graph([node], "linear", inputs, outputs, initializers if constant else [])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("maskdial", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("maskdial.threads", str(threads))
    if threads > 2:  # more than the machine may have
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def open_operator(
    library: Path,
    kind: str,
    inputs: dict[str, Any],
    output: int | dict[str, type[np.generic]] = onnx.TensorProto.FLOAT,
    threads: int = 1,
    **attributes: Any,
) -> ort.InferenceSession:
    """A session of one operator; ``inputs`` give names and types, None for one left out.

    ``output`` is the type of its result, or those of several by their names.
    """
    names = [name if dtype is not None else "" for name, dtype in inputs.items()]
    if isinstance(output, int):
        outputs = {"y": output}
    else:
        outputs = {name: TYPES[np.dtype(dtype)] for name, dtype in output.items()}
    node = helper.make_node(kind, names, list(outputs), domain="maskdial", **attributes)
    given = [
        helper.make_tensor_value_info(name, TYPES[np.dtype(dtype)], None)
        for name, dtype in inputs.items()
        if dtype is not None
    ]
    results = [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()]
    graph = helper.make_graph([node], "operator", given, results)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("maskdial", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("maskdial.threads", str(threads))
    if threads > 2:  # more than the machine may have
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


TILED = (
    *("test_kernels_linear", "test_kernels_linear4"),
    *("test_kernels_norm_linear", "test_kernels_adapters"),
)
"""The tests of the operators for which ``amx`` has a function of its own; its others are those of
``avx512vnni``."""
INSTRUCTION_SETS = ("scalar", "avx2", "avxvnni", "avx512vnni", "amx", "neon", "dotprod")


@pytest.fixture
def instruction_sets(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that this machine has: two or more on x86-64 and Arm."""
    here = []
    for name in INSTRUCTION_SETS:
        monkeypatch.setenv("MASKDIAL_KERNELS_ISA", name)
        with suppress(ConfigError):
            here.append(Kernels.load(kernels.path).processor)
    return here


@pytest.fixture(params=INSTRUCTION_SETS)
def processor(
    kernels: Kernels, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The instruction set of the kernels that a test creates."""
    name = str(request.param)
    if name == "amx" and request.module.__name__.rpartition(".")[2] not in TILED:
        pytest.skip("amx is avx512vnni there")
    monkeypatch.setenv("MASKDIAL_KERNELS_ISA", name)
    try:
        return Kernels.load(kernels.path).processor
    except ConfigError as error:
        pytest.skip(f"{name}: {error.message}")


@pytest.fixture
def linear(kernels: Kernels, processor: str) -> Callable[..., ort.InferenceSession]:
    """`linear_session` with the library under test, and each of its instruction sets."""
    return lambda *args, **options: linear_session(kernels.path, *args, **options)
