"""`maskdial eval`: the harness' definitions, computed here in another way."""

import asyncio
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from maskdial import Model, cli
from maskdial.ask.catalogue import task_of
from maskdial.bundle.bundle import load_bundle, load_bundles
from maskdial.bundle.card import CARD, Measured, add_to_card, read_card
from maskdial.config import load_config
from maskdial.errors import ConfigError
from maskdial.inspection import describe
from maskdial.local.model import AsyncModel
from maskdial.masked.tasks.classify import ClassifyRequest
from maskdial.offline.application import Application
from maskdial.offline.evaluate.answers import Asker, Outcome
from maskdial.offline.evaluate.compare import (
    difference,
    figure,
    macro_f1,
    mcnemar,
    pearson,
    spearman,
)
from maskdial.offline.evaluate.filters import ExactMatch, Filter
from maskdial.offline.evaluate.reading import Reader
from maskdial.offline.evaluate.task import EvalTask, read_task
from maskdial.registry.catalog import STARTER_FOLDER
from tests.page.bundles import make_embedder

HYBRID = STARTER_FOLDER / "hybrid"
CHOICES = {
    "task": "choices",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "data.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{gold}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
QUESTIONS: list[dict[str, Any]] = [
    {"q": "Once upon a time there was a little", "choices": ["girl", "xylophone"], "gold": 0},
    {"q": "The king sat upon his ", "choices": ["throne", "of of of of"], "gold": 1},
    {"q": "", "choices": ["The old man", "qz qz"], "gold": 0},
]


def write(folder: Path, task: dict[str, Any], lines: list[dict[str, Any]]) -> Path:
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    path = folder / "task.yaml"
    path.write_text(yaml.safe_dump(task))
    return path


async def outcomes(task: EvalTask) -> list[Outcome]:
    async with await AsyncModel.load(HYBRID) as model:
        return await Asker(model).outcomes(task)


def test_choices_are_ranked_by_the_likelihood_of_what_they_add(tmp_path: Path) -> None:
    task = read_task(write(tmp_path, CHOICES, QUESTIONS))
    found = asyncio.run(outcomes(task))
    with Model(HYBRID) as model:
        for outcome, question in zip(found, QUESTIONS, strict=True):
            sums = []
            for choice in question["choices"]:
                # The model's texts begin with its token for their end, which the harness leaves
                # out; so whole sequences of ids are scored here, in one call each.
                context = question["q"].rstrip()
                tokenizer = model.model.writer.tokenizer
                whole = tokenizer.encode(f"{question['q']} {choice}", add_special_tokens=False).ids
                before = tokenizer.encode(context, add_special_tokens=False).ids
                if not context:
                    whole, before = [0, *whole], [0]
                (logprobs,) = model.score_ids([whole])
                sums.append(sum(logprobs[len(before) - 1 :]))
            lengths = [len(each) for each in question["choices"]]
            per_character = np.divide(sums, lengths)
            assert outcome.values == {
                "acc": float(np.argmax(sums) == question["gold"]),
                "acc_norm": float(np.argmax(per_character) == question["gold"]),
            }
    assert [each.values["acc"] for each in found] == [1.0, 0.0, 1.0]


def test_perplexities_of_whole_texts(tmp_path: Path) -> None:
    """Also of one that is longer than the context: each token has as much before it as fits."""
    texts = ["The king had a daughter.", "And so they went on. " * 150]
    rolling = {
        **{k: CHOICES[k] for k in ("task", "dataset_path", "dataset_kwargs", "test_split")},
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{text}}",
    }
    task = read_task(write(tmp_path, rolling, [{"text": text} for text in texts]))
    found = asyncio.run(outcomes(task))
    with Model(HYBRID) as model:
        size = model.model.writer.max_length - 2
        for outcome, text in zip(found, texts, strict=True):
            ids = model.model.writer.tokenizer.encode(text, add_special_tokens=False).ids
            total, whole = 0.0, [0, *ids]
            for first in range(0, len(ids), size):
                last = min(first + size, len(ids))
                begin = 0 if first == 0 else last - size
                (logprobs,) = model.score_ids([whole[begin : last + 1]])
                total += sum(logprobs[first - begin :])
            assert outcome.values["word_perplexity"] == pytest.approx(total, rel=1e-9)
            assert outcome.weights["byte_perplexity"] == len(text.encode())
    figures = {metric: figure(metric, found).value for metric in task.metrics}
    num_bytes = sum(len(text.encode()) for text in texts)
    total = sum(each.values["bits_per_byte"] for each in found)
    assert figures["byte_perplexity"] == pytest.approx(math.exp(-total / num_bytes))
    assert figures["bits_per_byte"] == pytest.approx(math.log2(figures["byte_perplexity"]))


