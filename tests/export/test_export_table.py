"""The int8 embedding table: its rows, who shares them, and when it stays unchanged."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from maskdial_export.checkpoint.blocks import StoredBlocks
from maskdial_export.quantize.blocks import Blocks, to_bytes
from maskdial_export.quantize.quantize import projections, quantize
from maskdial_export.quantize.stored import as_blocks
from maskdial_export.quantize.table import word_embedding
from maskdial_export.tracing import causal
from maskdial_export.tracing.graph import optimize
from maskdial_export.tracing.rewrite import modules_of
from maskdial_export.tracing.survey import survey

Floats = NDArray[np.float32]
TOKENS, COLUMNS = 60, 40
IDS = np.array([[3, 0, 59], [17, 17, 8]])
GENERATOR = np.random.default_rng(13)
WORDS, HEAD = "embed_tokens", "lm_head"


def draw(*shape: int) -> Floats:
    return GENERATOR.normal(size=shape).astype(np.float32)


class Graph:
    """Looks up the rows of ``ids``, and multiplies rows ``x`` by a table."""

    def __init__(self, columns: int = COLUMNS) -> None:
        self.ids = self.value("ids", ir.DataType.INT64, ["batch", "length"])
        self.x = self.value("x", ir.DataType.FLOAT, ["rows", columns])
        self.nodes: list[ir.Node] = []
        self.constants: dict[str, ir.Value] = {}
        self.outputs: list[ir.Value] = []

    @staticmethod
    def value(name: str, dtype: ir.DataType, shape: list[Any]) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))

    def constant(self, name: str, array: Floats) -> ir.Value:
        tensor = ir.tensor(array, name=name)
        return self.constants.setdefault(name, ir.Value(name=name, const_value=tensor))

    def look_up(self, name: str, table: ir.Value, **attributes: int) -> None:
        self.give(name, "Gather", [table, self.ids], attributes)

    def multiply(self, name: str, table: ir.Value) -> None:
        self.give(name, "Gemm", [self.x, table], {"transB": 1})

    def give(
        self, module: str, op_type: str, inputs: list[ir.Value], attributes: dict[str, int]
    ) -> None:
        notes = {"maskdial.modules": module}
        node = ir.node(op_type, inputs, attributes, metadata_props=notes)
        (value,) = node.outputs
        value.name, value.type = module, ir.TensorType(ir.DataType.FLOAT)
        self.nodes.append(node)
        self.outputs.append(value)

    def model(self) -> ir.Model:
        used = {value for node in self.nodes for value in node.inputs}
        graph = ir.Graph(
            [value for value in (self.ids, self.x) if value in used],
            self.outputs,
            nodes=self.nodes,
            initializers=list(self.constants.values()),
            opset_imports={"": 20, "com.microsoft": 1},
        )
        return ir.Model(graph, ir_version=10)


def lookup(table: Floats) -> ir.Model:
    graph = Graph()
    graph.look_up(WORDS, graph.constant("table", table))
    return graph.model()


def tied(table: Floats) -> ir.Model:
    """A table with a lookup, and a tied output layer."""
    graph = Graph()
    graph.look_up(WORDS, graph.constant("table", table))
    graph.multiply(HEAD, graph.constant("table", table))
    return graph.model()


def untied(table: Floats, weight: Floats) -> ir.Model:
    graph = Graph()
    graph.look_up(WORDS, graph.constant("table", table))
    graph.multiply(HEAD, graph.constant("weight", weight))
    return graph.model()


def session(model: ir.Model, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    graph = ir.to_proto(model).SerializeToString()
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def run(model: ir.Model, **feeds: NDArray[Any]) -> list[Floats]:
    outputs: list[Floats] = session(model).run(None, feeds)
    return outputs


def arrays_of(model: ir.Model) -> dict[str, NDArray[Any]]:
    """Each constant by its name."""
    tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
    return {name: tensor.numpy() for name, tensor in tensors.items() if tensor is not None}


def weights(model: ir.Model) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shape and type of each constant of two dimensions."""
    constants = arrays_of(model).items()
    return {name: (array.shape, array.dtype) for name, array in constants if array.ndim == 2}


