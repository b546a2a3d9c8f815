"""The quality gate of int8, without torch: what rounding loses of the reference's distributions.

The NumPy reference takes the place of the graph in float32. It reads all texts at once, a matrix at
a time, so that a float32 copy of the weights is neither written nor held. The texts and the figures
are those of the tracer's gate; fewer windows are read unless the loss is close to the limit.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console

from maskdial.bundle.manifest import QualityReport, loss_in_words, with_unit
from maskdial_export.checkpoint.sample import Sample
from maskdial_export.checks.evaluation import BATCH_TOKENS, Answers, Comparison, batches_of, evenly
from maskdial_export.checks.next_tokens import (
    NOT_MEASURED,
    NextTokens,
    divergences,
    log_softmax,
    next_tokens,
)
from maskdial_export.direct.reference import Reference
from maskdial_export.errors import QualityError
from maskdial_export.phase import finding, phase
from maskdial_export.quantize.gate import FILE_LOSS, MIN_POSITIONS, Gate
from maskdial_export.session import CausalSession, Floats, Ids, Loaded

_WORK = 1.5e11
"""Tokens times weights that are read first: a thousand tokens of 135 million, 10 s of a core."""
_LEAST_WINDOWS = 4
_CLEAR = 3
"""Standard errors between the loss and the limit, beyond which no more windows are read."""
_MAX_LOGITS = 2**26  # of a batch, 256 MB
_ROWS = 64  # whose distributions are compared at a time


class QualityGate:
    """Measures what a quantized graph loses, and accepts or refuses it."""

    def __init__(
        self,
        evaluation: NextTokens,
        reference: Reference,
        sample: Sample,
        num_parameters: int,
        limit: float,
    ) -> None:
        """``reference`` has the checkpoint's weights; ``limit`` is the largest loss, in nats."""
        self._evaluation = evaluation
        self._reference = reference
        self._sample = sample
        self._limit = limit
        mean = max(sum(map(len, evaluation.texts)) / max(len(evaluation.texts), 1), 1)
        self._windows = max(int(_WORK / num_parameters / mean), _LEAST_WINDOWS)

    def check(
        self, graph: Loaded, precision: str, vocab_size: int, console: Console
    ) -> QualityReport:
        """What the graph loses, as it is served.

        Raises:
            QualityError: it exceeds the limit, or the text is too short to measure it.
        """
        texts = evenly(self._evaluation.texts, self._windows)
        count = sum(len(text) - 1 for text in texts)
        if count < MIN_POSITIONS:
            raise QualityError(
                f"the quality text {self._sample.name} is too short: it gives {count} decisions, "
                f"and at least {MIN_POSITIONS} are needed",
                f"what {precision} loses cannot be measured",
            )
        with phase(console, "Checking quality"):
            before, after = self._answers(texts, graph, vocab_size)
            comparison = self._evaluation.compare(before, after)
            if self._is_close(comparison) and len(texts) < len(self._evaluation.texts):
                before, after = self._answers(self._evaluation.texts, graph, vocab_size)
                comparison = self._evaluation.compare(before, after)
        loss, figures = comparison.loss, comparison.figures
        weakness = self._evaluation.weakness(before)
        if weakness is not None:
            finding(console, f"fp32 itself does no better than chance: {weakness}")
        said = f"{precision} {loss_in_words(loss, figures, 'fp32')}"
        if not loss <= self._limit:  # also if it is NaN
            limit = with_unit(self._limit, figures)
            raise QualityError(
                f"{said} on {self._sample.name} ({_in_words(comparison)}), and the maximum is "
                f"{limit}; choose another precision, or raise --max-loss",
                f"{said}, more than {limit}",
            )
        finding(console, f"{said}: {_in_words(comparison)}")
        return QualityReport(
            text=self._sample.name,
            text_sha256=self._sample.sha256,
            positions=comparison.positions,
            figures=figures,
            loss=loss,
            max_loss=None if math.isinf(self._limit) else self._limit,
            kept=(),
            by_row=False,
            measured_with="onnxruntime" if graph.kernels is None else "kernels",
        )

    def _is_close(self, comparison: Comparison) -> bool:
        """Whether chance may decide on which side of the limit the loss is."""
        error = comparison.error
        return error is not None and abs(comparison.loss - self._limit) < _CLEAR * error

    def _answers(
        self, texts: Sequence[Ids], graph: Loaded, vocab_size: int
    ) -> tuple[Answers, Answers]:
        """Those of the reference and of the graph, as `NextTokens.answers` gives them."""
        ends = np.cumsum([len(text) for text in texts])[:-1]
        hidden = np.split(self._reference.hidden(*texts), ends)
        lengths = [len(text) for text in texts]
        batches = list(batches_of(lengths, min(BATCH_TOKENS, _MAX_LOGITS // vocab_size)))
        slots = max(map(len, batches))
        session = CausalSession(graph, self._evaluation.layout, slots, max(lengths))
        found: list[tuple[Answers, Answers]] = []
        for batch in batches:
            session.seen[:] = 0
            computed = session.run(0, [texts[index] for index in batch])
            rows = self._reference.logits(np.concatenate([hidden[index] for index in batch]))
            expected = np.split(rows, np.cumsum([lengths[index] for index in batch])[:-1])
            for index, before, after in zip(batch, expected, computed, strict=True):
                found += _compared(texts[index], index, before, after)
        return np.concatenate([one for one, _ in found]), np.concatenate([two for _, two in found])


def _compared(
    text: Ids, window: int, before: Floats, after: Floats
) -> Iterator[tuple[Answers, Answers]]:
    """The answers of a window, a few rows at a time: distributions are as large as logits."""
    for start in range(0, len(text) - 1, _ROWS):
        rows = slice(start, min(start + _ROWS, len(text) - 1))
        part = text[start : rows.stop + 1]
        divergence = divergences(log_softmax(before[rows]), log_softmax(after[rows]))
        number = np.full(len(divergence), window)
        nothing, with_end = np.full_like(divergence, NOT_MEASURED), slice(start, rows.stop + 1)
        yield (
            np.column_stack([next_tokens(part, before[with_end]), nothing, number]),
            np.column_stack([next_tokens(part, after[with_end]), divergence, number]),
        )


def limit_of(gate: Gate, *, keeps_integers: bool) -> float:
    """The largest loss that a gate allows, of a file that has integers for some layers or none."""
    return FILE_LOSS if keeps_integers and gate.max_loss is None else gate.limit


def _in_words(comparison: Comparison) -> str:
    figures, error = comparison.figures, comparison.error
    spread = "" if error is None else f"standard error {error:.2g}, "
    return (
        f"{spread}perplexity {figures['perplexity']:.5g} instead of "
        f"{figures['perplexity_fp32']:.5g}, {figures['top1_agreement']:.1%} of "
        f"{comparison.positions:,} likeliest tokens the same"
    )
