"""Compares a written graph with the NumPy reference, and with itself in other batches.

The reference reads one text of some dozen tokens. The graph is compared twice: computed in
float32, up to the hidden states that the output layer reads, where nothing but rounding may differ;
and as it is served, by how far its distributions diverge, and by the scale of its logits, which is
the output layer's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from maskdial.bundle.manifest import GoldenCheck, KVLayout, ParityReport
from maskdial_export.checks.next_tokens import divergences, log_softmax
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.direct.reference import Reference
from maskdial_export.errors import ExportError
from maskdial_export.golden_check import SLACK, golden_check, quantized_tolerance
from maskdial_export.session import CausalSession, Floats, Ids, Loaded

_EXACT = "exact.onnx"
_TOKENS = 32
_LARGEST_LOGIT = 1e9  # where the next float32 is 64 away
_MAX_DIVERGENCE = 0.05
"""In nats, of integers from float32 on the text. Trained models with the integers of a file or 8
bits lose a tenth of that; it is what the tracer lets a file lose."""
_MAX_SCALE = 0.03
"""How far the scale of served logits may be from the reference's. Rounded activations change it by
0.001, and by 0.002 where they make a token choose another expert; a factor that is wrong, or a soft
cap that logits reach, changes it by more than this."""


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found: parity in float32, the golden check, and whether batches change bits.

    ``divergence``: the mean one of the served graph's distributions, in nats; None in fp32.
    """

    parity: ParityReport
    golden: GoldenCheck
    batch_invariant: bool
    divergence: float | None


def check_graph(
    model: onnx.ModelProto,
    folder: Path,
    served: Loaded,
    layout: KVLayout,
    reference: Reference,
    original: Reference,
    ids: Sequence[int],
    golden: int,
    tolerance: float,
    *,
    is_gated: bool,
) -> Checked:
    """Compares the graph of a folder with the reference.

    Args:
        model: the graph, as it was written.
        folder: where it is, with its weight file.
        served: the same graph, as this machine serves it; loaded after the one in float32.
        layout: its cache.
        reference: the reference, of the weights that the graph has.
        original: of the weights that the checkpoint has; the same one if those are the same.
        ids: a text, of which the first ``golden`` tokens are those of the golden check.
        golden: how many.
        tolerance: the largest difference of logits in float32; it scales with those beyond 10.
        is_gated: whether the quality gate judges what the integers lose.

    Raises:
        ExportError: they differ.
        NotDirectError: the integers of the served graph lose too much, or its logits have another
            scale.
    """
    text = np.array(ids[:_TOKENS])
    golden = min(golden, len(text))
    expected = reference.logits(reference.hidden(text))
    peak = float(np.max(np.abs(expected)))
    if not peak <= _LARGEST_LOGIT:  # also if it is NaN
        raise ExportError(
            f"the logits of the weights reach {peak:.2g}; they are damaged, or overflow float32"
        )
    judge = _Judge(reference, expected, tolerance * max(1.0, peak / 10))
    exact = _in_floats(model, folder)
    try:
        parity = _parity(exact, layout, text, judge)
    finally:
        exact.unlink()
    rows = _read(served, layout, text)
    invariant = _is_invariant(served, layout, text)
    quantized = any(node.op_type == "MatMulNBits" for node in model.graph.node)
    row, slack = golden - 1, SLACK * parity.tolerance
    if not quantized:
        judge.difference("the logits of the graph as it is served", rows)
        check = golden_check(ids[:golden], row, expected[row], slack)
        return Checked(parity, check, invariant, None)
    _check_scale(expected, rows)
    if original is not reference:
        expected = original.logits(original.hidden(text))
    divergence = float(np.mean(divergences(log_softmax(expected), log_softmax(rows))))
    if not is_gated and not divergence <= _MAX_DIVERGENCE:
        raise NotDirectError(
            f"the integers diverge by {divergence:.2g} nats from float32, more than the direct "
            f"path accepts ({_MAX_DIVERGENCE})"
        )
    computed = judge.expected[row], rows[row]
    allowed = quantized_tolerance(expected[row], computed, slack, centered=True)
    # Without the kernels, a server rounds other activations; the reference rounds none
    ours, of_kernels = (rows[row], None) if served.kernels is None else computed
    check = golden_check(ids[:golden], row, ours, allowed, of_kernels, centered=True)
    return Checked(parity, check, invariant, divergence)


