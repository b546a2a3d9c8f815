"""GLiNER2 checkpoints over HTTP against gliner2's own results."""

import json
import random
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from maskdial_export.checkpoint.sample import read_sample
from maskdial_export.checkpoint.source import find
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.model import load_checkpoint
from maskdial_export.session import Loaded
from tests.export.test_gliner import SHAPE, ask, check_redaction, make_tokenizer, refusal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from gliner2 import Schema
    from gliner2.configuration import ExtractorConfig
    from gliner2.inference.engine import SpanExtractor

TOLERANCE = 1e-5
TEXTS = [
    "Alice took the train from Paris to Rome.",
    "Élodie 😀 sang\nin Rome,\r\n\n e-mail me@x.org: a_b-c 👩!",
    "https://x.org/a?b=c is @alice's, nai\u0308ve and İn paris?",
    "Bob.",
]
TRIP = {
    "fields": [
        {"name": "who", "dtype": "str", "description": "a traveler"},
        {"name": "where", "threshold": 0.2},
        {"name": "by", "choices": ["train", "car Ride", "("], "dtype": "str"},
        {"name": "how", "choices": ["fast", "train"], "threshold": 0.01},
    ]
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "entities": {"entities": ["person", "city", "Date of Birth"]},
    "described": {
        "entities": {"person": "a human", "city": {"dtype": "str", "threshold": 0.1}, "e, f": ""}
    },
    "structures": {"structures": {"trip": TRIP, "note": {"fields": [{"name": "topic"}]}}},
    "relations": {"relations": ["lives in", "knows"]},
    "labels": {
        "classifications": [
            {"task": "tone", "labels": ["good", "bad"], "prompt": "how it sounds"},
            {
                "task": "topics",
                "labels": {"a": "letters", "b": "more of it", "c": "x"},
                "multi_label": True,
                "cls_threshold": 0.4,
                "examples": [["oh a", "a"], ["none", "z"]],
            },
            {"task": "best", "labels": ["x", "y", "z"], "multi_label": True, "top_k": 2},
            {"task": "each", "labels": ["x", "y"], "class_act": "sigmoid"},
        ]
    },
}
SCHEMAS["all"] = {name: each for one in SCHEMAS.values() for name, each in one.items()}
# As the library writes what is asked for with no description
SCHEMAS["described"]["entities"]["e, f"] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gliner2")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return make_reference(folder, "count_lstm_v2")


def make_reference(folder: Path, counting_layer: str) -> Any:
    """gliner2's model; its checkpoint is in ``folder``."""
    size = make_tokenizer(folder / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    config = ExtractorConfig(
        model_name=str(folder / "tokenizer"), max_width=4, counting_layer=counting_layer
    )
    shape = SHAPE | {"vocab_size": size, "max_position_embeddings": 512}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = SpanExtractor(
            config, encoder_config=CONFIG_MAPPING["bert"](**shape), tokenizer=tokenizer
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder / "checkpoint")
    return model


@pytest.fixture(scope="module")
def url(reference: Any, folder: Path, start_server: Callable[..., Any]) -> Iterator[str]:
    export(str(folder / "checkpoint"), folder / "bundle")
    running = start_server(models={"span": folder / "bundle"}, max_batch_inputs=64)
    yield running.url
    running.stop()


def check(expected: Any, found: Any, where: str = "") -> None:
    """Both have the same form, and numbers that are nearly the same."""
    if isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert expected.keys() == found.keys(), where
        for name in expected:
            check(expected[name], found[name], f"{where}.{name}")
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list), where
        assert len(expected) == len(found), where
        for index, pair in enumerate(zip(expected, found, strict=True)):
            check(*pair, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=TOLERANCE), where
    else:
        assert expected == found, where


def expect(reference: Any, text: str, schema: dict[str, Any], **settings: Any) -> Any:
    """What gliner2 finds; records of which there is none are a list, too."""
    found = reference.extract(text, Schema.from_dict(schema), **settings)
    for name in schema.get("structures", {}):
        found[name] = found.get(name) or []
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_found_is_what_gliner2_finds(url: str, reference: Any, name: str) -> None:
    number = 0
    for threshold, scores, spans in (
        (0.0, True, True),
        (0.0, False, False),
        (0.3, True, False),
        (0.5, False, True),
        (0.9, True, True),
    ):
        settings = {"include_confidence": scores, "include_spans": spans, "threshold": threshold}
        answers = ask(url, "/extract", TEXTS, schema=SCHEMAS[name], **settings)
        for text, answer in zip(TEXTS, answers, strict=True):
            check(expect(reference, text, SCHEMAS[name], **settings), answer)
            number += json.dumps(answer).count("confidence")
    assert number > 15


