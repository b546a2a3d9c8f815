"""``maskdial calibrate``: temperature and thresholds of a classifier, from labelled texts.

The temperature makes scores mean what they say: it minimizes the negative log-likelihood of the
labels (Guo et al. 2017, "On Calibration of Modern Neural Networks"); so do isotonic tables, which
need more texts and may bend. A threshold is the score from
which on a label is said of a text, chosen for a precision, a recall, or the largest F1.
"""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maskdial.bundle.bundle import read_manifests, write_manifest
from maskdial.bundle.manifest import Calibration
from maskdial.errors import ConfigError, ValidationError, io_reason
from maskdial.local.model import AsyncModel
from maskdial.masked.tasks.classify import ClassifyRequest, calibrated, default_function
from maskdial.masked.tasks.logits import sigmoid, softmax

_LOWEST, _HIGHEST, _STEPS = math.log(0.02), math.log(50.0), 80  # of temperatures

Scores = NDArray[np.float64]
"""(num_texts, num_labels)"""
Truth = NDArray[np.bool_]
"""(num_texts, num_labels): whether a label is said of a text"""


@dataclass(frozen=True, slots=True)
class LabelReport:
    """How well the scores of a label tell texts with it from texts without.

    Attributes:
        label: the label.
        texts: with the label.
        area: under the ROC curve; not a number where all texts have it, or none.
        threshold: that was chosen; None if there is none for what was wanted.
        precision, recall: from that threshold on.
    """

    label: str
    texts: int
    area: float
    threshold: float | None
    precision: float
    recall: float


@dataclass(frozen=True, slots=True)
class Report:
    """What a calibration found; ``loss`` in nats a text, before and after."""

    calibration: Calibration
    labels: list[LabelReport]
    loss_before: float
    loss_after: float


def calibrate(
    bundle: Path,
    file: Path,
    *,
    precision: float | None = None,
    recall: float | None = None,
    is_isotonic: bool = False,
    writes: bool = True,
) -> Report:
    """Calibrates a classifier.

    Args:
        bundle: its folder.
        file: JSON Lines of ``text`` (and ``text_pair``), and ``label`` or ``labels``.
        precision: that each label is to have at least, with as much recall as possible.
        recall: likewise; None for both: the largest F1.
        is_isotonic: whether each label gets a table in place of the temperature that all share.
        writes: whether the bundle's manifest gets what was found.

    Raises:
        ConfigError: the file has a fault; with the line. Or the model does not classify.
        BundleError: the bundle cannot be run.
    """
    (manifest, *others) = read_manifests(bundle.name, bundle)
    if not ClassifyRequest.serves(manifest) or manifest.problem_type == "regression" or others:
        raise ConfigError(f"{bundle} is no classifier with labels, so nothing can be calibrated")
    texts, truth = read_labelled(file, manifest.labels)
    logits = asyncio.run(_logits(bundle, texts, manifest.labels))
    function = default_function(manifest.problem_type, len(manifest.labels))
    to_scores = softmax if function == "softmax" else sigmoid
    before = to_scores(logits)
    if is_isotonic:
        tables = {
            label: fit_isotonic(before[:, i], truth[:, i])
            for i, label in enumerate(manifest.labels)
        }
        found = Calibration(isotonic=tables, texts=len(texts))
        scores = calibrated(before, manifest.labels, found, exclusive=function == "softmax")
    else:
        found = Calibration(temperature=fit_temperature(logits, truth, to_scores), texts=len(texts))
        scores = to_scores(logits / found.temperature)
    labels = [
        _label_report(label, scores[:, i], truth[:, i], precision, recall)
        for i, label in enumerate(manifest.labels)
    ]
    thresholds = {each.label: each.threshold for each in labels if each.threshold is not None}
    calibration = found.model_copy(update={"thresholds": thresholds})
    if writes:
        write_manifest(bundle, manifest.model_copy(update={"calibration": calibration}))
    return Report(
        calibration,
        labels,
        _loss(before, truth),
        _loss(scores, truth),
    )


def read_labelled(file: Path, labels: Sequence[str]) -> tuple[list[str | tuple[str, str]], Truth]:
    """Texts, and which labels each of them has.

    Raises:
        ConfigError: the file cannot be read, has no texts, or a line is wrong.
    """
    texts: list[str | tuple[str, str]] = []
    rows: list[list[bool]] = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {io_reason(error)}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text, said = _read_line(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f'{file}, line {number} is not {{"text": "...", "label": "..."}}'
            ) from error
        for label in said:
            if label not in labels:
                known = ", ".join(labels)
                raise ConfigError(f"{file}, line {number}: no label {label!r}; there are: {known}")
        texts.append(text)
        rows.append([label in said for label in labels])
    if not texts:
        raise ConfigError(f"{file} has no texts")
    return texts, np.array(rows, bool)


def _read_line(content: Any) -> tuple[str | tuple[str, str], set[str]]:
    text, pair = content["text"], content.get("text_pair")
    said = content["labels"] if "labels" in content else [content["label"]]
    if not all(isinstance(each, str) for each in (text, *said, *([] if pair is None else [pair]))):
        raise TypeError
    return (text if pair is None else (text, pair)), set(said)


