"""The recipes end to end on a toy corpus: all models and the study, in seconds."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from onnx import numpy_helper
from tokenizers import Tokenizer
from torch.nn import functional

from maskdial.registry.catalog import STARTER_FOLDER
from training import (
    data,
    diffusion,
    hybrid,
    masked,
    pretrain,
    recipes,
    sentiment,
    study,
    teachers,
    unmasking,
)
from training.__main__ import main
from training.cloze import Cloze, read_cloze, solved
from training.data import read_books
from training.settings import Settings, Shape
from training.stories import Story, garbled
from training.vocabulary import as_masked, train_wordpiece

pytestmark = pytest.mark.usefixtures("torch")

NOUNS = ["cat", "dog", "king", "queen", "bird", "fish", "house", "garden"]
VERBS = ["saw", "liked", "chased", "found", "heard"]
GOOD, BAD = ["lovely", "warm", "funny", "brilliant"], ["dull", "bad", "boring", "awful"]


def write_toy_corpus(folder: Path) -> None:
    chance = random.Random(0)

    def sentence() -> str:
        return f"The {chance.choice(NOUNS)} {chance.choice(VERBS)} the {chance.choice(NOUNS)}."

    def write_gzip(name: str, text: str) -> None:
        with gzip.open(folder / name, "wt", encoding="utf-8") as file:
            file.write(text)

    def rated(count: int) -> str:
        rows = []
        for number in range(count):
            words = GOOD if number % 2 else BAD
            rows.append(f"The film is {chance.choice(words)} and {chance.choice(words)}.")
        return "".join(f"{row}\t{number % 2}\n" for number, row in enumerate(rows))

    for name in data.BOOK_FILES:
        chapters = ["\n".join(sentence() for _ in range(60)) for _ in range(5)]
        write_gzip(name, "\n\n".join(chapters) + "\n")
    write_gzip(data.DEFINITIONS_FILE, "".join(f"{noun}: a thing.\n" for noun in NOUNS))
    (folder / data.POLARITY_FILE).write_text(rated(200), encoding="utf-8")
    (folder / data.SENTIMENT_VALIDATION_FILE).write_text(rated(40), encoding="utf-8")


TOY = Shape(width=64, layers=1, vocabulary=320)
CLOZE = [{"text": "The [MASK] saw the dog.", "answers": NOUNS}]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_toy_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def counted() -> Iterator[None]:
    """Trainings go by a clock that counts their steps: they make as many on any machine."""

    def train(
        objective: pretrain.Objective, plan: pretrain.Plan, out: Path, title: str, resume: bool
    ) -> pretrain.Record:
        clock = clock_of(0.01 if title == "sentiment" else 0.06)
        return pretrain.pretrain(objective, replace(plan, clock=clock), out, title, resume)

    with pytest.MonkeyPatch.context() as patch:
        for module in (recipes, study):
            patch.setattr(module, "pretrain", train)
        yield


def clock_of(seconds: float) -> Callable[[], float]:
    """A clock on which so much time passes between any two looks at it."""
    return partial(next, itertools.count(0.0, seconds))


@pytest.fixture(scope="module")
def checkpoints(
    counted: None, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("out")
    cloze_file = out / "cloze.json"
    cloze_file.write_text(json.dumps(CLOZE), encoding="utf-8")
    threads = torch.get_num_threads()
    settings = Settings(corpus, out, minutes=0.02, device=torch.device("cpu"), shape=TOY)
    study.run_study(settings, shapes=[TOY])
    main(
        [
            *("all", "--corpus", str(corpus), "--out", str(out), "--device", "cpu"),
            *("--threads", "1", "--minutes", "0.04", "--cloze", str(cloze_file)),
            *("--width", "64", "--layers", "1", "--vocabulary", "320"),
        ]
    )
    yield out
    torch.set_num_threads(threads)


def figures(checkpoint: Path) -> dict[str, object]:
    record = json.loads((checkpoint / "training.json").read_text(encoding="utf-8"))
    assert isinstance(record, dict)
    return record


@pytest.mark.parametrize("model", ["masked", "causal", "hybrid"])
def test_loss_falls(checkpoints: Path, model: str) -> None:
    losses = figures(checkpoints / model)["training_losses"]
    assert isinstance(losses, list)
    assert losses[-1] < losses[0] - 0.3


def test_sentiment_learns_the_toy_labels(checkpoints: Path) -> None:
    assert figures(checkpoints / "sentiment")["sst2_validation_accuracy"] == 1.0


@pytest.mark.parametrize(
    ("model", "auto_class"),
    [
        ("masked", "AutoModelForMaskedLM"),
        ("sentiment", "AutoModelForSequenceClassification"),
        ("causal", "AutoModelForCausalLM"),
        ("hybrid", "AutoModelForCausalLM"),
    ],
)
def test_checkpoint_loads_with_auto_classes(checkpoints: Path, model: str, auto_class: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints / model)
    loaded = getattr(transformers, auto_class).from_pretrained(checkpoints / model)
    logits = loaded(**tokenizer("The cat saw the dog.", return_tensors="pt")).logits
    assert torch.isfinite(logits).all()
    parameters = sum(parameter.numel() for parameter in loaded.parameters())
    assert figures(checkpoints / model)["parameters"] == parameters


@pytest.mark.parametrize(
    ("model", "measured"),
    [
        ("masked", ["masked_validation_loss", "masked_top1", "cloze_answered_in_top_5", "steps"]),
        ("sentiment", ["sst2_validation_accuracy", "both_teachers_held_out_accuracy"]),
        ("causal", ["validation_loss", "bits_per_byte", "stories_ended_by_the_model"]),
        ("hybrid", ["bits_per_byte", "masked_top1", "cloze_answered_in_top_5", "steps"]),
    ],
)
def test_card_holds_the_measured_figures(
    checkpoints: Path, model: str, measured: list[str]
) -> None:
    card = (checkpoints / model / "README.md").read_text(encoding="utf-8")
    record = figures(checkpoints / model)
    for name in measured:
        value = record[name]
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        assert f"| {name.replace('_', ' ')} | {shown} |" in card


def test_study_is_in_the_card_and_trains_nothing_twice(checkpoints: Path, corpus: Path) -> None:
    results = json.loads((checkpoints / study.STUDY_FILE).read_text(encoding="utf-8"))
    assert [result["causal_share"] for result in results] == [0.5, 0.0, 1.0]
    both, full, causal = results
    assert full["bits_per_byte"] is causal["masked_top1"] is None
    card = (checkpoints / "hybrid" / "README.md").read_text(encoding="utf-8")
    for figure in (both["bits_per_byte"], both["masked_top1"], causal["bits_per_byte"]):
        assert f"| {figure:.3f} |" in card
    settings = Settings(corpus, checkpoints, minutes=0.02, device=torch.device("cpu"), shape=TOY)
    study.run_study(settings, shapes=[TOY])
    again = json.loads((checkpoints / study.STUDY_FILE).read_text(encoding="utf-8"))
    assert again == results, "nothing is trained twice"


def test_sentiment_starts_from_a_bundle(corpus: Path, tmp_path: Path) -> None:
    bundle = STARTER_FOLDER / "sentiment"
    tokenizer = as_masked(Tokenizer.from_file(str(bundle / "tokenizer.json")), masked.MAX_LENGTH)
    config = masked.build_model(tokenizer, Shape(width=192)).config
    model = sentiment.restore_model(bundle, config)
    texts = [row.text for row in data.read_rated_sentences(corpus / data.POLARITY_FILE)][:10]
    texts += ["A warm, funny and touching film.", "Not bad at all.", "Dull " * 70]
    odds = sentiment.score(model, tokenizer, sentiment.encode(tokenizer, texts), bf16=False)
    session = onnxruntime.InferenceSession(str(bundle / "model.onnx"))
    for text, odd in zip(texts, odds, strict=True):
        (row,) = sentiment.encode(tokenizer, [text])
        feeds = {"input_ids": np.array([row]), "lengths": np.array([len(row)], np.int32)}
        (logits,) = session.run(None, feeds)
        assert logits[0, 1] - logits[0, 0] == pytest.approx(float(odd), abs=0.25), text


def test_cross_entropy_and_its_gradient_are_torchs() -> None:
    logits = (10 * torch.randn(2 * pretrain.PIECE_ROWS + 3, 50)).requires_grad_()
    labels, weights = torch.randint(50, (len(logits),)), torch.rand(len(logits))
    gradients = []
    for loss in (pretrain.cross_entropy, partial(functional.cross_entropy, reduction="none")):
        losses = loss(logits, labels)
        (gradient,) = torch.autograd.grad((losses * weights).sum(), logits)
        gradients.append((losses.detach(), gradient))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_teachers_score_what_they_did_not_see(corpus: Path) -> None:
    rows = data.read_rated_sentences(corpus / data.POLARITY_FILE)
    # A sentence twice is in two folds, so that it takes chance labels to tell who saw what.
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefgh", k=6)) for _ in range(400)]
    noise = [
        data.RatedSentence(" ".join(chance.choices(words, k=8)), chance.randint(0, 1))
        for _ in range(200)
    ]
    for sentences, low, high in ((rows, 0.99, 1.0), (noise, 0.3, 0.7)):
        synthetic = teachers.synthesize(sentences, 30, seed=0)
        taught = teachers.train_teachers(sentences, synthetic, seed=0)
        labels = torch.tensor([float(row.label) for row in sentences])
        assert taught.synthetic_odds.shape == (30,)
        for odds in (taught.ngram_odds, taught.embedding_odds):
            assert low <= sentiment.accuracy(odds, labels) <= high


def test_synthetic_texts_are_of_the_sentences_words(corpus: Path) -> None:
    sentences = data.read_rated_sentences(corpus / data.POLARITY_FILE)
    known = {word for row in sentences for word in row.text.split()}
    texts = teachers.synthesize(sentences, 500, seed=0)
    assert len(texts) == 500
    assert all(text and set(text.split()) <= known for text in texts)
    assert len(set(texts)) > 300
    assert texts == teachers.synthesize(sentences, 500, seed=0)


def test_tokenizers_add_the_special_tokens_of_their_architectures(checkpoints: Path) -> None:
    bert = transformers.AutoTokenizer.from_pretrained(checkpoints / "masked")
    pair = bert("The CAT", "saw [MASK]")
    tokens = bert.convert_ids_to_tokens(pair["input_ids"])
    assert tokens[0] == "[CLS]"
    assert tokens.count("[SEP]") == 2
    assert tokens[-2] == "[MASK]"
    assert pair["token_type_ids"][-1] == 1
    decoder = transformers.AutoTokenizer.from_pretrained(checkpoints / "hybrid")
    ids = decoder("Größe [MASK] \u2603")["input_ids"]
    assert ids[0] == decoder.eos_token_id
    assert decoder.decode(ids, skip_special_tokens=True) == "Größe \u2603"


def test_wordpiece_training_is_deterministic() -> None:
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 8))) for _ in range(500)]
    texts = [" ".join(chance.choices(words, k=50)) for _ in range(20)]
    first, second = (train_wordpiece(texts, 200, 64).get_vocab() for _ in range(2))
    assert first == second


def test_whole_words_are_masked_together(checkpoints: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints / "masked")
    model = masked.build_model(tokenizer, TOY)
    objective = masked.MaskedObjective(model, tokenizer, torch.arange(5, 10))
    continuing = int(objective.continues_word.nonzero()[0])
    whole = int((~objective.continues_word).nonzero()[10])
    inputs = torch.tensor([[objective.cls, whole, continuing, continuing, objective.sep]] * 200)
    chosen = objective.choose_words(inputs, 0.2)
    assert 0 < chosen[:, 1].sum() < 200
    assert (chosen[:, 1] == chosen[:, 2]).all()
    assert (chosen[:, 1] == chosen[:, 3]).all()
    assert not chosen[:, 0].any()
    assert not chosen[:, 4].any()


@pytest.fixture
def objective(checkpoints: Path) -> hybrid.HybridObjective:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints / "hybrid")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoints / "hybrid", attn_implementation="eager"
    )
    text = " ".join(f"The {noun} saw Ada-Lou's cat, didn't it?" for noun in NOUNS)
    stream = hybrid.encode_stream(tokenizer, [text], seed=0)
    return hybrid.HybridObjective(model.eval(), tokenizer, stream, 0.5)


def test_hybrid_hides_whole_words_and_never_the_first_token(
    objective: hybrid.HybridObjective, checkpoints: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints / "hybrid")
    windows = torch.tensor([tokenizer("The Großmutter didn't wonder.")["input_ids"]] * 300)
    chosen = objective.choose_words(windows, 0.3)
    assert not chosen[:, 0].any()
    tokens = tokenizer.convert_ids_to_tokens(windows[0].tolist())
    space = max(index for index, token in enumerate(tokens) if token.startswith("Ġ"))
    wonder = list(range(space + (tokens[space] == "Ġ"), len(tokens) - 1))
    assert len(wonder) > 2
    assert (chosen[:, wonder].all(1) == chosen[:, wonder].any(1)).all()
    assert 0 < chosen[:, wonder[0]].sum() < 300
    assert (chosen[:, -1] != chosen[:, wonder[0]]).any(), "a full stop is a word of its own"


def test_causal_rows_have_the_loss_that_transformers_gives(
    objective: hybrid.HybridObjective,
) -> None:
    objective.causal_share = 1.0
    windows = objective.sample_windows(4, 24)
    expected = objective.model(input_ids=windows, labels=windows).loss
    assert objective.loss(windows, 0.2).item() == pytest.approx(expected.item(), abs=1e-5)


def test_masked_rows_see_both_sides_and_causal_rows_one(
    objective: hybrid.HybridObjective,
) -> None:
    windows = objective.sample_windows(1, 16).repeat(2, 1)
    windows[1, 12] = (windows[1, 12] + 1) % 300
    asked = torch.zeros(windows.shape, dtype=torch.bool)
    asked[:, 5] = True
    causal = objective.logits(windows, 2, asked)
    full = objective.logits(windows, 0, asked)
    assert torch.equal(causal[0], causal[1])
    assert not torch.allclose(full[0], full[1])


def test_hybrid_is_trained_on_from_a_bundle(
    checkpoints: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    shutil.copy(checkpoints / "hybrid" / "tokenizer.json", bundle)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoints / "hybrid")
    weights = [
        numpy_helper.from_array(parameter.detach().numpy(), f"model.{name}")
        for name, parameter in model.named_parameters()
    ]
    graph = onnx.helper.make_graph([], "toy", [], [], initializer=weights)
    onnx.save(onnx.helper.make_model(graph), bundle / "model.onnx")
    options = [
        *("--corpus", str(corpus), "--out", str(tmp_path), "--device", "cpu"),
        *("--threads", str(torch.get_num_threads()), "--start", str(bundle), "--minutes", "0.01"),
        *("--width", "64", "--layers", "1", "--vocabulary", "320"),
    ]
    main(["hybrid", "--diffusion", *options])
    trained, before = figures(tmp_path / "hybrid"), figures(checkpoints / "hybrid")
    assert trained["start"] == "the bundle bundle"
    losses, anew = trained["training_losses"], before["training_losses"]
    assert isinstance(losses, list)
    assert isinstance(anew, list)
    assert losses[0] < anew[0] - 0.3

    capsys.readouterr()
    main(["unmasking", *options])
    table = capsys.readouterr().out
    assert f"| {before['bits_per_byte']:.3f} | {trained['bits_per_byte']:.3f} |" in table
    assert f"| {before['masked_top1']:.3f} | {trained['masked_top1']:.3f} |" in table
    with pytest.raises(SystemExit):
        main(["unmasking", "--corpus", str(corpus), "--out", str(tmp_path)])
    assert "--start" in capsys.readouterr().err


def test_diffusion_hides_few_words_or_any_share(objective: hybrid.HybridObjective) -> None:
    rows, length = 400, 32
    trained = diffusion.DiffusionObjective(
        objective.model, objective.tokenizer, objective.stream, 0.5
    )
    windows = trained.sample_windows(rows, length)
    all_hidden = trained.hide(windows, 0.15)
    assert not all_hidden[:, 0].any()
    light, hidden = all_hidden[: rows // 2], all_hidden[rows // 2 :]
    assert 0.1 < light.float().mean() < 0.2
    numbers = trained.word_numbers(windows)
    same_word = (numbers[: rows // 2, 1:] == numbers[: rows // 2, :-1])[:, 1:]
    assert torch.equal(light[:, 2:][same_word], light[:, 1:-1][same_word]), "whole words"
    counts = hidden.sum(1)
    assert counts.min() == 1
    assert counts.max() == length - 1
    for low in range(1, length - 1, 5):
        assert ((counts >= low) & (counts < low + 5)).any(), low
    gaps = diffusion.draw_gaps(2 * rows, length)
    edges = (gaps[:, 1:] != gaps[:, :-1]).sum(1)
    assert edges.max() == 2, "a gap is in one piece"
    assert 0.1 < (edges == 2).float().mean() < 0.5
    weights = trained.token_weights(hidden, 0) * hidden
    torch.testing.assert_close(weights.sum(1), torch.full((len(weights),), 1.0 / len(weights)))


@pytest.mark.parametrize("per_pass", [1, 3])
def test_unmasking_fills_the_likeliest_first(
    objective: hybrid.HybridObjective, per_pass: int
) -> None:
    windows = objective.sample_windows(3, 20)
    hidden = torch.zeros(windows.shape, dtype=torch.bool)
    for row, places in enumerate(([4], [2, 7, 8, 15], [10, 11, 12, 13, 18])):
        hidden[row, places] = True
    masked_texts = torch.where(hidden, objective.mask, windows)
    masked_texts[:, 19] = objective.mask  # not asked for: it stays
    filled = unmasking.fill(objective, masked_texts, hidden, per_pass, temperature=0.0)
    for row, expected in enumerate(masked_texts.clone()):
        open_places = hidden[row].nonzero()[:, 0].tolist()
        while open_places:
            everywhere = torch.ones(1, 20, dtype=torch.bool)
            probabilities = objective.logits(expected[None], 0, everywhere).detach()
            probabilities[:, objective.mask] = -torch.inf
            best = probabilities.softmax(-1).max(-1)
            ranked = sorted(open_places, key=lambda place: -best.values[place - 1])
            for place in ranked[:per_pass]:
                expected[place] = best.indices[place - 1]
                open_places.remove(place)
        assert torch.equal(filled[row], expected)


def test_passages_keep_every_paragraph(checkpoints: Path, corpus: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints / "hybrid")
    texts = read_books(corpus).train
    stream = hybrid.encode_stream(tokenizer, texts, seed=1)
    passages = tokenizer.decode(stream.tolist()).split("<|endoftext|>")
    assert passages[0] == passages[-1] == ""
    assert len(passages) > len(texts) + 2
    assert "\n".join(passages[1:-1]) == "\n".join(texts)


def test_garbled_words_occur_in_no_book() -> None:
    story = Story("The cat's blorf, said the Queen - a blorf-cat!", ended=True)
    known = frozenset({"the", "cat's", "said", "queen", "a", "cat"})
    assert garbled([story], known) == ["blorf", "blorf"]


def test_cloze_counts_answers_among_the_five_best(tmp_path: Path) -> None:
    file = tmp_path / "cloze.json"
    file.write_text('[{"text": "A [MASK].", "answers": ["Dog", "cat"]}]', encoding="utf-8")
    (cloze,) = read_cloze(file)
    assert cloze == Cloze("A [MASK].", frozenset({"dog", "cat"}))
    ranked = [(word, 0.1) for word in ("a", "b", "c", "d", " Cat", "dog")]
    assert solved([cloze], lambda _: ranked) == 1.0
    assert solved([cloze], lambda _: [*ranked[:4], *ranked[5:], *ranked]) == 1.0
    assert solved([cloze], lambda _: [("x", 0.1), *ranked]) == 0.0


class Line:
    """An objective that fits y = 2 x, and stops with an error at step `fails_at`."""

    def __init__(self, fails_at: int) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.fails_at = fails_at
        self.steps = 0

    def batch_loss(self, progress: float) -> tuple[Any, int]:
        self.steps += 1
        if self.steps == self.fails_at:
            raise KeyboardInterrupt
        inputs = torch.rand(4, 1)
        return ((self.model(inputs) - 2.0 * inputs) ** 2).mean(), 4


def test_interrupted_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    def plan() -> pretrain.Plan:
        return pretrain.Plan(10 / 60, 0.1, checkpoint_seconds=0.0, clock=clock_of(1.0))

    with pytest.raises(KeyboardInterrupt):
        pretrain.pretrain(Line(fails_at=6), plan(), tmp_path, "line", resume=False)
    resumed = Line(fails_at=0)
    record = pretrain.pretrain(resumed, plan(), tmp_path, "line", resume=True)
    assert (record.steps, resumed.steps) == (10, 5)
    assert record.tokens == 4 * record.steps
    assert not (tmp_path / pretrain.CHECKPOINT_FILE).exists()
