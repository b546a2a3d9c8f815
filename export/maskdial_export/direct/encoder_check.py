"""Compares a written encoder with the NumPy reference, and what int8 loses with the quality gate.

The reference reads texts alone and whole; the graph gets them in one ragged batch. Of a layer that
attends within a window, one more text is longer than it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from maskdial.bundle.manifest import GoldenCheck, ParityReport, QualityReport, SpecialTokens
from maskdial_export.checkpoint.sample import Sample, read_calibration
from maskdial_export.checks.evaluation import (
    Answers,
    Classify,
    ClassifyAll,
    Comparison,
    Cosine,
    Evaluation,
    FillMask,
    Order,
    QuestionAnswering,
    TokenClassify,
)
from maskdial_export.direct.encoder import OnePass
from maskdial_export.direct.encoder_reference import EncoderReference
from maskdial_export.errors import ExportError, QualityError
from maskdial_export.golden_check import SLACK, TEXT, golden_check, quantized_tolerance
from maskdial_export.quantize.gate import MIN_POSITIONS
from maskdial_export.session import Floats, Loaded, MaskedSession, kernels_here

_LENGTHS = (40, 13, 1, 26)
_BEYOND = 8  # tokens behind a window's edge
_LONGEST = 512  # tokens that the reference reads
_SEED = 20240229
_LARGEST_LOGIT = 1e9  # where the next float32 is 64 away


@dataclass(frozen=True, slots=True)
class Lowered:
    """What the quality gate said of an int8 graph."""

    comparison: Comparison
    portable: Comparison | None
    by_row: bool


class EncoderCheck:
    """The comparisons of one encoder."""

    def __init__(
        self,
        model: OnePass,
        reference: EncoderReference,
        tokenizer: Tokenizer,
        tokens: SpecialTokens,
        max_length: int,
        sample: Sample,
        limit: float,
    ) -> None:
        self.limit = limit
        """The largest loss that is accepted."""
        self._model = model
        self._reference = reference
        self._sample = sample
        self._evaluation = _evaluation(model, tokenizer, tokens, max_length, sample)
        generator = np.random.default_rng(_SEED)
        self._known = known = np.setdiff1d(np.arange(model.vocab_size), [model.pad])
        self._max_length = max_length
        lengths = [min(length, max_length) for length in _LENGTHS]
        windows = model.windows
        beyond = min([max(windows, default=0) + _BEYOND, max_length, _LONGEST])
        if windows and beyond > max(lengths):
            lengths.append(beyond)
        self._texts = [generator.choice(known, length) for length in lengths]
        several = model.num_types if model.reads_types else 1
        self._types = [generator.integers(0, several, len(text)) for text in self._texts]
        self._ids = tokenizer.encode(TEXT).ids[:max_length] or [0]
        self._row = 0
        if model.head.task == "fill-mask" and tokens.mask is not None:
            self._row = len(self._ids) // 2
            self._ids[self._row] = tokens.mask

    def parity(self, graph: Path, tolerance: float) -> ParityReport:
        """Compares a graph in fp32 with the reference.

        Raises:
            ExportError: they differ by more than the tolerance, which scales with outputs beyond
                10.
        """
        pairs = list(zip(self._texts, self._types, strict=True))
        expected = [self._reference.output(*pair) for pair in pairs]
        allowed = self.allowed(expected, tolerance)
        count = len(_LENGTHS)
        session = MaskedSession(Loaded(graph, prepack=False))  # weights stay in the mapped file
        found = session.run(self._texts[:count], self._types[:count])
        ragged = difference("a ragged batch", expected[:count], found, allowed)
        far = None
        if len(pairs) > count:
            found = session.run(self._texts[count:], self._types[count:])
            far = difference("a text beyond its window", expected[count:], found, allowed)
        return ParityReport(
            reference="numpy", tolerance=allowed, ragged_batch=ragged, long_text=far
        )

    @staticmethod
    def allowed(expected: Sequence[Floats], tolerance: float) -> float:
        """The difference that is allowed between such outputs and those of a graph.

        Raises:
            ExportError: they are no numbers, or too large.
        """
        peak = max(float(np.max(np.abs(each))) for each in expected)
        if not peak <= _LARGEST_LOGIT:  # also if it is NaN
            raise ExportError(
                f"the outputs of the weights reach {peak:.2g}; they are damaged, or overflow "
                "float32"
            )
        return tolerance * max(1.0, peak / 10)

    def is_invariant(self, graph: Path, *, quantized: bool) -> bool:
        """Whether each text has the same bits in a batch as alone, of int8 as it is served."""
        session = MaskedSession(Loaded(graph, kernels=kernels_here() if quantized else None))
        together = session.run(self._texts, self._types)
        pairs = zip(self._texts, self._types, strict=True)
        alone = [session.run([text], [types])[0] for text, types in pairs]
        return all(map(np.array_equal, together, alone))

    def golden(self, tolerance: float, graph: Path | None = None) -> GoldenCheck:
        """The golden check: the reference's output, or with ``graph`` what the int8 graph gives.

        ``tolerance`` is that of fp32.
        """
        expected, slack = self._checked(self._expected()), SLACK * tolerance
        if graph is None:
            return golden_check(self._ids, self._row, expected, slack)
        plain, kernels = self._computed(Loaded(graph)), kernels_here()
        served = None if kernels is None else self._computed(Loaded(graph, kernels=kernels))
        computed = [plain] if served is None else [plain, served]
        centered = self._model.head.task == "fill-mask"
        allowed = quantized_tolerance(expected, computed, slack, centered=centered)
        return golden_check(self._ids, self._row, plain, allowed, served, centered=centered)

    def _expected(self) -> Floats:
        ids = np.array(self._ids)
        return self._reference.output(ids, np.zeros_like(ids))

    def _computed(self, graph: Loaded) -> Floats:
        return self._checked(MaskedSession(graph).run([np.array(self._ids)])[0])

    def _checked(self, output: Floats) -> Floats:
        row: Floats = output[self._row] if output.ndim == 2 else output
        return row

    def answers(self, graph: Path) -> Answers:
        """What the fp32 graph answers on the sample.

        Raises:
            QualityError: there is too little to judge a lower precision by.
        """
        found = self._evaluation.answers(Loaded(graph, prepack=False))
        if len(found) < MIN_POSITIONS:
            raise QualityError(
                f"the quality text {self._sample.name} is too short: it gives {len(found)} "
                f"decisions, and at least {MIN_POSITIONS} are needed",
                "what int8 loses cannot be measured",
            )
        return found

    def lowered(self, graph: Path, before: Answers, *, by_row: bool) -> Lowered:
        """Compares an int8 graph's answers with those in fp32."""
        comparison = self._compared(Loaded(graph, kernels=kernels_here()), before)
        return Lowered(comparison, None, by_row)

    def accepts(self, lowered: Lowered) -> bool:
        """Whether a graph loses little enough.

        A scale for each row is for models that lose nothing to speak of by it.
        """
        most = self.limit
        if lowered.by_row:
            most = min(most, self._evaluation.negligible)
        return lowered.comparison.loss <= most  # not if it is NaN

    def measured(self, lowered: Lowered, graph: Path, before: Answers) -> Lowered:
        """The same, with what the graph loses without our kernels where they measured it."""
        if kernels_here() is None:
            return lowered
        return replace(lowered, portable=self._compared(Loaded(graph), before))

    def _compared(self, graph: Loaded, before: Answers) -> Comparison:
        return self._evaluation.compare(before, self._evaluation.answers(graph))

    def report(self, lowered: Lowered) -> QualityReport:
        """For the manifest."""
        portable, found = lowered.portable, lowered.comparison
        return QualityReport(
            text=self._sample.name,
            text_sha256=self._sample.sha256,
            positions=found.positions,
            figures=found.figures,
            loss=found.loss,
            max_loss=None if math.isinf(self.limit) else self.limit,
            kept=(),
            by_row=lowered.by_row,
            calibration_text=read_calibration(None, None).name,
            measured_with="onnxruntime" if portable is None else "kernels",
            portable=None if portable is None else {"loss": portable.loss, **portable.figures},
        )


