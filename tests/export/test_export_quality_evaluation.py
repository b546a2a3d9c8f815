"""Evaluations: the questions about a sample, and the comparison of answers."""

import errno
import io
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from maskdial_export.checkpoint.sample import Sample, read_sample
from maskdial_export.checkpoint.source import find
from maskdial_export.checks import next_tokens
from maskdial_export.checks.evaluation import (
    Classify,
    ClassifyAll,
    Comparison,
    Cosine,
    Evaluation,
    FillMask,
    Order,
    QuestionAnswering,
)
from maskdial_export.checks.next_tokens import NextTokens
from maskdial_export.model import Checkpoint, load_checkpoint
from maskdial_export.quantize.observe import observe_moments
from maskdial_export.quantize.quantize import projections

New = Callable[[str], Path]
SAMPLE = Sample("words", "0" * 64, "one two. three four five! six? seven eight nine ten\n" * 9)


def load(folder: Path) -> Checkpoint:
    return load_checkpoint(find(str(folder), "auto", revision=None, allow_pickle=False))


@pytest.fixture(scope="module")
def evaluate(checkpoint: New) -> Callable[[str], Any]:
    return lambda name: load(checkpoint(name)).evaluation(SAMPLE)


def test_next_tokens_equal_torchs(
    checkpoint: New, bundle: New, load_reference: Callable[[Path], Any]
) -> None:
    evaluation = load(checkpoint("llama")).evaluation(SAMPLE)
    assert isinstance(evaluation, NextTokens)
    answers = evaluation.answers(bundle("llama") / "model.onnx")
    losses, best = [], []
    model = load_reference(checkpoint("llama"))
    for text in sorted(evaluation.texts, key=len):
        ids = torch.from_numpy(text)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"))
        best.append(logits.argmax(1))
    np.testing.assert_allclose(answers[:, 0], torch.cat(losses), atol=1e-4)
    assert np.mean(answers[:, 1] == torch.cat(best).numpy()) > 0.99
    assert not evaluation.answers(bundle("llama") / "model.onnx")[:, 2].any()
    # The reference itself has a divergence of -1
    comparison = evaluation.compare(answers, answers + np.array([0.02, 0, 1.5, 0]))
    assert comparison.figures["perplexity"] == pytest.approx(
        np.exp(0.02) * comparison.figures["perplexity_fp32"]
    )
    assert comparison.figures["top1_agreement"] == 1
    assert comparison.loss == comparison.figures["kl_divergence"] == pytest.approx(0.5)
    assert comparison.error == pytest.approx(0, abs=1e-6)
    assert comparison.positions == sum(len(text) - 1 for text in evaluation.texts)


def test_a_window_that_moves_more_is_the_worst_and_an_error(evaluate: Callable[[str], Any]) -> None:
    evaluation = evaluate("llama")
    windows = np.repeat(np.arange(4), 50)
    reference = np.column_stack([np.ones(200), np.zeros(200), np.full(200, -1.0), windows])
    answers = reference.copy()
    answers[:, 2] = [0.01, 0.02, 0.03, 0.1] @ np.eye(4)[windows].T
    found = evaluation.compare(reference, answers)
    assert found.loss == pytest.approx(0.04)
    assert found.figures["kl_worst_window"] == pytest.approx(0.1)
    expected = np.std([0.01, 0.02, 0.03, 0.1], ddof=1) / 2
    assert found.error == found.figures["kl_error"] == pytest.approx(expected)


def test_one_attempt_is_better_beyond_what_is_chance(evaluate: Callable[[str], Any]) -> None:
    """The same text is hard for both, which is no difference."""
    rng = np.random.default_rng(0)
    hard = rng.uniform(0.01, 1, 16)
    before, noise = Comparison(hard, 16, {}), rng.normal(size=16) * 0.01
    noise -= noise.mean()
    assert Comparison(hard - 0.01 + noise, 16, {}).improves(before)
    assert not Comparison(hard - 0.001 + noise, 16, {}).improves(before)
    assert not Comparison(hard + 0.01 + noise, 16, {}).improves(before)
    single = Comparison(np.array([0.02]), 224, {})
    assert Comparison(np.array([0.01]), 224, {}).improves(single)
    assert not Comparison(np.array([0.03]), 224, {}).improves(single)
    assert before.error is not None
    assert before.error > 0.05


class SmallDisk(io.FileIO):
    """A file on a disk with room for 1,000 bytes, of which what is skipped takes none."""

    room = 1000

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


