"""Products and lookups of a graph, of float32 matrices or of integers in blocks.

The operators, the names of the initializers and the order of the arithmetic are those of
`maskdial_export.quantize.products` and `maskdial_export.quantize.table`, which change a traced
graph; the server knows its matrices by them.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.manifest import BLOCK_SUMS, TABLE_ROWS
from maskdial_export.direct.data import DataFile
from maskdial_export.direct.decoder import Floats
from maskdial_export.direct.nodes import Nodes
from maskdial_export.direct.weights import Weights, in_turn, row_chunks
from maskdial_export.quantize.blocks import BYTE_ZERO, NIBBLE_CENTER, Blocks, to_bytes
from maskdial_export.quantize.stored import joined

_LARGEST, _ZERO_POINT = 127, 128
_TINY = np.finfo(np.float32).tiny
_MIN_OUTPUTS = 16
"""A head with few labels takes no time, and its error matters most."""
_ACCURACY = 4
"""Of ``MatMulNBits``: it rounds each block of a row to 8 bits."""


@dataclass(frozen=True, slots=True)
class Modules:
    """The embedding table, the output layer, and where other modules have their weights.

    Attributes:
        table: the module that looks tokens up.
        head: the output layer's; None if there is none over the vocabulary.
        tied: whether the output layer's weight is the table.
        ids: the name of the value with the tokens' ids.
        parts: by module, the weights that are its own, one below the other, if those are others
            than the one that has its name.
    """

    table: str
    head: str | None = "lm_head"
    tied: bool = False
    ids: str = "input_ids"
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def names(self, modules: Sequence[str]) -> list[str]:
        """The weights of modules, one below the other."""
        return [
            name for module in modules for name in self.parts.get(module, (f"{module}.weight",))
        ]

    def num_outputs(self, weights: Weights, modules: Sequence[str]) -> int:
        """The rows of the weights of modules together."""
        return sum(weights.shapes()[name][0] for name in self.names(modules))


class Products(Protocol):
    """Writes matrices into the weight file, and multiplies by them."""

    def project(self, source: str, modules: Sequence[str]) -> str:
        """The product of a value and the matrices of some modules, without their biases."""
        ...

    def project_vectors(self, source: str, module: str, bias: str | None) -> str:
        """The product of vectors (num_vectors, columns) with its bias, an initializer."""
        ...

    def look_up(self, table: str | None = None, ids: str | None = None) -> str:
        """The rows of the embedding table, or of another module's and of other ids."""
        ...

    def head(self, source: str, factor: float | None, output: str | None) -> str:
        """The output layer's product, times a factor."""
        ...