def test_written_texts_end_at_what_ends_them(tmp_path: Path) -> None:
    with Model(HYBRID) as model:
        ids = model.model.writer.tokenizer.encode("The king said", add_special_tokens=False).ids
        (written,) = model.generate([ids], max_new_tokens=20, do_sample=False)
    end = written.text.split()[2]
    until = {
        **{k: CHOICES[k] for k in ("task", "dataset_path", "dataset_kwargs", "test_split")},
        "output_type": "generate_until",
        "doc_to_text": "q",
        "doc_to_target": "a",
        "generation_kwargs": {"until": [end], "max_gen_toks": 20, "do_sample": False},
    }
    expected = written.text.split(end)[0]
    lines = [{"q": "The king said", "a": expected}, {"q": "The king said", "a": "no"}]
    found = asyncio.run(outcomes(read_task(write(tmp_path, until, lines))))
    assert [each.values["exact_match"] for each in found] == [1.0, 0.0]
    until["generation_kwargs"] = {"max_gen_toks": 510}
    with pytest.raises(ConfigError, match="max_gen_toks 510 leaves no room for a question"):
        asyncio.run(outcomes(read_task(write(tmp_path, until, lines))))


def test_an_empty_choice_is_never_the_best_by_its_length(tmp_path: Path) -> None:
    lines = [{"q": "The old", "choices": ["", "man"], "gold": 1}]
    (found,) = asyncio.run(outcomes(read_task(write(tmp_path, CHOICES, lines))))
    assert found.values["acc_norm"] == 1.0


def of_counts(values: list[int]) -> list[Outcome]:
    return [Outcome({"acc": float(value)}, {"acc": 1.0}) for value in values]


def test_differences_are_paired() -> None:
    ours, others = of_counts([1, 1, 0, 0, 1, 0, 1, 1]), of_counts([1, 1, 1, 1, 1, 1, 0, 1])
    apart = difference("acc", ours, others)
    assert (apart.lost, apart.won, apart.value) == (3, 1, -0.25)
    assert apart.probability == pytest.approx(2 * (1 + 4) / 16)  # of 4 tosses at most one
    assert apart.low <= -0.25 <= apart.high
    same = difference("acc", ours, ours)
    assert (same.low, same.high, same.probability) == (0.0, 0.0, 1.0)
    assert mcnemar(0, 10) == pytest.approx(2 / 1024)
    assert mcnemar(1000, 1000) == 1.0
    assert mcnemar(900, 1000) == pytest.approx(0.023108845108901193)  # scipy.stats.binomtest
    score = figure("acc", ours)
    values = [1, 1, 0, 0, 1, 0, 1, 1]
    assert score.error == pytest.approx(np.std(values, ddof=1) / math.sqrt(8))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, report = write(tmp_path, CHOICES, QUESTIONS), tmp_path / "report.json"
    program = ["eval", str(HYBRID), str(HYBRID), "--task", str(path), "--json", str(report)]
    assert cli.main(program) == 0
    shown = capsys.readouterr().out
    assert "choices: 3 questions" in shown
    assert "0 lost, 0 won (p = 1.000)" in shown
    first, second = json.loads(report.read_text())
    assert first["figures"] == second["figures"]
    assert cli.main([*program, "--limit", "2"]) == 0
    assert "2 questions" in capsys.readouterr().out
    assert cli.main(["eval", str(STARTER_FOLDER / "sentiment"), "--task", str(path)]) == 1
    assert capsys.readouterr().err
    assert cli.main([*program, "--limit", "0"]) == 1