TABLE = {
    f"{WORDS}.int8": ((TOKENS, COLUMNS), np.dtype(np.int8)),
    f"{WORDS}.scale": ((TOKENS, 1), np.dtype(np.float32)),
}


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rows_are_within_half_a_step(precision: Any) -> None:
    table = draw(TOKENS, COLUMNS) * np.geomspace(1e-4, 1e4, TOKENS, dtype=np.float32)[:, None]
    model = quantize(lookup(table), precision, embedding=WORDS)
    assert weights(model) == TABLE
    (rows,) = run(model, ids=IDS)
    step = np.abs(table[IDS]).max(axis=-1, keepdims=True) / 127
    assert (np.abs(rows - table[IDS]) <= 0.501 * step).all()
    assert not np.array_equal(rows, table[IDS])


def test_a_row_of_zeros_stays_one() -> None:
    table = draw(TOKENS, COLUMNS)
    table[17] = 0
    (rows,) = run(quantize(lookup(table), "int8", embedding=WORDS), ids=IDS)
    assert np.array_equal(rows[1, :2], np.zeros((2, COLUMNS), np.float32))
    assert rows[0].any()


def test_a_token_has_the_same_row_in_any_batch() -> None:
    model = quantize(lookup(draw(TOKENS, COLUMNS)), "int8", embedding=WORDS)
    (together,) = run(model, ids=IDS)
    for place, token in np.ndenumerate(IDS):
        (alone,) = run(model, ids=np.array([[token]]))
        assert np.array_equal(alone[0, 0], together[place])


@pytest.mark.parametrize("reduce_range", [False, True])
def test_tied_output_layer_by_row_reads_the_same_integers(reduce_range: bool) -> None:
    table, x = draw(TOKENS, COLUMNS), draw(4, COLUMNS)
    model = quantize(tied(table), "int8", by_row=True, embedding=WORDS, reduce_range=reduce_range)
    assert weights(model) == TABLE
    largest = 63 if reduce_range else 127
    assert np.abs(arrays_of(model)[f"{WORDS}.int8"]).max() == largest
    rows, logits = run(model, ids=IDS, x=x)
    step = np.abs(table[IDS]).max(axis=-1, keepdims=True) / largest
    assert (np.abs(rows - table[IDS]) <= 0.501 * step).all()
    # as an output layer that has its integers to itself
    apart = quantize(
        untied(draw(TOKENS, COLUMNS), table), "int8", by_row=True, reduce_range=reduce_range
    )
    assert np.array_equal(logits, run(apart, ids=IDS, x=x)[1])


def test_transpose_is_computed_when_the_graph_is_loaded(tmp_path: Path) -> None:
    model = quantize(tied(draw(TOKENS, COLUMNS)), "int8", by_row=True, embedding=WORDS)
    assert "Transpose" in {node.op_type for node in model.graph}
    session(model, tmp_path / "optimized.onnx")
    loaded = {node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph}
    assert "MatMulIntegerToFloat" in loaded
    assert "Transpose" not in loaded


def test_untied_table_has_8_bits_in_any_case() -> None:
    model = untied(draw(TOKENS, COLUMNS), draw(TOKENS, COLUMNS))
    quantize(model, "int8", by_row=True, embedding=WORDS, reduce_range=True)
    constants = arrays_of(model)
    assert np.abs(constants[f"{WORDS}.int8"]).max() == 127
    assert np.abs(constants[f"{HEAD}.int8"]).max() == 63


def file_blocks(bits: int, minima: bool) -> StoredBlocks:
    """A table as a file may have it."""
    rng = np.random.default_rng(bits)
    shape = TOKENS, WIDTH // 32
    low, high = (0, 2**bits) if minima else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    drawn = rng.integers(low, high, (TOKENS, WIDTH))
    values = drawn.astype(np.uint8) if minima else drawn.astype(np.int8)
    scale = rng.uniform(0.5, 2, shape).astype(np.float16).astype(np.float32)
    minimum = (scale * 7.5).astype(np.float16).astype(np.float32) if minima else None
    return StoredBlocks(values, scale, minimum, bits, 32)


WIDTH = 64