class FloatProducts:
    """Products in float32; matrices are stored as (inputs, outputs)."""

    def __init__(self, modules: Modules, weights: Weights, nodes: Nodes, data: DataFile) -> None:
        self._modules = modules
        self._weights = weights
        self._nodes = nodes
        self._data = data

    def project(self, source: str, modules: Sequence[str]) -> str:
        return self._nodes.add(
            "MatMul", [source, self._columns(modules)], modules=",".join(modules)
        )

    def look_up(self, table: str | None = None, ids: str | None = None) -> str:
        table = table or self._modules.table
        inputs = [self._rows(table), ids or self._modules.ids]
        return self._nodes.add("Gather", inputs, axis=0, modules=table)

    def project_vectors(self, source: str, module: str, bias: str | None) -> str:
        inputs = [source, self._rows(module), *([] if bias is None else [bias])]
        return self._nodes.add("Gemm", inputs, modules=module, transB=1)

    def head(self, source: str, factor: float | None, output: str | None) -> str:
        module = _head_of(self._modules)
        alpha = {} if factor is None else {"alpha": factor}
        if self._modules.tied:
            inputs = [source, self._table()]
            return self._nodes.add(
                "FusedMatMul", inputs, output=output, modules=module, transB=1, **alpha
            )
        kind = "MatMul" if factor is None else "FusedMatMul"
        inputs = [source, self._columns([module])]
        return self._nodes.add(kind, inputs, output=output, modules=module, **alpha)

    def _table(self) -> str:
        return self._rows(self._modules.table)

    def _rows(self, module: str) -> str:
        """A matrix as the checkpoint has it."""
        name, names = f"{module}.weight", self._modules.names([module])
        if name in self._nodes.initializers:
            return name
        shapes = [self._weights.shapes()[each] for each in names]
        parts = (
            self._weights.values(each, rows)
            for each, shape in zip(names, shapes, strict=True)
            for rows in row_chunks(*shape[:2])
        )
        shape = sum(each[0] for each in shapes), *shapes[0][1:]
        return self._nodes.keep(self._data.write_rows(name, np.float32, shape, parts))

    def _columns(self, modules: Sequence[str]) -> str:
        names = self._modules.names(modules)
        shapes = [self._weights.shapes()[each] for each in names]
        parts = (
            self._weights.values(each, rows).T
            for each, shape in zip(names, shapes, strict=True)
            for rows in row_chunks(*shape[:2])
        )
        shape = shapes[0][1], sum(each[0] for each in shapes)
        name = f"{','.join(modules)}.columns"
        if name in self._nodes.initializers:  # of layers that share it
            return name
        return self._nodes.keep(self._data.write_columns(name, shape, parts))


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix in blocks that the weight file has: what its initializers are called, and more."""

    name: str
    bits: int
    num_inputs: int
    num_outputs: int
    num_blocks: int
    block_size: int
    has_minima: bool
    zero: float | None
    """Of lookups: that of all blocks; None if they differ."""

    @property
    def integers(self) -> str:
        return f"{self.name}.int{self.bits}"


class _Parts:
    """A matrix in parts of its rows: what is small of them is kept, integers pass through."""

    def __init__(self, blocks: Iterator[Blocks]) -> None:
        self._first = next(blocks)
        self._others = blocks
        self.bits = self._first.bits
        _, self.num_blocks, self.block_size = self._first.integers.shape
        self.has_minima = self._first.minimum is not None
        self.scales: list[Floats] = []
        self.zeros: list[NDArray[np.uint8]] = []
        self.minima: list[Floats] = []
        self.centers: list[NDArray[np.uint8]] = []

    def integers(self) -> Iterator[NDArray[np.uint8]]:
        """The integers of each part, those of 4 bits in pairs."""
        for part in itertools.chain([self._first], self._others):
            self.scales.append(part.scale)
            self.zeros.append(part.zero)
            if part.minimum is not None:
                self.minima.append(part.minimum)
            if part.center is not None:
                self.centers.append(part.center)
            yield _pairs(part.integers) if part.bits == 4 else part.integers


class BlockProducts:
    """Products of integers in blocks: those of a file, or weights rounded to 8 bits.

    The embedding table is that of the output layer, if that is tied to it, and otherwise 8 bits
    with a scale for each row.

    Attributes:
        num_products: how many modules have products.
        num_kept: of how many of them the integers are those of the file.
        rounded: the names of matrices that were rounded to 8 bits in blocks.
        by_row: the names of those with a scale for each row.
    """

    def __init__(
        self,
        modules: Modules,
        weights: Weights,
        nodes: Nodes,
        data: DataFile,
        bits: Literal[4, 8],
    ) -> None:
        """With ``bits`` 4, integers of a file that fit into 4 bits have as many."""
        self._modules = modules
        self._floats = FloatProducts(modules, weights, nodes, data)
        self._written: dict[tuple[str, ...], _Matrix] = {}
        self._weights = weights
        self._nodes = nodes
        self._data = data
        self._bits = bits
        self._heads: _Matrix | None = None
        self.num_kept, self.num_products = 0, 0
        self.rounded: set[str] = set()
        self.by_row: set[str] = set()

    def project(self, source: str, modules: Sequence[str]) -> str:
        if self._modules.num_outputs(self._weights, modules) < _MIN_OUTPUTS:
            return self._floats.project(source, modules)
        key = tuple(modules)
        if key not in self._written:
            self._written[key] = self._write(modules, self._modules.names(modules))
        return self._multiply(source, self._written[key])

    def project_vectors(self, source: str, module: str, bias: str | None) -> str:
        if self._modules.num_outputs(self._weights, [module]) < _MIN_OUTPUTS:
            return self._floats.project_vectors(source, module, bias)
        return _plus(self._nodes, self.project(source, [module]), bias)

    def look_up(self, table: str | None = None, ids: str | None = None) -> str:
        modules = replace(self._modules, ids=ids or self._modules.ids)
        if table is None:
            table, matrix = self._modules.table, self._head() if self._modules.tied else None
        else:  # as wide as all layers together, so that rows have many scales
            matrix = self._write([table], [f"{table}.weight"])
        if matrix is None or matrix.zero is None or matrix.num_inputs % matrix.block_size:
            self.by_row.add(f"{table}.weight")
            modules = replace(modules, table=table)
            return look_up_rows(modules, self._weights, self._nodes, self._data)
        return self._look_up_blocks(matrix, table, modules.ids)

    def head(self, source: str, factor: float | None, output: str | None) -> str:
        if factor is None:
            return self._multiply(source, self._head(), output)
        product = self._multiply(source, self._head())
        number = self._nodes.number("logits.alpha", factor)
        return self._nodes.add("Mul", [product, number], output=output)

    def _head(self) -> _Matrix:
        if self._heads is None:
            head = _head_of(self._modules)
            self._heads = self._write(
                [head], [f"{self._modules.table if self._modules.tied else head}.weight"]
            )
        return self._heads

    def _write(self, modules: Sequence[str], names: Sequence[str]) -> _Matrix:
        """Writes a matrix of all the modules' outputs."""
        kept = all(self._weights.bits(name) is not None for name in names)
        stored = self._kept(names) if kept else None
        blocks = self._rounded(names) if stored is None else stored
        self.num_products += len(modules)
        if stored is not None:
            self.num_kept += len(modules)
        else:
            self.rounded.update(names)
        name, parts = ",".join(modules), _Parts(blocks)
        shapes = [self._weights.shapes()[each] for each in names]
        num_outputs, num_inputs = sum(each[0] for each in shapes), shapes[0][1]
        bits, num_blocks, size = parts.bits, parts.num_blocks, parts.block_size
        shape = num_outputs, num_blocks, size // 2 if bits == 4 else size
        keep, write = self._nodes.keep, self._data.write
        keep(self._data.write_rows(f"{name}.int{bits}", np.uint8, shape, parts.integers()))
        keep(write(f"{name}.scale", np.concatenate(parts.scales)))
        zero = np.concatenate(parts.zeros)
        if parts.has_minima:
            keep(write(f"{name}.minimum", np.concatenate(parts.minima).T))
            if bits == 8:
                center = np.concatenate(parts.centers)
                keep(write(f"{name}.center", center.astype(np.float32)[None]))
                keep(write(f"{name}.zero", (center + BYTE_ZERO).astype(np.uint8)[:, None]))
        elif bits == 4:
            keep(write(f"{name}.zero", _pairs(zero)))
        return _Matrix(
            name,
            bits,
            num_inputs,
            num_outputs,
            num_blocks,
            size,
            parts.has_minima,
            float(zero[0, 0]) if (zero == zero[0, 0]).all() else None,
        )

    def _rounded(self, names: Sequence[str]) -> Iterator[Blocks]:
        """The blocks of matrices one below the other, rounded, in parts."""
        shapes = self._weights.shapes()
        parts = [(name, rows) for name in names for rows in row_chunks(*shapes[name][:2])]
        return in_turn(lambda part: to_bytes(self._weights.values(*part).T), parts)

    def _kept(self, names: Sequence[str]) -> Iterator[Blocks] | None:
        """The blocks that the file has of them, in parts; None if they cannot be kept."""
        chunks: Iterable[slice | None] = [None]
        if len(names) == 1:
            chunks = row_chunks(*self._weights.shapes()[names[0]][:2])
        parts = in_turn(lambda rows: self._stored(names, rows), chunks)
        first = next(parts)
        return None if first is None else self._all(first, parts)

    @staticmethod
    def _all(first: Blocks, parts: Iterator[Blocks | None]) -> Iterator[Blocks]:
        yield first
        for part in parts:
            assert part is not None, "a matrix has one form"
            yield part

    def _stored(self, names: Sequence[str], rows: slice | None) -> Blocks | None:
        found = [self._weights.blocks(name, rows) for name in names]
        stored = [each for each in found if each is not None]
        return joined(stored, self._bits) if len(stored) == len(found) else None

    def _multiply(self, source: str, matrix: _Matrix, output: str | None = None) -> str:
        nodes, name = self._nodes, matrix.name
        inputs = [source, matrix.integers, f"{name}.scale"]
        attributes: dict[str, Any] = {
            "K": matrix.num_inputs,
            "N": matrix.num_outputs,
            "bits": matrix.bits,
            "block_size": matrix.block_size,
            "accuracy_level": _ACCURACY,
        }
        if not matrix.has_minima:
            if matrix.bits == 4:
                inputs.append(f"{name}.zero")
            return nodes.add("MatMulNBits", inputs, output=output, **attributes)
        # Less the sum of each block's inputs times its minimum, around the middle of the integers
        if matrix.bits == 4:
            center = nodes.number("int4.center", NIBBLE_CENTER)
        else:
            center = f"{name}.center"
            sizes = np.array([matrix.num_outputs, matrix.num_blocks])
            shape = nodes.constant(f"int8.shape.{sizes[0]}.{sizes[1]}", sizes)
            inputs.append(nodes.add("Expand", [f"{name}.zero", shape]))
        transposed = nodes.add("Transpose", [f"{name}.scale"], perm=[1, 0])
        share = nodes.add("Mul", [transposed, center])
        less = nodes.add("Sub", [f"{name}.minimum", share])
        product = nodes.add("MatMulNBits", inputs, **attributes)
        sums = nodes.add("MatMul", [source, self._sums(matrix)])
        least = nodes.add("MatMul", [sums, less])
        return nodes.add("Sub", [product, least], output=output)

    def _sums(self, matrix: _Matrix) -> str:
        """The matrix that adds up each block of a row."""
        name = f"{BLOCK_SUMS}{matrix.block_size}.{matrix.num_inputs}"
        if name not in self._nodes.initializers:
            members = np.repeat(np.eye(matrix.num_blocks, dtype=np.float32), matrix.block_size, 0)
            self._nodes.keep(self._data.write(name, members[: matrix.num_inputs]))
        return name

    def _look_up_blocks(self, matrix: _Matrix, table: str, ids: str) -> str:
        """Rows of a matrix, such as the output layer's."""
        nodes = self._nodes
        last = nodes.constant("lookup.last", np.array([3]))
        rows = nodes.add("Gather", [matrix.integers, ids])
        if matrix.bits == 4:  # the lower half of a byte is the first one
            mask = nodes.constant("lookup.mask", np.array(15, np.uint8))
            four = nodes.constant("lookup.four", np.array(4, np.uint8))
            axis = nodes.constant("lookup.pair", np.array([4]))
            low = nodes.add("BitwiseAnd", [rows, mask])
            high = nodes.add("BitShift", [rows, four], direction="RIGHT")
            halves = [nodes.add("Unsqueeze", [each, axis]) for each in (low, high)]
            both = nodes.add("Concat", halves, axis=4)
            block = nodes.constant("lookup.block", np.array([0, 0, 0, -1]))
            rows = nodes.add("Reshape", [both, block])
        rows = nodes.add("Cast", [rows], to=1)
        if matrix.zero:
            zero = nodes.number(f"lookup.zero{matrix.zero:.0f}", matrix.zero)
            rows = nodes.add("Sub", [rows, zero])
        scale = nodes.add("Gather", [f"{matrix.name}.scale", ids])
        rows = nodes.add("Mul", [rows, nodes.add("Unsqueeze", [scale, last])])
        if matrix.has_minima:
            minima = nodes.add("Gather", [f"{matrix.name}.minimum", ids], axis=1)
            minima = nodes.add("Transpose", [minima], perm=[1, 2, 0])
            rows = nodes.add("Sub", [rows, nodes.add("Unsqueeze", [minima, last])])
        name = "lookup.row" if table == self._modules.table else f"lookup.row.{table}"
        shape = nodes.constant(name, np.array([0, 0, matrix.num_inputs]))
        return nodes.add(
            "Reshape",
            [rows, shape],
            output=f"{TABLE_ROWS}{table}.{ids}",
        )