def test_offsets_are_those_of_the_text(url: str, reference: Any) -> None:
    """gliner2 adds a full stop to a text without a sign at its end, and may find it."""
    schema = {"entities": ["person", "city"]}
    settings = {"include_spans": True, "threshold": 0.0}
    text = "Alice sang in Paris https://x.org/a"
    (found,) = ask(url, "/extract", [text], schema=schema, **settings)
    for values in found["entities"].values():
        assert {each["end"] for each in values} >= {len(text)}
        assert all(text[each["start"] : each["end"]] == each["text"] != "." for each in values)
    # What does not reach the end of the text is the same
    theirs = expect(reference, text, schema, **settings)["entities"]
    assert any(each["end"] > len(text) for values in theirs.values() for each in values)


@pytest.mark.parametrize("multi_label", [True, False])
def test_labels_of_the_request(url: str, reference: Any, multi_label: bool) -> None:
    labels = ["farming", "a b", "music"]
    task = {"labels": labels, "multi_label": multi_label, "cls_threshold": 0.0}
    answers = ask(
        url, "/zero-shot-classify", TEXTS, candidate_labels=labels, multi_label=multi_label
    )
    for text, answer in zip(TEXTS, answers, strict=True):
        found = reference.classify_text(text, {"classification": task}, include_confidence=True)
        expected = found["classification"]
        if multi_label:
            expected = sorted(expected, key=lambda each: -each["confidence"])
        else:
            expected, answer = [expected], answer[:1]
        assert [each["label"] for each in answer] == [each["label"] for each in expected]
        scores = [each["confidence"] for each in expected]
        assert [each["score"] for each in answer] == pytest.approx(scores, abs=TOLERANCE)


def test_entities_of_one_label(url: str, reference: Any) -> None:
    for text in TEXTS:
        answer = ask(url, "/token-classify", text, candidate_labels=["person"], threshold=0.01)
        found = reference.extract_entities(
            text, ["person"], include_confidence=True, include_spans=True, threshold=0.01
        )
        expected = sorted(found["entities"]["person"], key=lambda each: each["start"])
        assert [(each["start"], each["end"], each["word"]) for each in answer] == [
            (each["start"], each["end"], each["text"]) for each in expected
        ]
        scores = [each["confidence"] for each in expected]
        assert [each["score"] for each in answer] == pytest.approx(scores, abs=TOLERANCE)


def test_entities_of_long_texts_and_their_redaction(url: str) -> None:
    text = " ".join(["alice", "paris", "sang", "in", "Rome,", "x"] * 60)
    labels = ["person", "city"]
    answer = ask(url, "/token-classify", text, candidate_labels=labels, threshold=0.01)
    assert answer[0]["start"] < 12
    assert answer[-1]["end"] > len(text) - 12
    ends = [each["end"] for each in answer]
    assert all(start["start"] >= end for start, end in zip(answer[1:], ends, strict=False))
    redacted = ask(url, "/redact", text, labels=labels, threshold=0.01)
    assert [(each["start"], each["end"]) for each in redacted["replacements"]] == [
        (each["start"], each["end"]) for each in answer
    ]
    check_redaction(text, redacted)