def test_a_full_disk_is_an_error_and_no_signal(
    evaluate: Callable[[str], Any],
    bundle: New,
    checkpoint: New,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page of a mapped file without room on the disk would end the process."""
    opened = []

    def small(**_: Any) -> SmallDisk:
        opened.append(SmallDisk(tmp_path / "file", "w+"))
        return opened[-1]

    monkeypatch.setattr(next_tokens, "TemporaryFile", small)
    with pytest.raises(OSError, match="No space left"):
        evaluate("llama").answers(bundle("llama") / "model.onnx")
    monkeypatch.setattr(tempfile, "TemporaryFile", small)
    llama, text = load(checkpoint("llama")), np.arange(5, 20)
    names = projections(llama.model)
    with pytest.raises(OSError, match="No space left"):
        observe_moments(llama.model, names, [text], llama.answer, of_tokens=True)
    assert len(opened) == 2


@pytest.mark.parametrize("unknown", [False, True])
def test_languages_are_read_where_the_vocabulary_is_of_many(checkpoint: New, unknown: bool) -> None:
    loaded = load(checkpoint("llama"))
    sample = replace(
        SAMPLE,
        others=("five six\n" * 9,),
        languages="日本語 한국어\n" if unknown else "one three\n",
    )
    assert loaded.kv is not None
    few, many = (
        NextTokens(loaded.tokenizer, sample, 128, size, loaded.kv) for size in (1000, 100_000)
    )
    count = len(few.texts)
    assert (len(many.texts) > count) != unknown


def test_every_token_is_masked_once(checkpoint: New) -> None:
    loaded = load(checkpoint("bert"))
    evaluation = loaded.evaluation(SAMPLE)
    assert isinstance(evaluation, FillMask)
    assert evaluation.asked is not None
    whole = loaded.tokenizer.encode(SAMPLE.text, add_special_tokens=False)
    assert len(evaluation.truth) == len(whole)
    for text, asked in zip(evaluation.texts, evaluation.asked, strict=True):
        assert len(text) <= 128
        assert np.flatnonzero(text == 4).tolist() == sorted(asked)
        assert (text[0], text[-1]) == (2, 3)
        assert 0.1 < len(asked) / len(text) < 0.2


def test_perplexity_of_a_guess(evaluate: Callable[[str], Any]) -> None:
    """A model that knows no more than how often each token occurs is as good as chance."""
    evaluation = evaluate("llama")
    tokens = np.concatenate([text[1:] for text in evaluation.texts])
    values, indices, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    surprise = -np.log(counts / len(tokens))[indices]
    guess = np.stack([surprise, np.full(len(tokens), values[counts.argmax()])], axis=1)
    little = np.array([1e-6, 0])
    assert evaluation.weakness(guess + little).startswith("perplexity ")
    assert evaluation.weakness(guess - little) is None


def test_fill_mask_of_a_guess(evaluate: Callable[[str], Any]) -> None:
    evaluation = evaluate("bert")
    values, counts = np.unique(evaluation.truth, return_counts=True)
    guess = np.full((len(evaluation.truth), 1), values[counts.argmax()])
    found = f"{counts.max() / counts.sum():.1%}"
    assert evaluation.weakness(guess).startswith(f"{found} of the tokens found, and {found} by")
    wrong = np.flatnonzero(guess[:, 0] != evaluation.truth)[0]
    guess[wrong] = evaluation.truth[wrong]
    assert evaluation.weakness(guess) is None


def test_labels_do_not_show_a_guess(evaluate: Callable[[str], Any]) -> None:
    assert evaluate("bert-classify").weakness(np.zeros((9, 1))) is None


def _pairs(evaluation: FillMask) -> list[tuple[Any, Any]]:
    assert evaluation.asked is not None
    return list(zip(evaluation.texts, evaluation.asked, strict=True))


def test_answers_are_in_the_order_of_the_questions(
    checkpoint: New, bundle: New, load_reference: Callable[[Path], Any]
) -> None:
    """Batches are sorted by length; answers are in the order of the texts."""
    evaluation = load(checkpoint("bert")).evaluation(SAMPLE)
    assert isinstance(evaluation, FillMask)
    answers = evaluation.answers(bundle("bert") / "model.onnx")
    model = load_reference(checkpoint("bert"))
    with torch.no_grad():
        expected = [
            model(torch.from_numpy(text[None])).logits[0, asked].argmax(1)
            for text, asked in _pairs(evaluation)
        ]
    assert np.mean(answers[:, 0] == torch.cat(expected).numpy()) > 0.99


@pytest.mark.parametrize("name", ["bert", "bert-classify", "roberta-question-answering", "llama"])
def test_questions_are_the_same_every_time(name: str, evaluate: Callable[[str], Any]) -> None:
    first, second = evaluate(name), evaluate(name)
    assert len(first.texts) == len(second.texts) > 0
    assert all(np.array_equal(*pair) for pair in zip(first.texts, second.texts, strict=True))


def test_question_has_the_sentences_around_it(checkpoint: New) -> None:
    loaded = load(checkpoint("roberta-question-answering"))
    evaluation = loaded.evaluation(SAMPLE)
    assert isinstance(evaluation, QuestionAnswering)
    first = loaded.tokenizer.encode("three four five!", "one two. six?")
    assert evaluation.texts[0].tolist() == first.ids
    assert evaluation.types is not None
    assert evaluation.types[0].tolist() == first.type_ids


def classify(evaluate: Callable[[str], Any]) -> Classify:
    evaluation = evaluate("bert-classify")
    assert type(evaluation) is Classify
    return evaluation


def test_tie_is_no_loss(evaluate: Callable[[str], Any]) -> None:
    evaluation = classify(evaluate)
    clear, close = np.log([0.1, 0.6, 0.3]), np.log([0.03, 0.48, 0.46])
    reference = np.concatenate([evaluation.choose(row) for row in (clear, clear, close, close)])
    swapped = [row[[0, 2, 1]] for row in (clear, close)]
    other = np.log([0.6, 0.2, 0.2])
    answers = [evaluation.choose(row) for row in (clear, swapped[0], swapped[1], other)]
    comparison = evaluation.compare(reference, np.concatenate(answers))
    assert comparison.figures == {"agreement": 0.25, "agreement_or_tie": 0.5}
    assert comparison.loss == 0.5
    assert comparison.positions == 4


def test_nan_is_a_loss(evaluate: Callable[[str], Any], checkpoint: New) -> None:
    for name in ("bert-classify", "bert-embed", "llama"):
        evaluation: Evaluation = evaluate(name)
        answers = np.array([[0.5, 1.0, 0.0, 0.0][: 4 if name == "llama" else 2]])
        broken = answers * np.array([np.nan, np.nan, np.nan, 1])[: answers.shape[1]]
        if isinstance(evaluation, Classify):
            answers, broken = (evaluation.choose(each[0]) for each in (answers, broken))
        assert not evaluation.compare(answers, broken).loss <= 0.01
        assert evaluation.compare(answers, answers).loss == pytest.approx(0)


def test_labels_of_which_several_may_hold(evaluate: Callable[[str], Any]) -> None:
    evaluation = evaluate("deberta-v2-classify")
    assert isinstance(evaluation, ClassifyAll)
    reference = np.array([[3.0, -2.0], [3.0, -0.05], [3.0, -2.0]])
    answers = np.array([[1.0, -1.0], [3.0, 0.05], [3.0, 0.5]])
    comparison = evaluation.compare(reference, answers)
    assert comparison.figures["agreement"] == pytest.approx(1 / 3)
    assert comparison.loss == pytest.approx(1 / 3)


def test_order_of_scores(checkpoint: New) -> None:
    evaluation = Order(load(checkpoint("bert-classify")).tokenizer, SAMPLE, 128)
    reference = np.array([0.0, 10.0, 10.1, 20.0])
    swapped_tie = np.array([0.0, 10.1, 10.0, 20.0])
    swapped = np.array([11.0, 10.0, 10.1, 20.0])
    assert evaluation.compare(reference, swapped_tie).loss == 0
    assert evaluation.compare(reference, swapped_tie).figures["agreement"] == pytest.approx(5 / 6)
    assert evaluation.compare(reference, swapped).loss == pytest.approx(2 / 6)


def test_cosines_of_vectors(evaluate: Callable[[str], Any]) -> None:
    evaluation = evaluate("bert-embed")
    assert isinstance(evaluation, Cosine)
    reference = np.array([[2.0, 0.0], [0.0, 1.0]])
    comparison = evaluation.compare(reference, np.array([[1.0, 0.0], [3.0, 4.0]]))
    assert comparison.figures == pytest.approx({"mean_cosine": 0.9, "least_cosine": 0.8})
    assert comparison.loss == pytest.approx(0.1)


def test_sample_of_the_exporter() -> None:
    sample = read_sample(None)
    assert sample.name == "maskdial_export/sample.txt"
    assert len(sample.sentences()) > 60
    assert len(set(sample.passages())) > 300
    assert ["def " in each for each in sample.others] == [True, False]
    assert "User:" in sample.others[1]
    assert any("\u4e00" <= letter <= "\u9fff" for letter in sample.languages)


def test_passages_are_runs_of_sentences() -> None:
    sample = Sample("", "", "One. Two!\n\nThree? Four")
    assert sample.passages() == [
        *("One.", "Two!", "Three?", "Four"),
        *("One. Two!", "Two! Three?", "Three? Four"),
        *("One. Two! Three?", "Two! Three? Four"),
        "One. Two! Three? Four",
    ]


def test_long_text_is_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"word " * 100_000)
    sample = read_sample(path)
    assert sample.text.startswith("word")
    assert len(sample.text) < 100_000