class RowProducts:
    """Products of rows with one scale each, and of 8-bit weights with one for each output.

    Projections of one input share its rounded rows.
    """

    def __init__(
        self, modules: Modules, weights: Weights, nodes: Nodes, data: DataFile, largest: int
    ) -> None:
        """``largest`` is the largest integer of a weight: 127, or 63 for products without VNNI."""
        self._modules = modules
        self._weights = weights
        self._nodes = nodes
        self._data = data
        self._largest = largest
        self._floats = FloatProducts(modules, weights, nodes, data)
        self._rounded: dict[str, tuple[str, str]] = {}

    def project(self, source: str, modules: Sequence[str]) -> str:
        if self._modules.num_outputs(self._weights, modules) < _MIN_OUTPUTS:
            return self._floats.project(source, modules)
        module = ",".join(modules)
        if f"{module}.int8" not in self._nodes.initializers:
            parts = [self._weights.values(name) for name in self._modules.names(modules)]
            integers, scale = _by_row(np.concatenate(parts), self._largest)
            self._nodes.keep(self._data.write(f"{module}.int8", np.ascontiguousarray(integers.T)))
            self._nodes.keep(self._data.write(f"{module}.scale", scale[:, 0]))
        return self._multiply(source, f"{module}.int8", f"{module}.scale")

    def project_vectors(self, source: str, module: str, bias: str | None) -> str:
        if self._modules.num_outputs(self._weights, [module]) < _MIN_OUTPUTS:
            return self._floats.project_vectors(source, module, bias)
        return _plus(self._nodes, self.project(source, [module]), bias)

    def look_up(self, table: str | None = None, ids: str | None = None) -> str:
        assert table is None, "no encoder has another table of its tokens"
        assert ids is None, "nor other ids"
        largest = self._largest if self._modules.tied else _LARGEST
        return look_up_rows(self._modules, self._weights, self._nodes, self._data, largest)

    def head(self, source: str, factor: float | None, output: str | None) -> str:
        assert factor is None, "no encoder scales its logits"
        head, table = _head_of(self._modules), self._modules.table
        if not self._modules.tied:
            return self.project(source, [head])
        scale = f"{head}.scale"
        rows = self._weights.values(f"{table}.weight")
        self._nodes.keep(self._data.write(scale, _by_row(rows, self._largest)[1][:, 0]))
        turned = self._nodes.add("Transpose", [f"{table}.int8"], perm=[1, 0])
        return self._multiply(source, turned, scale)

    def _multiply(self, source: str, integers: str, scale: str) -> str:
        nodes = self._nodes
        step = nodes.number("int8.step", 1 / _LARGEST)
        zero = nodes.constant("int8.zero_point", np.array(_ZERO_POINT, np.uint8))
        if source not in self._rounded:
            # A row of zeros becomes 0/0, an arbitrary integer, which is multiplied by 0 then
            axes = nodes.constant("int8.axes", np.array([-1]))
            peak = nodes.add("ReduceMax", [nodes.add("Abs", [source]), axes], keepdims=1)
            unit = nodes.add("Div", [source, peak])
            self._rounded[source] = nodes.add("QuantizeLinear", [unit, step, zero]), peak
        rows, peak = self._rounded[source]
        product = nodes.add("MatMulIntegerToFloat", [rows, integers, step, scale, zero])
        return nodes.add("Mul", [product, peak])