def test_a_card_is_shown_and_leaves_the_bundle_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, CHOICES, QUESTIONS)
    first, second = (Path(shutil.copytree(HYBRID, tmp_path / name)) for name in ("first", "second"))
    manifest = json.loads((second / "maskdial.json").read_text())
    (second / "maskdial.json").write_text(json.dumps(manifest))  # another file, so another bundle
    before = [load_bundle("x", folder).sha256 for folder in (first, second)]
    run = ["eval", str(first), str(second), "--task", str(path), "--card"]
    assert cli.main([*run[:2], *run[3:], "--limit", "2"]) == cli.main(run) == 0
    bundles = [load_bundle("x", folder) for folder in (first, second)]
    assert [each.sha256 for each in bundles] == before
    for bundle, compared in zip(bundles, (False, True), strict=True):
        (found,) = bundle.card.measured  # the second time in place of the first
        assert (found.task, found.questions, found.bundle) == ("choices", 3, bundle.sha256)
        assert [each.metric for each in found.figures] == ["acc", "acc_norm"]
        assert found.figures[0].value == pytest.approx(2 / 3)
        assert found.reference == (before[0] if compared else None)
        assert len(found.differences) == (2 if compared else 0)
    about = describe(bundles[1], {})
    today = bundles[1].card.measured[0].date
    told = "acc 0.6667 (+0.0000 to first), acc_norm"
    assert about["measured"].startswith(f"choices, 3 questions, {today}: {told}")
    assert about["identity"] == before[1]

    async def listed() -> list[Any]:
        config = load_config({"model": [f"m={second}"], "threads": 1})
        async with Application.start(config) as application:
            messages = [each async for each in application.stream("GET", "/models", b"")]
            content: list[Any] = json.loads(b"".join(each.get("body", b"") for each in messages))
            return content

    for item in asyncio.run(listed()):
        assert item["bundle"] == load_bundles("m", second)[item["mask"] == "full"].sha256
        assert len(item["card"]) == (item["mask"] == "causal")

    # What was measured before the manifest changed is of another bundle.
    (second / "maskdial.json").write_text(json.dumps(manifest, indent=1))
    assert load_bundle("x", second).card.measured == ()
    (second / CARD).write_text("[]")
    assert load_bundle("x", second).card.measured == ()
    assert "is no quality card of this version" in caplog.text
    capsys.readouterr()
    assert cli.main(run) == 1
    assert "is no quality card" in capsys.readouterr().err
    (second / CARD).write_bytes(b" " * 2_000_000)
    with pytest.raises(ConfigError, match="more than 1,048,576 bytes"):
        read_card(second)
    (second / CARD).unlink()
    (second / CARD).mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_card(second)


def test_an_infinite_perplexity_is_shown_and_kept(tmp_path: Path) -> None:
    outcomes = [Outcome({"word_perplexity": -2000.0}, {"word_perplexity": 1.0})] * 3
    score = figure("word_perplexity", outcomes)
    apart = difference("word_perplexity", outcomes, outcomes)
    assert score.value == math.inf
    assert math.isnan(apart.value)
    measured = Measured(
        **dict.fromkeys(("task", "task_sha256", "date", "numerics", "bundle"), "x"),
        questions=3,
        figures=(score,),
        differences=(apart,),
    )
    add_to_card(tmp_path, [measured])
    add_to_card(tmp_path, [measured.model_copy(update={"task": "y"})])
    assert [each.figures for each in read_card(tmp_path).measured] == [(score,)] * 2


