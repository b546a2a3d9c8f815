"""`loadtests.batching`: its texts, first-come batches, the report, and a whole run."""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests import LoadTestError
from loadtests.__main__ import main
from loadtests.batching import Row, Sample, report
from loadtests.engines import FirstComeBatcher
from loadtests.texts import mix, read_lines
from maskdial.models.catalog import STARTER_FOLDER

SENTENCES = [f"{number} " + "word " * (number % 30) + "end." for number in range(1000)]


@dataclass(frozen=True, eq=False)
class Text:
    length: int
    client: str = ""


def num_words(text: str) -> int:
    return len(text.split())


def test_a_mix_loses_nothing_and_joins_its_share() -> None:
    texts = mix(SENTENCES, 0.2, seed=3)
    assert texts == mix(SENTENCES, 0.2, seed=3)
    assert texts != mix(SENTENCES, 0.2, seed=4)
    assert sorted(" ".join(texts).split()) == sorted(" ".join(SENTENCES).split())
    long = [text for text in texts if num_words(text) > 31]
    assert all(200 <= num_words(text) <= 500 for text in long)
    assert len({num_words(text) // 100 for text in long}) > 1
    num_joined = sum(text.count("end.") for text in long)
    # Lines left over after the last long text stay single.
    assert 200 - 200 / 2 < num_joined <= 200
    assert long != texts[: len(long)]


def test_a_long_share_of_zero_and_of_one() -> None:
    assert sorted(mix(SENTENCES, 0, seed=0)) == sorted(SENTENCES)
    assert sum(num_words(text) >= 200 for text in mix(SENTENCES, 1, seed=0)) > 30
    # Too few words for a long text; then a single line that exceeds one.
    assert sorted(mix(["a b", "c"], 1, seed=0)) == ["a b", "c"]
    assert sorted(map(num_words, mix(["x " * 900, "a", "b"], 1, seed=0))) == [1, 1, 900]


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("one\n\n  two  \n \n", encoding="utf-8")
    assert read_lines(file) == ["one", "two"]


@given(st.lists(st.integers(1, 600), max_size=60), st.integers(1, 4096))
def test_first_come_batches_keep_the_order_and_fill_the_budget(
    lengths: list[int], budget: int
) -> None:
    batcher: FirstComeBatcher[Text] = FirstComeBatcher(budget)
    texts = [Text(length) for length in lengths]
    for text in texts:
        batcher.add(text)
    batches = []
    while batch := batcher.next_batch():
        batches.append(batch)
    assert [text for batch in batches for text in batch] == texts
    for batch in batches:
        longest = max(text.length for text in batch)
        assert longest * len(batch) <= budget or len(batch) == 1
    for batch, following in pairwise(batches):
        longest = max(text.length for text in [*batch, following[0]])
        assert longest * (len(batch) + 1) > budget


def sample(seconds: float, padding: float, digest: str = "same") -> Sample:
    return Sample(seconds, 10, padding, padding, 0.5, 1.5, digest)


def test_a_report_summarizes_rounds_and_states_targets() -> None:
    section = report(
        {
            "like length": [sample(1.0, 1.0), sample(2.0, 1.05), sample(4.0, 1.25)],
            "first come": [sample(3.0, 3.0), sample(4.0, 3.5), sample(20.0, 4.0)],
        },
        num_texts=100,
        num_tokens=3000,
    )
    ours, baseline = section.rows
    assert isinstance(ours, Row)
    assert isinstance(baseline, Row)
    assert (ours.batches, baseline.batches) == ("like length", "first come")
    assert (ours.texts_per_s, ours.tokens_per_s) == (50.0, 1500.0)
    assert (ours.padding_ratio, baseline.padding_ratio) == (1.05, 3.5)
    assert (ours.times_faster, baseline.times_faster) == (3.0, 1.0)
    assert (ours.median_wait_ms, ours.longest_wait_ms) == (500.0, 1500.0)
    assert section.rounds == 3
    padding, gain, bits = section.findings
    assert "padding ratio of 1.050; target: at most 1.10" in padding
    assert "3.00 times that of first-come batches" in gain
    assert "bitwise equal in both" in bits


def test_a_report_says_when_the_logits_differ() -> None:
    samples = {"like length": [sample(1, 1)], "first come": [sample(1, 1, "other")]}
    assert "differ between the two" in report(samples, 1, 1).findings[2]


def test_a_run_measures_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts, output = tmp_path / "texts.txt", tmp_path / "report.json"
    texts.write_text("\n".join(SENTENCES[:300]), encoding="utf-8")
    arguments = ["--bundle", str(STARTER_FOLDER / "sentiment"), "--texts", str(texts)]
    sizes = ["--num-texts", "60", "--clients", "8", "--max-batch-tokens", "512"]
    limits = ["--seconds", "0.01", "--output", str(output)]
    assert main(["batching", *arguments, *sizes, *limits]) == 0
    written = json.loads(output.read_text())
    assert (written["texts"], written["max_batch_tokens"], written["clients"]) == (60, 512, 8)
    assert written["tokens"]["longest"] == written["max_length"]
    assert written["texts_cut"] > 0
    ours, baseline = written["batching"]["rows"]
    assert 1 <= ours["padding_ratio"] < baseline["padding_ratio"]
    assert 1 <= ours["padded_to_real"] < baseline["padded_to_real"]
    assert "bitwise equal in both" in written["batching"]["findings"][2]
    assert "target: at least 1.8" in " ".join(capsys.readouterr().out.split())


def test_what_cannot_be_measured_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("one\ntwo\n", encoding="utf-8")

    def refusal(bundle: str, file: Path, *more: str) -> str:
        path = str(STARTER_FOLDER / bundle)
        assert main(["batching", "--bundle", path, "--texts", str(file), *more]) == 1
        return capsys.readouterr().err

    assert "is a causal bundle; this needs a masked one" in refusal("hybrid", texts)
    assert "cannot read" in refusal("sentiment", tmp_path / "missing.txt")
    assert "exceed the queue of 1024 texts" in refusal("sentiment", texts, "--clients", "1000")
    texts.write_text("\n \n", encoding="utf-8")
    assert "has no texts" in refusal("sentiment", texts)
    texts.write_bytes(b"\xff\xfe")
    with pytest.raises(LoadTestError, match="cannot read"):
        read_lines(texts)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--texts", "x"],
        ["--bundle", "x"],
        ["--bundle", "x", "--texts", "x", "--long-share", "1.5"],
        ["--bundle", "x", "--texts", "x", "--long-share", "nan"],
        ["--bundle", "x", "--texts", "x", "--clients", "0"],
        ["--bundle", "x", "--texts", "x", "--seconds", "0"],
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["batching", *arguments])
    assert caught.value.code == 2