def look_up_rows(
    modules: Modules, weights: Weights, nodes: Nodes, data: DataFile, largest: int = _LARGEST
) -> str:
    """Rows of the table as integers up to ``largest`` with one scale each."""
    name, table = f"{modules.table}.weight", modules.table
    num_rows, num_columns = weights.shapes()[name]
    scales: list[Floats] = []

    def integers() -> Iterator[NDArray[np.int8]]:
        for rows in row_chunks(num_rows, num_columns):
            rounded, scale = _by_row(weights.values(name, rows), largest)
            scales.append(scale)
            yield rounded

    shape = num_rows, num_columns
    stored = nodes.keep(data.write_rows(f"{table}.int8", np.int8, shape, integers()))
    scale = nodes.keep(data.write(f"{table}.scale", np.concatenate(scales)))
    rows, steps = (nodes.add("Gather", [each, modules.ids]) for each in (stored, scale))
    return nodes.add("Mul", [nodes.add("Cast", [rows], to=1), steps])


def _by_row(values: Floats, largest: int) -> tuple[NDArray[np.int8], Floats]:
    """Integers up to ``largest`` in magnitude, and the scale of each row, (rows, 1)."""
    peak = np.abs(values).max(axis=1, keepdims=True)
    scale = np.maximum(peak / np.float32(largest), _TINY)
    return np.rint(values / scale).astype(np.int8), scale


def _plus(nodes: Nodes, product: str, bias: str | None) -> str:
    return product if bias is None else nodes.add("Add", [product, bias])


def _head_of(modules: Modules) -> str:
    assert modules.head is not None, "there is an output layer"
    return modules.head


def _pairs(integers: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Integers of 4 bits (..., size) as bytes (..., ceil(size / 2)), the first one low."""
    if integers.shape[-1] % 2:
        integers = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, 1)])
    # The first one of two is the lower byte
    both: NDArray[np.uint16] = np.ascontiguousarray(integers).view("<u2")
    pairs: NDArray[np.uint8] = (both | both >> 4).astype(np.uint8)
    return pairs