@pytest.mark.parametrize(
    ("changed", "lines", "told"),
    [
        ({"num_fewshot": 5}, QUESTIONS, "num_fewshot needs fewshot_split"),
        ({"num_fewshot": 1, "fewshot_split": "dev"}, QUESTIONS, "a split names none of test: dev"),
        (
            {"num_fewshot": 3, "fewshot_split": "test"},
            QUESTIONS,
            "question 1 cannot be made: there are 2 examples, fewer than num_fewshot",
        ),
        ({"num_fewshot": 1, "fewshot_config": {"sampler": "own"}}, QUESTIONS, "sampler"),
        ({"filter_list": []}, QUESTIONS, "filter_list is for generate_until"),
        ({"filter_list": [{"name": "x", "filter": [{"function": "y"}]}]}, QUESTIONS, "'y'"),
        ({"repeats": 2}, QUESTIONS, "repeats"),
        ({"doc_to_pair": "q"}, QUESTIONS, "doc_to_pair is for classification and similarity"),
        ({"output_type": "similarity", "metric_list": None}, QUESTIONS, "needs doc_to_pair"),
        ({"process_docs": "x"}, QUESTIONS, "process_docs: Extra inputs are not permitted"),
        ({"dataset_path": "hellaswag"}, QUESTIONS, "dataset_path"),
        ({"metric_list": [{"metric": "f1"}]}, QUESTIONS, "metric 'f1' is not one of"),
        ({"doc_to_choice": None}, QUESTIONS, "multiple_choice needs doc_to_choice"),
        ({"test_split": "train"}, QUESTIONS, "a split names none of test: train"),
        ({"doc_to_text": "{{nothing}}"}, QUESTIONS, "question 1 cannot be made: 'nothing' is"),
        ({"doc_to_text": "{{q.__class__}}"}, QUESTIONS, "question 1 cannot be made"),
        ({"doc_to_choice": "{{gold}}"}, QUESTIONS, "gives no list of texts"),
        ({"doc_to_target": "{{q}}"}, QUESTIONS, "question 1 cannot be made"),
        ({}, [{**QUESTIONS[0], "gold": 7}], "the target 7 is none of its 2 choices"),
        ({"doc_to_target": "choices"}, QUESTIONS, "gives several answers, and one is compared"),
        ({}, [], "its data has no lines"),
        ({"generation_kwargs": {"temperature": 0.7}}, QUESTIONS, "generation_kwargs.temperature"),
    ],
)
def test_faults_of_a_task(
    tmp_path: Path, changed: dict[str, Any], lines: list[dict[str, Any]], told: str
) -> None:
    path = write(tmp_path, {**CHOICES, **changed}, lines)
    with pytest.raises(ConfigError) as caught:
        read_task(path)
    assert told in caught.value.message


def written(tmp_path: Path, **changes: Any) -> EvalTask:
    """A task of texts to be written, whose examples are those of another file."""
    train = [{"q": f"Q{i}", "a": str(i)} for i in range(6)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, train)) + "\n")
    files = {"train": "train.jsonl", "test": "data.jsonl"}
    task = {
        "task": "t",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}} =",
        "doc_to_target": "{{a}}",
        **changes,
    }
    return read_task(write(tmp_path, task, [{"q": "x", "a": "1"}, {"q": "y", "a": "2"}]))


def test_examples_are_those_of_the_harness(tmp_path: Path) -> None:
    """What lm_eval 0.4.13 put before each question of the same files."""
    shots = {"num_fewshot": 2, "fewshot_split": "train"}
    task = written(tmp_path, **shots, description="Sums.\n")
    assert [item.context for item in task.items] == [
        "Sums.\nQ3 = 3\n\nQ0 = 0\n\nx =",
        "Sums.\nQ0 = 0\n\nQ5 = 5\n\ny =",
    ]
    assert task.until == ("\n\n",)  # of a task that does not say
    in_order = {"fewshot_config": {"sampler": "first_n"}, "target_delimiter": ""}
    task = written(tmp_path, **shots, **in_order, fewshot_delimiter="\n")
    assert [item.context for item in task.items] == ["Q0 =0\nQ1 =1\nx =", "Q0 =0\nQ1 =1\ny ="]
    samples = {"samples": [{"q": "a", "a": "1"}, {"q": "b", "a": ""}]}
    task = written(tmp_path, num_fewshot=2, fewshot_config={**samples, "sampler": "first_n"})
    assert task.items[0].context == "a = 1\n\nb =x ="
    task = written(tmp_path, num_fewshot=1, fewshot_split="test")
    assert [item.context for item in task.items] == ["y = 2\n\nx =", "x = 1\n\ny ="]


