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

from maskdial.bundle.manifest import GRAPH, GoldenCheck, KVLayout, ParityReport
from maskdial_export.checks.next_tokens import divergences, log_softmax
from maskdial_export.direct.decoder import NotDirectError
from maskdial_export.direct.reference import Reference
from maskdial_export.errors import ExportError
from maskdial_export.golden_check import SLACK, golden_check, quantized_tolerance
from maskdial_export.session import CausalSession, Floats, Ids, Loaded, kernels_here

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
        parity = _parity(exact, layout, text, golden, judge)
    finally:
        exact.unlink()
    plain = Loaded(folder / GRAPH)
    computed = CausalSession(plain, layout, 1, len(text)).run(0, [text])[0]
    plain.free()
    kernels = kernels_here()
    served = Loaded(folder / GRAPH, kernels=kernels)
    rows = CausalSession(served, layout, 1, len(text)).run(0, [text])[0]
    invariant = _is_invariant(served, layout, text)
    served.free()
    quantized = any(node.op_type == "MatMulNBits" for node in model.graph.node)
    row, slack = golden - 1, SLACK * parity.tolerance
    if not quantized:
        judge.difference("the logits of the graph as it is served", rows)
        check = golden_check(ids[:golden], row, expected[row], slack)
        return Checked(parity, check, invariant, None)
    _check_scale(expected, computed, rows)
    if original is not reference:
        expected = original.logits(original.hidden(text))
    divergence = max(
        float(np.mean(divergences(log_softmax(expected), log_softmax(each))))
        for each in (computed, rows)
    )
    if not is_gated and not divergence <= _MAX_DIVERGENCE:
        raise NotDirectError(
            f"the integers diverge by {divergence:.2g} nats from float32, more than the direct "
            f"path accepts ({_MAX_DIVERGENCE})"
        )
    before, ours = expected[row], [computed[row], rows[row]][: 1 if kernels is None else 2]
    allowed = quantized_tolerance(before, ours, slack, centered=True)
    of_kernels = None if kernels is None else rows[row]
    check = golden_check(ids[:golden], row, computed[row], allowed, of_kernels, centered=True)
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


def _parity(path: Path, layout: KVLayout, text: Ids, golden: int, judge: _Judge) -> ParityReport:
    """Reads the text in three passes, as each restores all weights: in a ragged batch, whose second
    row is the text's beginning, then that row's rest, then the last token of both.
    """
    exact, length = Loaded(path, prepack=False), len(text)
    session = CausalSession(exact, layout, 2, length)
    steps = min(1, length - 1)
    prompt, last = text[: length - steps], text[length - steps :]
    first = min(golden, len(prompt))
    whole, beginning = session.run(0, [prompt, prompt[:first]])
    rest = session.run(1, [prompt[first:]]) if first < len(prompt) else []
    decoded = session.run(0, [last, last]) if steps else []
    exact.free()
    states = [whole, beginning, *rest, *decoded]
    found = judge.logits(np.concatenate(states))
    rows = iter(np.split(found, np.cumsum([len(each) for each in states])[:-1]))
    ragged = [
        judge.difference("a ragged batch", next(rows), slice(0, len(part)))
        for part in (whole, beginning)
    ]
    chunk = [
        judge.difference("a prompt in chunks", next(rows), slice(first, len(prompt))) for _ in rest
    ]
    ends = [
        judge.difference("decode steps", next(rows), slice(len(prompt), length)) for _ in decoded
    ]
    return ParityReport(
        reference="numpy",
        tolerance=judge.tolerance,
        ragged_batch=max(ragged),
        chunked_prompt=max(chunk, default=None),
        decode_steps=max(ends, default=None),
    )


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
