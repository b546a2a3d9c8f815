"""The starter recipe end to end on a toy corpus: all three models in a few seconds."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from maskdial_export.starter import data, masked, pretrain  # noqa: E402
from maskdial_export.starter.__main__ import main  # noqa: E402

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


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    corpus, out = tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("out")
    write_toy_corpus(corpus)
    threads = torch.get_num_threads()
    options = ["--corpus", str(corpus), "--out", str(out), "--device", "cpu", "--threads", "1"]
    main(["all", *options, "--minutes", "0.04"])
    yield out
    torch.set_num_threads(threads)


def figures(checkpoint: Path) -> dict[str, object]:
    record = json.loads((checkpoint / "training.json").read_text(encoding="utf-8"))
    assert isinstance(record, dict)
    return record


@pytest.mark.parametrize("model", ["masked", "causal"])
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
        ("masked", ["validation_loss", "masked_top1", "tokens_seen"]),
        ("sentiment", ["sst2_validation_accuracy", "blended_teachers_held_out_accuracy"]),
        ("causal", ["validation_loss", "bits_per_byte", "tokens_seen"]),
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


def test_tokenizers_frame_texts_as_their_architectures_expect(checkpoints: Path) -> None:
    bert = transformers.AutoTokenizer.from_pretrained(checkpoints / "masked")
    pair = bert("The CAT", "saw [MASK]")
    tokens = bert.convert_ids_to_tokens(pair["input_ids"])
    assert tokens[0] == "[CLS]"
    assert tokens.count("[SEP]") == 2
    assert tokens[-2] == "[MASK]"
    assert pair["token_type_ids"][-1] == 1
    llama = transformers.AutoTokenizer.from_pretrained(checkpoints / "causal")
    assert llama.decode(llama("Größe \u2603")["input_ids"]) == "Größe \u2603"


def test_whole_words_are_masked_together(checkpoints: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints / "masked")
    model = masked.build_model(tokenizer)
    objective = masked.MaskedObjective(model, tokenizer, torch.arange(5, 10))
    continuing = int(objective.continues_word.nonzero()[0])
    whole = int((~objective.continues_word).nonzero()[10])
    inputs = torch.tensor([[objective.cls, whole, continuing, continuing, objective.sep]] * 200)
    chosen = objective.choose_words(inputs)
    assert 0 < chosen[:, 1].sum() < 200
    assert (chosen[:, 1] == chosen[:, 2]).all()
    assert (chosen[:, 1] == chosen[:, 3]).all()
    assert not chosen[:, 0].any()
    assert not chosen[:, 4].any()


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
    plan = pretrain.Plan(minutes=0.01, learning_rate=0.1, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        pretrain.pretrain(Line(fails_at=6), plan, tmp_path, "line", resume=False)
    record = pretrain.pretrain(Line(fails_at=0), plan, tmp_path, "line", resume=True)
    assert record.tokens == 4 * record.steps
    assert record.steps > 5
    assert not (tmp_path / pretrain.CHECKPOINT_FILE).exists()