@pytest.mark.parametrize(
    ("steps", "text", "found"),
    [
        ([{"function": "regex"}], "so #### 1,234.5 and", "1,234.5"),
        ([{"function": "regex"}], "none", "[invalid]"),
        ([{"function": "regex", "regex_pattern": "\\d+", "fallback": "-"}], "a", "-"),
        ([{"function": "regex", "regex_pattern": "\\d+", "group_select": -1}], "1 22 3", "3"),
        ([{"function": "regex", "regex_pattern": "\\d", "group_select": 2}], "1 2", "[invalid]"),
        ([{"function": "regex", "regex_pattern": "(a)|( b )"}], "x b ", "b"),
        ([{"function": "regex", "regex_pattern": "(a*)(b*)x"}], "x", "[invalid]"),
        ([{"function": "remove_whitespace"}, {"function": "take_first"}], " a b\n", "a b"),
        ([{"function": "regex", "regex_pattern": "#.*"}, {"function": "regex"}], "a #### 5", "5"),
    ],
)
def test_filters(steps: list[Any], text: str, found: str) -> None:
    """Expected values are what lm_eval 0.4.13's filters return."""
    assert Filter.model_validate({"name": "f", "filter": steps}).apply(text) == found


@pytest.mark.parametrize(
    ("ways", "equal"),
    [
        ({}, False),
        ({"ignore_case": True}, False),
        ({"ignore_case": True, "ignore_punctuation": True}, False),
        ({"ignore_case": True, "ignore_punctuation": True, "ignore_numbers": True}, True),
        ({"regexes_to_ignore": ["[.!]", "[0-9]", "^H", "^h"]}, True),
    ],
)
def test_what_is_ignored_when_texts_are_compared(ways: dict[str, Any], equal: bool) -> None:
    assert ExactMatch(**ways).matches("Hello. 1", "hello! 2") == equal


def test_each_filter_has_a_score(tmp_path: Path) -> None:
    with Model(HYBRID) as model:
        ids = model.model.writer.tokenizer.encode("x =", add_special_tokens=False).ids
        (text,) = model.generate([ids], max_new_tokens=8, do_sample=False)
    word = text.text.split()[0]
    filters = [
        {"name": name, "filter": [{"function": "regex", "regex_pattern": pattern}]}
        for name, pattern in (("word", r"\S+"), ("number", r"\d+"))
    ]
    task = written(
        tmp_path,
        doc_to_target=word.upper(),
        generation_kwargs={"until": [], "max_gen_toks": 8},
        metric_list=[{"metric": "exact_match", "ignore_case": True}],
        filter_list=filters,
    )
    assert task.metrics == ("exact_match,word", "exact_match,number")
    first, _ = asyncio.run(outcomes(task))
    assert first.values == {"exact_match,word": 1.0, "exact_match,number": 0.0}