async def _logits(
    bundle: Path, texts: Sequence[str | tuple[str, str]], labels: Sequence[str]
) -> Scores:
    async with await AsyncModel.load(bundle) as model:
        try:
            found = await model.classify(texts, function_to_apply="none", truncate=True)
        except ValidationError as error:
            raise ConfigError(error.message) from error
    by_label = [{each.label: each.score for each in row} for row in found]
    return np.array([[row[label] for label in labels] for row in by_label], np.float64)


def fit_temperature(logits: Scores, truth: Truth, to_scores: Callable[[Scores], Scores]) -> float:
    """The temperature with the smallest loss, which has one minimum: by a golden-section search."""
    ratio = (math.sqrt(5) - 1) / 2
    low, high = _LOWEST, _HIGHEST

    def loss(log_temperature: float) -> float:
        return _loss(to_scores(logits / math.exp(log_temperature)), truth)

    for _ in range(_STEPS):
        first, second = high - ratio * (high - low), low + ratio * (high - low)
        if loss(first) <= loss(second):
            high = second
        else:
            low = first
    return math.exp((low + high) / 2)


def fit_isotonic(
    scores: NDArray[np.float64], truth: NDArray[np.bool_]
) -> tuple[tuple[float, float], ...]:
    """The rising table with the smallest squared error, by pooling neighbours that fall (PAV).

    Args:
        scores: (num_texts,) of a label.
        truth: (num_texts,), whether a text has it.
    """
    at, where = np.unique(scores, return_inverse=True)
    blocks: list[tuple[float, int, int]] = []  # hits, texts, number of scores
    for hits, count in zip(
        np.bincount(where, truth).tolist(), np.bincount(where).tolist(), strict=True
    ):
        block = (hits, count, 1)
        while blocks and blocks[-1][0] * block[1] >= block[0] * blocks[-1][1]:
            before = blocks.pop()
            block = (before[0] + block[0], before[1] + block[1], before[2] + block[2])
        blocks.append(block)
    table, first = [], 0
    for hits, count, number in blocks:
        last = first + number - 1
        table += [(float(at[i]), hits / count) for i in sorted({first, last})]
        first = last + 1
    return tuple(table)


def _loss(scores: Scores, truth: Truth) -> float:
    """Mean negative log-likelihood of a text's labels. Scores that sum to one are those of labels
    that exclude each other: only those that are said count.
    """
    tiny = np.finfo(np.float64).tiny
    said = -np.log(np.maximum(scores, tiny))
    exclusive = scores.shape[1] > 1 and np.allclose(scores.sum(axis=1), 1.0)
    unsaid = 0.0 if exclusive else -np.log(np.maximum(1.0 - scores, tiny))
    return float(np.where(truth, said, unsaid).sum(axis=1).mean())


def _label_report(
    label: str,
    scores: NDArray[np.float64],
    truth: NDArray[np.bool_],
    precision: float | None,
    recall: float | None,
) -> LabelReport:
    order = np.argsort(-scores, kind="stable")
    ranked, right = scores[order], truth[order]
    ends = np.append(ranked[1:] != ranked[:-1], True)  # texts of equal scores pass together
    hits, taken = np.cumsum(right)[ends], np.flatnonzero(ends) + 1
    total = int(truth.sum())
    area = _area(ranked, right)
    if not total:
        return LabelReport(label, 0, area, None, math.nan, math.nan)
    precisions, recalls = hits / taken, hits / total
    if precision is not None:
        fitting = np.flatnonzero(precisions >= precision)
        worth = recalls
    elif recall is not None:
        fitting, worth = np.flatnonzero(recalls >= recall), precisions
    else:
        fitting = np.arange(len(taken))
        worth = 2 * hits / (taken + total)
    if not len(fitting):
        return LabelReport(label, total, area, None, math.nan, math.nan)
    best = fitting[np.argmax(worth[fitting])]
    return LabelReport(
        label,
        total,
        area,
        float(ranked[ends][best]),
        float(precisions[best]),
        float(recalls[best]),
    )


def _area(ranked: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """The area under the ROC curve: how often a text with the label has the larger score."""
    total, others = int(right.sum()), int((~right).sum())
    if not total or not others:
        return math.nan
    _, groups = np.unique(-ranked, return_inverse=True)
    with_label = np.bincount(groups, right).astype(np.float64)
    without = np.bincount(groups, ~right).astype(np.float64)
    below = others - np.cumsum(without)
    return float((with_label * (below + without / 2)).sum() / (total * others))


def shown(report: Report) -> str:
    """A report as lines of a terminal."""
    lines = [
        f"{'label':24} {'texts':>7} {'ROC AUC':>8} {'threshold':>10} {'precision':>10} "
        f"{'recall':>7}"
    ]
    for each in report.labels:
        threshold = "none" if each.threshold is None else f"{each.threshold:.4f}"
        lines.append(
            f"{each.label[:24]:24} {each.texts:>7,} {each.area:>8.4f} {threshold:>10} "
            f"{each.precision:>10.4f} {each.recall:>7.4f}"
        )
    calibration = report.calibration
    points = sum(map(len, calibration.isotonic.values()))
    scale = f"{points} points" if points else f"temperature {calibration.temperature:.4f}"
    lines.append(
        f"{scale}: a loss of {report.loss_after:.4f} "
        f"nats a text in place of {report.loss_before:.4f}, on {calibration.texts:,} texts"
    )
    return "\n".join(lines)