def test_an_answer_is_the_same_in_company(url: str) -> None:
    settings = {"threshold": 0.0, "include_confidence": True, "include_spans": True}
    requests = [(text, schema) for text in TEXTS for schema in SCHEMAS.values()]

    def one(request: tuple[str, Any]) -> Any:
        return ask(url, "/extract", request[0], schema=request[1], **settings)

    alone = [one(request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(one, requests)) == alone
    shared = ask(url, "/extract", TEXTS, schema=SCHEMAS["all"], **settings)
    assert shared == alone[len(SCHEMAS) - 1 :: len(SCHEMAS)]


@pytest.mark.parametrize(
    ("path", "parameters", "sentence"),
    [
        ("/extract", {"schema": {"entities": ["[E] a"]}}, "schema: '[E] a' contains [E], which"),
        (
            "/extract",
            {"schema": {"entities": [f"label {n}" for n in range(60)]}},
            "schema: the schema takes 484 tokens, and the model reads at most 448 before a text",
        ),
        (
            "/extract",
            {"schema": {"structures": {"a": {"fields": [{"name": "b", "choices": ["\u200b"]}]}}}},
            "schema: a choice has no tokens",
        ),
        ("/zero-shot-classify", {"candidate_labels": ["a", "a"]}, "'a' is there twice"),
        ("/zero-shot-classify", {"candidate_labels": ["[L]"]}, "candidate_labels: '[L]' contains"),
        (
            "/zero-shot-classify",
            {"candidate_labels": ["a", "b"], "hypothesis_template": "It is {}."},
            "reads the labels as they are; leave it out",
        ),
        ("/token-classify", {"candidate_labels": ["[P]"]}, "candidate_labels: '[P]' contains [P]"),
        ("/token-classify", {}, "model 'span' has no labels of its own; name those to find"),
        ("/redact", {"labels": ["[P]"]}, "labels: '[P]' contains [P]"),
    ],
)
def test_requests_that_do_not_fit(
    url: str, path: str, parameters: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(url, path, "Alice sang.", **parameters)


@pytest.mark.parametrize("direction", ["left", "right"])
def test_texts_that_are_too_long(url: str, reference: Any, direction: str) -> None:
    words = random.Random(0).choices([*"abcdefghijklmnop", "alice", "paris", "person"], k=700)
    task = {"task": "a", "labels": ["b", "c"], "multi_label": True, "cls_threshold": 0}
    schema: dict[str, Any] = {"classifications": [task]}
    text = " ".join(words) + "."
    sentence = refusal(url, "/extract", text, schema=schema)
    assert "701 tokens; the schema leaves room for 501 of the 512 that model 'span'" in sentence
    parameters = {"truncate": True, "truncation_direction": direction, "include_confidence": True}
    body = {"inputs": text, "parameters": {"schema": schema, **parameters}}
    reply = httpx.post(f"{url}/extract", json=body, timeout=60)
    assert reply.headers["x-truncated-tokens"] == "200"
    cut = " ".join(words[:501]) if direction == "right" else " ".join(words[200:]) + "."
    found = reference.extract(cut, Schema.from_dict(schema), include_confidence=True, max_len=501)
    check(found, reply.json())


@pytest.mark.parametrize("layer", ["count_lstm", "count_lstm_moe"])
def test_other_counting_layers(
    layer: str, tmp_path: Path, start_server: Callable[..., Any]
) -> None:
    """Their scores are saturated in this model, so most of what is kept depends on ties at 1."""
    reference = make_reference(tmp_path, layer)
    export(str(tmp_path / "checkpoint"), tmp_path / "bundle")
    running = start_server(models={layer: tmp_path / "bundle"})
    settings = {"include_confidence": True, "include_spans": True, "threshold": 0.3}
    try:
        answers = ask(running.url, "/extract", TEXTS, schema=SCHEMAS["all"], **settings)
    finally:
        running.stop()
    for text, answer in zip(TEXTS, answers, strict=True):
        check(expect(reference, text, SCHEMAS["all"], **settings), answer)
    assert json.dumps(answers).count("confidence") > 15


def test_the_evaluation_of_a_precision_compares_words(url: str, folder: Path) -> None:
    source = find(str(folder / "checkpoint"), "auto", revision=None, allow_pickle=False)
    evaluation = load_checkpoint(source).evaluation(read_sample(None))
    answers = evaluation.answers(Loaded(folder / "bundle" / "model.onnx"))
    best = answers[:, 0]
    assert set(best.tolist()) <= set(range(8))
    assert len(set(best.tolist())) > 2
    assert len(best) > 300


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"architecture": "bounds"}, "has architecture 'bounds' in config.json"),
        ({"token_pooling": "mean"}, "has token_pooling 'mean'"),
        ({"counting_layer": "count_gru"}, "has counting_layer 'count_gru'"),
        ({"counting_layer": "count_lstm"}, "lacks the weight count_embed.projector.0.weight"),
    ],
)
def test_checkpoints_that_are_not_supported(
    reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in (folder / "checkpoint").iterdir():
        (copy / file.name).symlink_to(file)
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=sentence):
        export(str(copy), tmp_path / "bundle")