def test_labels_and_vectors_are_scored_as_elsewhere(tmp_path: Path) -> None:
    """Against scikit-learn and scipy, on the starter's labels and a tiny model's vectors."""
    sklearn = pytest.importorskip("sklearn.metrics")
    scipy = pytest.importorskip("scipy.stats")
    texts = [
        "A fine film.",
        "Dull.",
        "I liked it",
        "no",
        "Not bad at all",
        "the worst",
        "ok",
        "???",
    ]
    gold = ["POSITIVE", "NEGATIVE", "1", "NEGATIVE", "POSITIVE", "NEGATIVE", "POSITIVE", "0"]
    common = {k: CHOICES[k] for k in ("task", "dataset_path", "dataset_kwargs", "test_split")}
    labelled = {**common, "output_type": "classification", "doc_to_text": "q", "doc_to_target": "a"}
    lines = [{"q": text, "a": label} for text, label in zip(texts, gold, strict=True)]
    task = read_task(write(tmp_path, labelled, lines))
    sentiment = STARTER_FOLDER / "sentiment"
    with Model(sentiment) as model:
        names = model.model.pick(task_of(ClassifyRequest)).manifest.labels
        found = [row[0].label for row in model.classify(texts)]
    right = [names[int(label)] if label.isdecimal() else label for label in gold]

    async def read(bundle: Path, task: EvalTask) -> list[Outcome]:
        async with await AsyncModel.load(bundle) as model:
            return await Reader(model, task.kind).outcomes(task)

    results = asyncio.run(read(sentiment, task))
    accuracy = sklearn.accuracy_score(right, found)
    assert figure("acc", results).value == pytest.approx(accuracy)
    f1 = sklearn.f1_score(right, found, average="macro")
    assert figure("f1_macro", results).value == pytest.approx(f1)
    assert figure("f1_macro", results).error is None
    assert difference("f1_macro", results, results).value == 0.0

    def cosine(one: Any, other: Any) -> float:
        return float(one @ other / np.sqrt((one @ one) * (other @ other)))

    embedder = make_embedder(tmp_path / "embedder")
    pairs: dict[str, Any] = {
        **common,
        "output_type": "similarity",
        "doc_to_text": "q",
        "doc_to_pair": "p",
    }
    scores = [3.0, 1.5, 1.5, 0, 5.0, 2.25, 4.0, 0.5]
    rows: list[dict[str, Any]] = [
        {"q": text, "p": other, "a": score}
        for text, other, score in zip(texts, reversed(texts), scores, strict=True)
    ]
    task = read_task(write(tmp_path, {**pairs, "doc_to_target": "{{a}}"}, rows))
    results = asyncio.run(read(embedder, task))
    with Model(embedder) as model:
        cosines = [
            cosine(*model.embed([text, other]).astype(np.float64))
            for text, other in zip(texts, reversed(texts), strict=True)
        ]
    assert [each.values["spearman"] for each in results] == pytest.approx(cosines)
    exact = [each.values["spearman"] for each in results]
    ranks = scipy.spearmanr(exact, scores).statistic
    assert figure("pearson", results).value == pytest.approx(
        scipy.pearsonr(cosines, scores).statistic
    )
    assert figure("spearman", results).value == pytest.approx(ranks)

    for bundle, wrong, told in (
        (sentiment, task, "sentiment, tasks of similarity: "),
        (HYBRID, read_task(write(tmp_path, labelled, lines)), "hybrid, tasks of classification: "),
        (sentiment, read_task(write(tmp_path, labelled, [{"q": "x", "a": "so"}])), "no label 'so'"),
    ):
        with pytest.raises(ConfigError, match=told):
            asyncio.run(read(bundle, wrong))


@pytest.mark.parametrize("seed", range(5))
def test_scores_of_pairs(seed: int) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    scipy = pytest.importorskip("scipy.stats")
    random = np.random.Generator(np.random.PCG64(seed))
    one, other = random.integers(0, 6, (2, 50)).astype(np.float64)
    assert macro_f1(one, other) == pytest.approx(sklearn.f1_score(other, one, average="macro"))
    assert spearman(one, other) == pytest.approx(scipy.spearmanr(one, other).statistic)
    assert pearson(one, other) == pytest.approx(scipy.pearsonr(one, other).statistic)
    assert spearman(one, np.ones(50)) == 0.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "is no YAML"),
        ("[]", "the file: "),
        ("tags: !!python/object:os.system {}", "is no YAML"),
    ],
)
def test_faults_of_the_file(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_task(path)
    assert told in caught.value.message
    with pytest.raises(ConfigError, match="cannot be read"):
        read_task(tmp_path / "none.yaml")
