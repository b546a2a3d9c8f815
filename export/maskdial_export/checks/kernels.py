"""The kernel check: a graph whose result shows whether int8 kernels multiply exactly.

The server runs it when it loads a bundle, and the export to choose the bits of int8 weights.
"""

import numpy as np
import onnx_ir as ir

from maskdial.bundle.exactness import LARGEST_WEIGHT, NUM_INPUTS, ZERO_POINT, multiplies_exactly
from maskdial.bundle.manifest import KERNEL_CHECK
from maskdial_export.session import load_session
from maskdial_export.tracing.graph import OPSET

_OUTPUTS = 64


def kernel_check() -> ir.Model:
    """A graph from ``rows``, uint8 (num_rows, 64), to ``products``, float32 (num_rows, 64).

    It has the operator and zero point of int8 graphs, and weights of 127. For rows of 255, a kernel
    that adds pairs of products in 16 bits saturates and returns too small a number.
    """
    rows = ir.Value(
        name="rows", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape(["num_rows", NUM_INPUTS])
    )
    constants = {
        "weight": np.full((NUM_INPUTS, _OUTPUTS), LARGEST_WEIGHT, np.int8),
        "scale": np.array(1, np.float32),
        "zero_point": np.array(ZERO_POINT, np.uint8),
    }
    values = {
        name: ir.Value(name=name, const_value=ir.tensor(array, name=name))
        for name, array in constants.items()
    }
    weight, scale, zero_point = values.values()
    node = ir.node(
        "MatMulIntegerToFloat", [rows, weight, scale, scale, zero_point], domain="com.microsoft"
    )
    (products,) = node.outputs
    products.name = "products"
    products.type = ir.TensorType(ir.DataType.FLOAT)
    products.shape = ir.Shape(["num_rows", _OUTPUTS])
    graph = ir.Graph(
        [rows],
        [products],
        nodes=[node],
        initializers=list(values.values()),
        opset_imports={"": OPSET, "com.microsoft": 1},
        name=KERNEL_CHECK,
    )
    return ir.Model(graph, ir_version=10)


def exact_here() -> bool:
    """Whether this machine's CPU multiplies 8-bit integers exactly."""
    session = load_session(ir.to_proto(kernel_check()).SerializeToString())
    return multiplies_exactly(lambda rows: np.asarray(session.run(None, {"rows": rows})[0]))