def difference(
    what: str, expected: Sequence[Floats], found: Sequence[Floats], allowed: float
) -> float:
    """The largest difference between outputs of texts.

    Raises:
        ExportError: it is more than is allowed.
    """
    pairs = zip(expected, found, strict=True)
    largest = max(float(np.max(np.abs(left - right))) for left, right in pairs)
    if not largest <= allowed:
        raise ExportError(
            f"the graph and the reference disagree on {what}: the outputs differ by up to "
            f"{largest:.2g}, more than the tolerance of {allowed:.2g}; this is a fault of the "
            "exporter, please report it"
        )
    return largest


def _evaluation(
    model: OnePass, tokenizer: Tokenizer, tokens: SpecialTokens, max_length: int, sample: Sample
) -> Evaluation:
    """The questions about the sample for the model's task."""
    text, head = (tokenizer, sample, max_length), model.head
    if head.task == "embed":
        return Cosine(*text)
    if head.task == "fill-mask":
        assert tokens.mask is not None, "special tokens are refused without one"
        return FillMask(*text, model.vocab_size, tokens.mask)
    if head.task == "token-classify":
        return TokenClassify(*text)
    if head.task == "question-answering":
        return QuestionAnswering(*text)
    if head.task == "rerank" or len(head.labels) == 1:
        return Order(*text)
    if head.problem_type == "multi_label_classification":
        return ClassifyAll(*text)
    return Classify(*text)
