"""The graphs that draw tokens on a device; `maskdial.causal.sampling.device_sampler` runs them.

They compute what `maskdial.causal.sampling.sampler` does, for all rows at once. There is one for
greedy rows, one for rows whose tokens are narrowed down to a few, and one for rows that are drawn
from the whole vocabulary, each with and without penalties. Rebuild them after a change:

    python -m tools.sampler_graphs

Every node launches a kernel, so there are few nodes, and none that needs the host. Cumulative sums
are float64, as on the host, and short: CUDA's kernel takes quadratic time.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.tape import Tape

from maskdial.causal.sampling.sampler_graph import (
    BLOCK,
    FOLDER,
    MAX_CANDIDATES,
    VOCAB_SIZE,
    Kind,
    graph_name,
)

# ONNX Runtime uses a CUDA kernel only for the operator versions that it is registered for.
OPSET = 18

Operand = ir.Value | NDArray[Any]

_TYPES = {
    "logits": ir.DataType.FLOAT,
    "one_row": ir.DataType.FLOAT,
    "token_ids": ir.DataType.INT64,
    "penalties": ir.DataType.FLOAT,
    "repetition_penalty": ir.DataType.FLOAT,
    "temperature": ir.DataType.FLOAT,
    "kth": ir.DataType.INT64,
    "least_total": ir.DataType.DOUBLE,
    "top_p": ir.DataType.DOUBLE,
    "min_p": ir.DataType.DOUBLE,
    "uniform": ir.DataType.DOUBLE,
    "token_id": ir.DataType.INT64,
    "logprob": ir.DataType.FLOAT,
    "best": ir.DataType.FLOAT,
    "total": ir.DataType.DOUBLE,
    "place": ir.DataType.DOUBLE,
    "in_top_k": ir.DataType.BOOL,
    "kept": ir.DataType.BOOL,
}
_WIDTHS: dict[str, str | None] = {
    "logits": VOCAB_SIZE,
    "token_ids": "num_penalized",
    "penalties": "num_penalized",
    "in_top_k": None,
    "kept": None,
}


class _Builder:
    """Collects the nodes of one graph."""

    def __init__(self) -> None:
        self._tape = Tape()
        self._inputs: dict[str, ir.Value] = {}
        self._constants: dict[tuple[str, bytes], ir.Value] = {}

    def input(self, name: str) -> ir.Value:
        """An input, (batch, 1) unless `_WIDTHS` has another width."""
        if name not in self._inputs:
            shape = [VOCAB_SIZE] if name == "one_row" else ["batch", _WIDTHS.get(name, 1)]
            self._inputs[name] = ir.Value(
                name=name, type=ir.TensorType(_TYPES[name]), shape=ir.Shape(shape)
            )
        return self._inputs[name]

    def __getattr__(self, operator: str) -> Any:
        return partial(self._add, operator)

    def _add(self, operator: str, *operands: Operand, outputs: int = 1, **attributes: Any) -> Any:
        inputs = [self._value(operand) for operand in operands]
        values = self._tape.op_multi_out(operator, inputs, attributes, num_outputs=outputs)
        return values[0] if outputs == 1 else values

    def _value(self, operand: Operand) -> ir.Value:
        if isinstance(operand, ir.Value):
            return operand
        key = f"{operand.dtype} {operand.shape}", operand.tobytes()
        if key not in self._constants:
            name = f"constant_{len(self._constants)}"
            self._constants[key] = self._tape.initializer(ir.tensor(operand, name=name))
        return self._constants[key]

    def model(self, name: str, outputs: dict[str, ir.Value]) -> ir.Model:
        for output, value in outputs.items():
            value.name = output
            value.type = ir.TensorType(_TYPES[output])
            value.shape = ir.Shape(["batch", _WIDTHS.get(output, 1)])
        graph = ir.Graph(
            list(self._inputs.values()),
            list(outputs.values()),
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": OPSET},
            name=name,
        )
        return ir.Model(graph, ir_version=10)


def _ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def _column(op: _Builder, matrix: ir.Value, index: int) -> ir.Value:
    """The first column (0) or the last one (-1), (batch, 1)."""
    end = 1 if index == 0 else np.iinfo(np.int64).max
    column: ir.Value = op.Slice(matrix, _ints(index), _ints(end), _ints(1))
    return column


def _vocab_size(op: _Builder) -> ir.Value:
    """The vocabulary's size, int64 (1,), which becomes a constant when the graph is loaded.

    ONNX Runtime does not fold a shape with an unknown dimension, such as the batch of ``logits``.
    So the size is the shape of an input of its own, ``one_row``, whose values are never read.
    """
    size: ir.Value = op.Shape(op.input("one_row"))
    return size


def _last_token(op: _Builder) -> ir.Value:
    last: ir.Value = op.Sub(_vocab_size(op), _ints(1))
    return last


def _penalize(op: _Builder) -> ir.Value:
    """The logits with penalties applied to the given tokens.

    A row may repeat a token, with the same penalty.
    """
    logits, token_ids = op.input("logits"), op.input("token_ids")
    factor = op.input("repetition_penalty")
    seen = op.GatherElements(logits, token_ids, axis=1)
    negative = op.Less(seen, np.float32(0))
    scores = op.Where(negative, op.Mul(seen, factor), op.Div(seen, factor))
    scores = op.Sub(scores, op.input("penalties"))
    penalized: ir.Value = op.ScatterElements(logits, token_ids, scores, axis=1)
    return penalized


def _best(op: _Builder, scores: ir.Value, count: Operand) -> tuple[ir.Value, ir.Value]:
    """The greatest scores, best first, and their token ids; of equal scores the lower id is first.

    If scores are NaN, the kernel may return ids beyond the vocabulary, which must not be used to
    look anything up.
    """
    values, token_ids = op.TopK(scores, count, axis=1, outputs=2)
    last = op.Squeeze(_last_token(op))
    return values, op.Clip(token_ids, np.int64(0), last)


def _probabilities(op: _Builder, scores: ir.Value, logprobs: ir.Value) -> ir.Value:
    """The probabilities before anything is cut off, float32 (batch, vocab_size)."""
    # Log-probabilities are shifted already, so the division keeps precision if scores are large.
    shifted = logprobs if scores is op.input("logits") else op.LogSoftmax(scores, axis=1)
    softmax: ir.Value = op.Softmax(op.Div(shifted, op.input("temperature")), axis=1)
    return softmax


def _as_float64(op: _Builder, value: ir.Value) -> ir.Value:
    cast: ir.Value = op.Cast(value, to=ir.DataType.DOUBLE)
    return cast


def _greedy(op: _Builder, scores: ir.Value) -> dict[str, ir.Value]:
    best, token_id = _best(op, scores, _ints(1))
    logprobs = op.LogSoftmax(op.input("logits"), axis=1)
    logprob = op.GatherElements(logprobs, token_id, axis=1)
    return {"token_id": token_id, "logprob": logprob, "best": best}


def _few(op: _Builder, scores: ir.Value) -> dict[str, ir.Value]:
    """Top-k, top-p and min-p among the most likely tokens.

    ``kth`` is the rank of the last token in top-k, from 0. ``least_total`` is 1 for rows without
    top-k, whose nucleus is a share of the whole vocabulary's probability, and 0 for others.

    The last columns of ``in_top_k`` and ``kept`` show whether there were too few candidates.
    """
    count = op.Min(_vocab_size(op), _ints(MAX_CANDIDATES))
    best, token_ids = _best(op, scores, count)
    logprobs = op.LogSoftmax(op.input("logits"), axis=1)
    weights = _probabilities(op, scores, logprobs)
    weights = _as_float64(op, op.GatherElements(weights, token_ids, axis=1))

    in_top_k = op.GreaterOrEqual(best, op.GatherElements(best, op.input("kth"), axis=1))
    zero = np.float64(0)
    of_top_k = op.Where(in_top_k, weights, zero)
    reached = op.CumSum(of_top_k, np.int64(1))
    target = op.Mul(op.Max(_column(op, reached, -1), op.input("least_total")), op.input("top_p"))
    in_nucleus = op.Less(op.Sub(reached, of_top_k), target)
    likely = op.GreaterOrEqual(weights, op.Mul(_column(op, weights, 0), op.input("min_p")))
    kept = op.And(in_nucleus, likely)

    # The cumulative weight runs over the tokens in the order of their ids.
    ids, order = op.TopK(token_ids, count, axis=1, largest=0, outputs=2)
    ordered = op.GatherElements(op.Where(kept, of_top_k, zero), order, axis=1)
    ends = op.CumSum(ordered, np.int64(1))
    total = _column(op, ends, -1)
    passed = op.Greater(ends, op.Mul(total, op.input("uniform")))
    candidates = op.Where(passed, ids, _last_token(op))
    token_id, _ = op.TopK(candidates, _ints(1), axis=1, largest=0, outputs=2)
    logprob = op.GatherElements(logprobs, token_id, axis=1)
    return {
        "token_id": token_id,
        "logprob": logprob,
        "total": total,
        "in_top_k": in_top_k,
        "kept": kept,
    }


def _all(op: _Builder, scores: ir.Value) -> dict[str, ir.Value]:
    """A draw from the whole vocabulary: first the block in which the share falls, then the token.

    ``place`` is the token's index in its block. It is beyond the block's end if rounding made the
    sum of the block and the cumulative sum within it differ.
    """
    logprobs = op.LogSoftmax(op.input("logits"), axis=1)
    weights = _probabilities(op, scores, logprobs)
    num_missing = op.Mod(op.Neg(_vocab_size(op)), _ints(BLOCK))
    weights = op.Pad(weights, op.Concat(_ints(0, 0, 0), num_missing, axis=0))
    blocks = op.Reshape(weights, _ints(0, -1, BLOCK))
    sums = _as_float64(op, op.ReduceSum(blocks, _ints(2), keepdims=0))
    ends = op.CumSum(sums, np.int64(1))
    total = _column(op, ends, -1)
    target = op.Mul(total, op.input("uniform"))
    passed = op.LessOrEqual(ends, target)
    zero = np.float64(0)
    start = op.ReduceSum(op.Where(passed, np.float64(BLOCK), zero), _ints(1))
    before = op.ReduceSum(op.Where(passed, sums, zero), _ints(1))

    token_ids = op.Add(op.Cast(start, to=ir.DataType.INT64), np.arange(BLOCK)[None])
    block = _as_float64(op, op.GatherElements(weights, token_ids, axis=1))
    within = op.LessOrEqual(op.CumSum(block, np.int64(1)), op.Sub(target, before))
    place = op.ReduceSum(_as_float64(op, within), _ints(1))
    token_id = op.Cast(op.Add(start, place), to=ir.DataType.INT64)
    token_id = op.Min(token_id, _last_token(op))
    logprob = op.GatherElements(logprobs, token_id, axis=1)
    return {"token_id": token_id, "logprob": logprob, "total": total, "place": place}


def sampler_graph(kind: Kind, penalized: bool) -> ir.Model:
    """One of the graphs."""
    op = _Builder()
    op.input("logits")
    scores = _penalize(op) if penalized else op.input("logits")
    outputs = {Kind.GREEDY: _greedy, Kind.FEW: _few, Kind.ALL: _all}[kind](op, scores)
    return op.model(kind.value, outputs)


def main(arguments: Sequence[str] = ()) -> None:
    """Writes the graphs into a folder, by default the one where the server looks for them."""
    folder = Path(*arguments) if arguments else FOLDER
    folder.mkdir(exist_ok=True)
    for kind in Kind:
        for penalized in (False, True):
            ir.save(sampler_graph(kind, penalized), folder / graph_name(kind, penalized))


if __name__ == "__main__":
    main()