class _Judge:
    """Compares logits with those of the reference."""

    def __init__(self, reference: Reference, expected: Floats, tolerance: float) -> None:
        self._reference = reference
        self.expected = expected
        self.tolerance = tolerance

    def logits(self, hidden: Floats) -> Floats:
        return self._reference.logits(hidden)

    def difference(self, what: str, found: Floats, rows: slice = slice(None)) -> float:
        """The largest one. Raises: ExportError: it exceeds the tolerance."""
        difference = float(np.max(np.abs(self.expected[rows] - found)))
        if not difference <= self.tolerance:
            raise ExportError(
                f"the graph and the reference disagree on {what}: the logits differ by up to "
                f"{difference:.2g}, more than the tolerance of {self.tolerance:.2g}; this is a "
                "fault of the exporter, please report it"
            )
        return difference


def _check_scale(expected: Floats, *found: Floats) -> None:
    """Compares the slope of served logits over the reference's, each without its row's mean.

    Raises:
        NotDirectError: it is not 1.
    """
    before, *after = (
        each - each.mean(axis=1, keepdims=True, dtype=np.float64) for each in (expected, *found)
    )
    total = np.sum(np.square(before))
    for each in after if total else ():
        scale = float(np.sum(before * each) / total)
        if not abs(scale - 1) <= _MAX_SCALE:
            raise NotDirectError(
                f"the graph and the reference disagree on the scale of the logits: those that are "
                f"served are {scale:.3g} times as large"
            )


def _in_floats(model: onnx.ModelProto, folder: Path) -> Path:
    """Writes a graph that gives the hidden states of rows, and rounds no activation."""
    exact = onnx.ModelProto()
    exact.CopyFrom(model)
    graph = exact.graph
    place = next(
        index
        for index, node in enumerate(graph.node)
        if node.op_type == "Gather" and any(each.value == "model" for each in node.metadata_props)
    )
    hidden = graph.node[place].output[0]
    del graph.node[place + 1 :]
    graph.node.append(helper.make_node("Identity", [hidden], ["logits"]))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 1
    needed = {name for node in graph.node for name in node.input}
    kept = [each for each in graph.initializer if each.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    output = next(each for each in graph.output if each.name == "logits")
    output.type.tensor_type.ClearField("shape")
    path = folder / _EXACT
    path.write_bytes(exact.SerializeToString())
    return path


def _parity(path: Path, layout: KVLayout, text: Ids, judge: _Judge) -> ParityReport:
    """Reads the text in three passes, as each restores all weights: its first half and, in the same
    batch, its beginning; the rest but for a token, alone; then the next token of both.
    """
    exact, length = Loaded(path, prepack=False), len(text)
    session = CausalSession(exact, layout, 2, length)
    half = (length + 1) // 2
    first, last = (half + 1) // 2, max(half, length - 1)
    places = {
        "a ragged batch": [slice(half), slice(first)],
        "a prompt in chunks": [slice(half, last)],
        "decode steps": [slice(last, length), slice(first, first + 1)],
    }
    passes = {what: rows for what, rows in places.items() if len(text[rows[0]])}
    states = [
        each for rows in passes.values() for each in session.run(0, [text[row] for row in rows])
    ]
    exact.free()
    ends = np.cumsum([len(each) for each in states])[:-1]
    found = iter(np.split(judge.logits(np.concatenate(states)), ends))
    off = {
        what: max(judge.difference(what, next(found), row) for row in rows)
        for what, rows in passes.items()
    }
    return ParityReport(
        reference="numpy",
        tolerance=judge.tolerance,
        ragged_batch=off["a ragged batch"],
        chunked_prompt=off.get("a prompt in chunks"),
        decode_steps=off.get("decode steps"),
    )


def _read(served: Loaded, layout: KVLayout, text: Ids) -> Floats:
    """The logits of a text of which the last token is a decode step."""
    session, steps = CausalSession(served, layout, 1, len(text)), min(1, len(text) - 1)
    parts = np.split(text, [len(text) - steps])[: 1 + steps]
    return np.concatenate([session.run(0, [part])[0] for part in parts])


def _is_invariant(graph: Loaded, layout: KVLayout, text: Ids) -> bool:
    """Whether rows have the same bits in a batch of several lengths as alone."""
    sizes = [max(1, len(text) // divisor) for divisor in (2, 5, 3)]
    prompts = [text[:size] for size in sizes]
    session = CausalSession(graph, layout, len(prompts), len(text) + 1)
    ends = [text[-1:]] * len(prompts)
    together, decoded = session.run(0, prompts), session.run(0, ends)
    session.seen[:] = 0
    for slot, prompt in enumerate(prompts):
        alone = session.run(slot, [prompt])[0], session.run(slot, [ends[slot]])[0]
        if not all(map(np.array_equal, alone, (together[slot], decoded[slot]))):
            return False
    return True
