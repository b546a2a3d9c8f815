"""`maskdial calibrate`: temperature and thresholds, against scikit-learn's definitions by hand."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from maskdial import cli
from maskdial.bundle.bundle import read_manifests
from maskdial.errors import ConfigError
from maskdial.masked.tasks.classify import classify
from maskdial.masked.tasks.logits import sigmoid, softmax
from maskdial.offline.calibrate import (
    _label_report,
    calibrate,
    fit_isotonic,
    fit_temperature,
    read_labelled,
)
from maskdial.registry.catalog import STARTER_FOLDER

LABELS = ("NEGATIVE", "POSITIVE")
LINES = [
    {"text": "A warm, funny and moving film.", "label": "POSITIVE"},
    {"text": "A dull, tedious and stupid mess.", "label": "NEGATIVE"},
    {"text": "I loved every minute of it.", "label": "POSITIVE"},
    {"text": "The worst film of the year.", "label": "NEGATIVE"},
    {"text": "It is a film that one can see.", "label": "NEGATIVE"},
    {"text": "Well played, but far too long.", "labels": ["POSITIVE"]},
]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    shutil.copytree(STARTER_FOLDER / "sentiment", folder)
    return folder


def write(tmp_path: Path, lines: list[object]) -> Path:
    file = tmp_path / "labelled.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return file


@pytest.mark.parametrize("scale", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("exclusive", [True, False])
def test_the_temperature_of_scaled_logits_is_found(scale: float, exclusive: bool) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(20_000, 3)) * 2
    to_scores = softmax if exclusive else sigmoid
    scores = to_scores(logits)
    if exclusive:
        drawn = (scores.cumsum(1) > rng.random((len(scores), 1))).argmax(1)
        truth = np.eye(3, dtype=bool)[drawn]
    else:
        truth = rng.random(scores.shape) < scores
    assert fit_temperature(logits * scale, truth, to_scores) == pytest.approx(scale, rel=0.06)


def test_thresholds_for_a_precision_a_recall_or_both() -> None:
    scores = np.array([0.9, 0.8, 0.8, 0.6, 0.5, 0.4, 0.1])
    truth = np.array([True, True, False, True, False, True, False])
    best = _label_report("x", scores, truth, None, None)
    assert (best.threshold, best.precision, best.recall) == (0.4, 4 / 6, 1.0)
    exact = _label_report("x", scores, truth, 1.0, None)
    assert (exact.threshold, exact.precision, exact.recall) == (0.9, 1.0, 0.25)
    most = _label_report("x", scores, truth, None, 0.75)
    assert (most.threshold, most.precision, most.recall) == (0.6, 0.75, 0.75)
    # Pairs of one with and one without: 12, of which 8 are in order and one is a tie.
    assert best.area == pytest.approx(8.5 / 12)
    assert _label_report("x", scores, ~truth & False, None, None).threshold is None
    assert _label_report("x", scores, truth & (scores < 0.45), 0.9, None).threshold is None


@pytest.mark.parametrize("num_texts", [1, 7, 400])
def test_isotonic_tables_are_scikit_learns(num_texts: int) -> None:
    isotonic = pytest.importorskip("sklearn.isotonic")
    rng = np.random.default_rng(num_texts)
    scores = np.round(rng.random(num_texts), 2)
    truth = rng.random(num_texts) < scores**2
    table = fit_isotonic(scores, truth)
    reference = isotonic.IsotonicRegression(out_of_bounds="clip").fit(scores, truth)
    asked = np.linspace(-0.1, 1.1, 241)
    at, meaning = zip(*table, strict=True)
    ours = np.interp(asked, at, meaning)
    np.testing.assert_allclose(ours, reference.predict(asked), atol=1e-12)


def test_isotonic_scores_of_a_bundle(bundle: Path, tmp_path: Path) -> None:
    file = write(tmp_path, list(LINES))
    report = calibrate(bundle, file, is_isotonic=True)
    (manifest,) = read_manifests("m", bundle)
    assert manifest.calibration == report.calibration
    assert set(report.calibration.isotonic) == set(LABELS)
    assert report.loss_after < report.loss_before
    logits = np.array([1.0, -2.0], np.float32)
    scores = classify(logits, LABELS, calibration=report.calibration)
    assert sum(each.score for each in scores) == pytest.approx(1)
    raw = classify(logits, LABELS, function_to_apply="none", calibration=report.calibration)
    assert {each.score for each in raw} == {1.0, -2.0}
    nothing = report.calibration.model_copy(
        update={"isotonic": dict.fromkeys(LABELS, ((0.0, 0.0), (1.0, 0.0)))}
    )
    assert {each.score for each in classify(logits, LABELS, calibration=nothing)} == {0.5}
    assert cli.main(["calibrate", str(bundle), str(file), "--isotonic", "--dry-run"]) == 0


def test_a_bundle_learns_and_classify_follows(bundle: Path, tmp_path: Path) -> None:
    file = write(tmp_path, list(LINES))
    calibrate(bundle, file, writes=False)
    assert read_manifests("m", bundle)[0].calibration is None
    report = calibrate(bundle, file)
    (manifest,) = read_manifests("m", bundle)
    assert manifest.calibration == report.calibration
    assert report.loss_after <= report.loss_before
    logits = np.array([1.0, -2.0], np.float32)
    scores = {each.label: each.score for each in classify(logits, LABELS)}
    divided = logits / np.float64(report.calibration.temperature)
    expected = dict(zip(LABELS, softmax(divided.astype(np.float64)).tolist(), strict=True))
    calibrated = classify(logits, LABELS, calibration=report.calibration)
    assert {each.label: each.score for each in calibrated} == pytest.approx(expected)
    assert scores != pytest.approx(expected)
    raw = classify(logits, LABELS, function_to_apply="none", calibration=report.calibration)
    assert {each.score for each in raw} == {1.0, -2.0}


def test_the_command(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, list(LINES))
    assert cli.main(["calibrate", str(bundle), str(file), "--recall", "0.9"]) == 0
    shown = capsys.readouterr().out
    assert "POSITIVE" in shown
    assert "on 6 texts" in shown
    assert cli.main(["inspect", str(bundle)]) == 0
    assert "calibrated" in capsys.readouterr().out
    assert cli.main(["calibrate", str(bundle), str(tmp_path / "none.jsonl")]) == 1
    assert "cannot be read: no such file" in capsys.readouterr().err
    assert cli.main(["calibrate", str(STARTER_FOLDER / "hybrid"), str(file)]) == 1
    assert "is no classifier with labels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1 is not"),
        ('{"text": 5, "label": "POSITIVE"}', "line 1 is not"),
        ('{"text": "x"}', "line 1 is not"),
        ("[]", "line 1 is not"),
        (
            '{"text": "x", "label": "GOOD"}',
            "line 1: no label 'GOOD'; there are: NEGATIVE, POSITIVE",
        ),
        ("", "has no texts"),
    ],
)
def test_faults_of_the_file(tmp_path: Path, line: str, told: str) -> None:
    file = tmp_path / "labelled.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError) as caught:
        read_labelled(file, LABELS)
    assert told in caught.value.message


def test_labels_of_pairs_and_of_several(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        [{"text": "a", "text_pair": "b", "labels": []}, {"text": "c", "labels": list(LABELS)}],
    )
    texts, truth = read_labelled(file, LABELS)
    assert texts == [("a", "b"), "c"]
    assert truth.tolist() == [[False, False], [True, True]]
    assert not math.isnan(truth.sum())
