"""The tagger of personal data: what is written for it, and a run of its recipe."""

import gzip
import json
import re
from itertools import islice
from pathlib import Path

import pytest
import torch

from maskdial.registry.catalog import STARTER_FOLDER
from training import personal
from training.__main__ import main
from training.data import DEFINITIONS_FILE
from training.personal import LABELS, Text, Writer
from training.personal_values import FILLERS, values_of

pytestmark = pytest.mark.usefixtures("torch")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    questions = ["Where is my card?\tcard", "How long does a transfer take?\ttransfer"]
    (tmp_path / "intents-train.tsv").write_text("\n".join(questions * 5), encoding="utf-8")
    with gzip.open(tmp_path / DEFINITIONS_FILE, "wt", encoding="utf-8") as file:
        file.write("Garden: a plot of ground.\nRiver: a large stream.\n" * 20)
    return tmp_path


def test_every_slot_of_every_sentence_has_a_kind() -> None:
    lines = (Path(personal.__file__).parent / "personal_texts.txt").read_text(encoding="utf-8")
    kinds = set(re.findall(r"\{([A-Za-z]+)\}", lines.partition("\n\n")[0]))
    assert kinds - {"name"} <= {*values_of(["word"]), *FILLERS}
    assert set(LABELS) <= kinds


def test_texts_are_the_same_for_a_seed_and_entities_lie_where_they_say(corpus: Path) -> None:
    texts = list(islice(Writer(corpus, 3).texts(), 400))
    assert texts == list(islice(Writer(corpus, 3).texts(), 400))
    assert texts != list(islice(Writer(corpus, 4).texts(), 400))
    seen = set()
    for each in texts:
        ends = 0
        for entity in each.entities:
            value = each.text[entity.start : entity.end]
            assert value.strip() == value
            assert ends <= entity.start < entity.end
            ends = entity.end
            seen.add(entity.label)
            if entity.label == "EMAIL":
                assert re.fullmatch(r"\S+@\S+\.\S+", value)
            if entity.label == "CARD":
                digits = [int(c) for c in value if c.isdigit()][::-1]
                doubled = [sum(divmod(2 * d, 10)) for d in digits[1::2]]
                assert (sum(digits[::2]) + sum(doubled)) % 10 == 0
    assert seen == set(LABELS)


def test_a_run_writes_a_tagger_and_goes_on_from_its_bundle(corpus: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    out, start = tmp_path / "out", STARTER_FOLDER / "sentiment"
    try:
        main(
            [
                *("personal", "--corpus", str(corpus), "--out", str(out), "--device", "cpu"),
                *("--minutes", "0.03", "--width", "192", "--start", str(start)),
            ]
        )
    finally:
        torch.set_num_threads(threads)
    found = json.loads((out / "personal" / "training.json").read_text(encoding="utf-8"))
    assert found["steps"] > 0
    assert {f"recall_of_{label}" for label in LABELS} <= found.keys()
    assert len(found["samples"]) == 3
    config = json.loads((out / "personal" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["ModernBertForTokenClassification"]
    with pytest.raises(SystemExit):
        main(["personal", "--corpus", str(corpus), "--out", str(out)])


def test_tags_begin_once_for_each_entity() -> None:
    from tokenizers import Tokenizer

    from training.vocabulary import as_masked

    file = STARTER_FOLDER / "sentiment" / "tokenizer.json"
    tokenizer = as_masked(Tokenizer.from_file(str(file)), 64)
    text = Text("Ask Marta Lindqvist!", (personal.Entity("PERSON", 4, 19),))
    ((ids, tags),) = personal.encode(tokenizer, [text])
    assert len(ids) == len(tags)
    assert tags[0] == tags[-1] == -100
    begins, inside = personal._TAGS.index("B-PERSON"), personal._TAGS.index("I-PERSON")
    assert next(tag for tag in tags if tag > 0) == begins
    assert set(tags) == {-100, 0, begins, inside}
    assert tags.count(begins) == 1
