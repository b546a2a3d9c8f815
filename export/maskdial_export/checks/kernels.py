"""The kernel check: a graph whose result shows whether int8 kernels multiply exactly.

The server runs it when it loads a bundle, and the export to choose the bits of int8 weights.
"""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from maskdial.bundle.exactness import LARGEST_WEIGHT, NUM_INPUTS, ZERO_POINT, multiplies_exactly
from maskdial.bundle.manifest import KERNEL_CHECK
from maskdial_export.session import load_session

_OUTPUTS = 64
_OPSET, _IR_VERSION = 20, 10


def kernel_check() -> onnx.ModelProto:
    """A graph from ``rows``, uint8 (num_rows, 64), to ``products``, float32 (num_rows, 64).

    It has the operator and zero point of int8 graphs, and weights of 127. For rows of 255, a kernel
    that adds pairs of products in 16 bits saturates and returns too small a number.
    """
    info = helper.make_tensor_value_info
    constants = {
        "weight": np.full((NUM_INPUTS, _OUTPUTS), LARGEST_WEIGHT, np.int8),
        "scale": np.array(1, np.float32),
        "zero_point": np.array(ZERO_POINT, np.uint8),
    }
    inputs = ["rows", "weight", "scale", "scale", "zero_point"]
    graph = helper.make_graph(
        [helper.make_node("MatMulIntegerToFloat", inputs, ["products"], domain="com.microsoft")],
        KERNEL_CHECK,
        [info("rows", TensorProto.UINT8, ["num_rows", NUM_INPUTS])],
        [info("products", TensorProto.FLOAT, ["num_rows", _OUTPUTS])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = _IR_VERSION
    return model


def exact_here() -> bool:
    """Whether this machine's CPU multiplies 8-bit integers exactly."""
    session = load_session(kernel_check().SerializeToString())
    return multiplies_exactly(lambda rows: np.asarray(session.run(None, {"rows": rows})[0]))