@pytest.mark.parametrize(
    ("bits", "minima"), [(None, False), (4, False), (4, True), (5, True), (8, False)]
)
def test_a_tied_table_in_blocks_is_stored_once(bits: int | None, minima: bool) -> None:
    """Tokens look up the output layer's integers, also those of a file, to the last bit."""
    table = draw(TOKENS, WIDTH) if bits is None else file_blocks(bits, minima).dequantize()
    held: Literal[4, 8] = 4 if bits == 4 else 8

    def stored(_: object, weight: Floats) -> Blocks | None:
        if bits is None or weight.shape[1] != TOKENS:
            return None
        return as_blocks(file_blocks(bits, minima), held, 32, minima=minima)

    def looked_up() -> ir.Model:
        graph = Graph(columns=WIDTH)
        graph.look_up(WORDS, graph.constant("table", table))
        graph.multiply(HEAD, graph.constant("table", table))
        return graph.model()

    find = None if bits is None else stored
    model = quantize(looked_up(), "int8", embedding=WORDS, stored=find)
    large = [array.nbytes for array in arrays_of(model).values() if array.size >= table.size / 2]
    assert large == [table.size * held // 8]
    x = draw(4, WIDTH)
    rows, logits = run(model, ids=IDS, x=x)
    blocks = to_bytes(table.T) if bits is None else stored(None, table.T)
    assert blocks is not None
    np.testing.assert_array_equal(rows, blocks.weight().T[IDS])
    assert rows.shape == (*IDS.shape, WIDTH)
    if bits is not None:
        np.testing.assert_array_equal(rows, table[IDS])
    np.testing.assert_allclose(logits, x @ table.T, atol=0.03 * np.abs(x @ table.T).max())
    alone = quantize(looked_up(), "int8", embedding=WORDS, stored=find, weights_only=True)
    same, exact = run(alone, ids=IDS, x=x)
    np.testing.assert_array_equal(same, rows)
    np.testing.assert_allclose(exact, x @ blocks.weight(), rtol=1e-5, atol=1e-3)


def test_int4_output_layer_leaves_int8_rows() -> None:
    model = quantize(tied(draw(TOKENS, COLUMNS)), "int4", embedding=WORDS)
    assert weights(model).items() >= TABLE.items()
    assert "MatMulNBits" in {node.op_type for node in model.graph}
    assert "table" not in model.graph.initializers


def test_table_that_is_read_in_float32_is_stored_once() -> None:
    """A tied output layer that stays float32."""
    table = draw(TOKENS, COLUMNS)
    model = quantize(tied(table), "int8", [HEAD], embedding=WORDS)
    assert weights(model) == {"table": ((TOKENS, COLUMNS), np.dtype(np.float32))}
    assert np.array_equal(run(model, ids=IDS, x=draw(4, COLUMNS))[0], table[IDS])


def test_table_that_was_kept() -> None:
    table = draw(TOKENS, COLUMNS)
    model = quantize(tied(table), "int8", [WORDS], by_row=True, embedding=WORDS)
    assert weights(model) == {
        "table": ((TOKENS, COLUMNS), np.dtype(np.float32)),
        f"{HEAD}.int8": ((COLUMNS, TOKENS), np.dtype(np.int8)),
    }
    assert np.array_equal(run(model, ids=IDS, x=draw(4, COLUMNS))[0], table[IDS])


def test_other_tables_stay_float32() -> None:
    """A position table, and a table of which columns are looked up."""
    table, positions = draw(TOKENS, COLUMNS), draw(TOKENS, COLUMNS)
    graph = Graph()
    graph.look_up(WORDS, graph.constant("table", table))
    graph.look_up("embed_positions", graph.constant("positions", positions))
    model = quantize(graph.model(), "int8", embedding=WORDS)
    assert weights(model).keys() == {*TABLE, "positions"}
    assert np.array_equal(run(model, ids=IDS)[1], positions[IDS])
    columns = Graph()
    columns.look_up(WORDS, columns.constant("table", table), axis=1)
    model = quantize(columns.model(), "int8", embedding=WORDS)
    assert weights(model).keys() == {"table"}


def test_modules_keep_their_names(
    checkpoint: Callable[[str], Path], load_reference: Callable[[Path], Any]
) -> None:
    """Including Gemma 2's output layer, which is fused with the factor after it."""
    model = load_reference(checkpoint("gemma2"))
    graph = optimize(causal.trace(model, survey(model))).graph
    named = {name for node in graph for name in modules_of(node)}
    assert {*projections(model), word_embedding(model)} <= named
