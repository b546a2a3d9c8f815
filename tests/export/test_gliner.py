"""GLiNER checkpoints over HTTP against gliner's own predictions; and `/redact` with them."""

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, pre_tokenizers, processors

from maskdial.bundle.bundle import load_bundle
from maskdial.errors import BundleError
from maskdial_export.checkpoint.source import find
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.model import load_checkpoint
from maskdial_export.quantize.gate import Gate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import gliner

TOLERANCE = 1e-5
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
DEBERTA = {
    "relative_attention": True,
    "position_buckets": 8,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "max_position_embeddings": 32,
    "num_hidden_layers": 2,
}
MODERN = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
# The settings of gliner_config.json, and those of the encoder
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "span": (
        {"hidden_size": 12, "num_rnn_layers": 1, "max_len": 24},
        {"model_type": "bert"},
    ),
    "deberta": ({"max_len": 100}, {"model_type": "deberta-v2", **DEBERTA}),
    "token": (
        {"span_mode": "token_level", "embed_ent_token": False, "subtoken_pooling": "last"},
        {"model_type": "modernbert", "local_attention": 8, **MODERN},
    ),
    # Labels have an encoder of their own
    "two": (
        {"max_len": 24, "labels_encoder_config": SHAPE | {"model_type": "bert", "hidden_size": 8}},
        {"model_type": "bert"},
    ),
}
TEXTS = [
    "Alice took the train from Paris to Rome.",
    "Élodie 😀 sang\nin Rome,\r\n\n e-mail me: a_b-c 👩!",
    "Bob",
    "x" * 30 + " paris alice",
    "the quick brown fox jumps over the lazy dog, said alice in paris.",
]
LABELS = [["person", "city"], ["date of birth"], ["a", "b", "c", "d", "e, f", "person"]]


def make_tokenizer(folder: Path) -> int:
    """Saves a WordPiece tokenizer of letters; returns its size."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,'?!-"
    pieces = [*letters, *(f"##{each}" for each in letters), "alice", "paris", "##ing", "person"]
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    vocab = {token: index for index, token in enumerate((*special, *pieces))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    backend.add_special_tokens(list(special))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)
    return len(vocab)


def make(folder: Path, settings: dict[str, Any], encoder: dict[str, Any]) -> Any:
    """Saves a checkpoint with random weights, as gliner does; returns gliner's model."""
    size = make_tokenizer(folder / "tokenizer")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"max_width": 4, "hidden_size": 16, "num_rnn_layers": 0}
    if "labels_encoder_config" in settings:
        shape["labels_encoder"] = str(folder / "tokenizer")
    config = gliner.GLiNERConfig(
        model_name=str(folder / "tokenizer"),
        encoder_config=SHAPE | {"vocab_size": size + 3} | encoder,
        **(shape | settings),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = gliner.GLiNER.from_config(config, backbone_from_pretrained=False).eval()
        with torch.no_grad():
            for parameter in model.model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder / "checkpoint", safe_serialization=True)
    return model


def predict(model: Any, text: str, labels: list[str], **settings: Any) -> list[dict[str, Any]]:
    """What gliner finds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a loader without workers
        found: list[dict[str, Any]] = model.predict_entities(text, labels, **settings)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gliner")


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Any]:
    """gliner's models by name; their checkpoints are in ``folder``."""
    return {name: make(folder / name, *settings) for name, settings in KINDS.items()}


@pytest.fixture(scope="module")
def url(
    references: dict[str, Any],
    folder: Path,
    start_server: Callable[..., Any],
    bundle: Callable[[str], Path],
) -> Iterator[str]:
    bundles = {"tagger": bundle("bert-token-classify"), "filter": bundle("privacy-filter")}
    for name in references:
        bundles[name] = folder / name / "fp32"
        export(str(folder / name / "checkpoint"), bundles[name])
    bundles["int8"] = folder / "int8"
    # Labels of random weights are close to each other
    gate = Gate(max_loss=0.1)
    export(str(folder / "span" / "checkpoint"), bundles["int8"], precision="int8", gate=gate)
    running = start_server(models=bundles, max_batch_inputs=64)
    yield running.url
    running.stop()


def ask(url: str, path: str, inputs: object, **parameters: object) -> Any:
    model = parameters.pop("model", None)
    body = {"model": model, "inputs": inputs, "parameters": parameters}
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(url: str, path: str, inputs: object, **parameters: object) -> str:
    body = {"model": parameters.pop("model", "span"), "inputs": inputs, "parameters": parameters}
    reply = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert reply.status_code == 422, reply.text
    return str(reply.json()["error"])


def spans(entities: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Entities of gliner or of ours without their scores."""
    return [
        (
            each["start"],
            each["end"],
            each.get("text", each.get("word")),
            each.get("label", each.get("entity_group")),
        )
        for each in entities
    ]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("labels", LABELS, ids=len)
def test_entities_are_those_of_gliner(
    url: str, references: dict[str, Any], name: str, labels: list[str]
) -> None:
    number = 0
    for threshold in (0.0, 0.4, 1.0):
        for flat in (True, False):
            for multi_label in (True, False):
                settings: dict[str, Any] = {"threshold": threshold, "multi_label": multi_label}
                settings["flat_ner"] = flat
                answers = ask(
                    url, "/token-classify", TEXTS, model=name, candidate_labels=labels, **settings
                )
                for text, answer in zip(TEXTS, answers, strict=True):
                    expected = predict(references[name], text, labels, **settings)
                    assert spans(answer) == spans(expected)
                    scores = [each["score"] for each in expected]
                    assert [each["score"] for each in answer] == pytest.approx(
                        scores, abs=TOLERANCE
                    )
                    number += len(expected)
    assert number > 50
    # Nothing exceeds 1
    assert answers == [[] for _ in TEXTS]


def test_words_without_tokens_shift_no_others(url: str, references: dict[str, Any]) -> None:
    """gliner takes the vectors of the words after one that its tokenizer drops for each other's."""
    text, settings = "Alice \u200b sang in Rome.", {"threshold": 0.0, "multi_label": True}
    answer = ask(url, "/token-classify", text, model="span", candidate_labels=["a"], **settings)
    expected = predict(references["span"], text.replace("\u200b", ""), ["a"], **settings)
    places = [(each["start"], each["end"]) for each in answer]
    assert places == [
        tuple(at + (at > 6) for at in (each["start"], each["end"])) for each in expected
    ]


def test_texts_as_long_as_gliner_reads_need_one_window(url: str, references: Any) -> None:
    # More tokens than the encoder has positions: DeBERTa's are relative
    text = " ".join(random.Random(0).choices(["alice", "paris", "sang", "in"], k=100))
    settings: dict[str, Any] = {"threshold": 0.2}
    answer = ask(url, "/token-classify", text, model="deberta", candidate_labels=["a"], **settings)
    assert spans(answer) == spans(predict(references["deberta"], text, ["a"], **settings))
    assert answer


@pytest.mark.parametrize("name", ["span", "token"])
def test_longer_texts_are_read_in_windows(
    url: str, references: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each span has the score of a window, which is that of gliner for the window's text."""
    words = random.Random(1).choices(["alice", "paris", "sang", "in", "Rome", "x"], k=110)
    words = words[:50] if name == "span" else words * 2
    text = " ".join(words)
    labels = ["person", "city"]
    everything: dict[str, Any] = {"threshold": 0.0, "flat_ner": False, "multi_label": True}
    answer = ask(url, "/token-classify", text, model=name, candidate_labels=labels, **everything)
    assert max(each["end"] for each in answer) == len(text)
    assert {(each["start"], each["end"]) for each in answer} >= {
        (match, match + 5) for match in range(len(text)) if text.startswith("alice", match)
    }
    if name == "token":
        return
    # Windows have at most 24 words; gliner shall return all spans of one
    decoder = references[name].decoder
    monkeypatch.setattr(decoder, "greedy_search", lambda spans, *_, **__: spans)
    found: dict[tuple[Any, ...], list[float]] = {}
    for start in range(len(words)):
        first = len(" ".join(words[:start])) + (start > 0)
        part = " ".join(words[start : start + 24])
        for each in predict(references[name], part, labels, **everything):
            span = (first + each["start"], first + each["end"], each["label"])
            found.setdefault(span, []).append(each["score"])
    ours = {(each["start"], each["end"], each["entity_group"]): each["score"] for each in answer}
    assert len(ours) == len(answer) > 100
    for span, score in ours.items():
        assert min(abs(score - each) for each in found[span]) < TOLERANCE


@pytest.mark.parametrize("name", [*KINDS, "int8"])
def test_an_answer_is_the_same_in_company(url: str, name: str) -> None:
    requests = [(text, labels) for text in TEXTS for labels in LABELS]
    settings = {"threshold": 0.0, "flat_ner": False, "multi_label": True, "model": name}

    def one(request: tuple[str, list[str]]) -> Any:
        text, labels = request
        return ask(url, "/token-classify", text, candidate_labels=labels, **settings)

    alone = [one(request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        assert list(pool.map(one, requests)) == alone
    shared = ask(url, "/token-classify", TEXTS, candidate_labels=LABELS[0], **settings)
    assert shared == alone[:: len(LABELS)]


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({}, "model 'span' has no labels of its own; name those to find"),
        ({"candidate_labels": []}, "between 1 and 1024 labels"),
        ({"candidate_labels": ["a"] * 10_000}, "at most 1024 items, not 10000"),
        ({"candidate_labels": ["a", " "]}, "must not be empty"),
        ({"candidate_labels": ["a", "b", "a"]}, "candidate_labels: 'a' is there twice"),
        ({"candidate_labels": ["a", "<<ENT>> b"]}, "'<<ENT>> b' contains <<ENT>>"),
        ({"candidate_labels": ["a", "\u200b"]}, "candidate_labels: '\\u200b' has no tokens"),
        (
            {"candidate_labels": [f"l{n}" for n in range(40)]},
            "the 40 labels take 152 tokens, and the model reads at most 111 before a text",
        ),
        ({"candidate_labels": ["a"], "threshold": 1.5}, "between 0 and 1, not 1.5"),
        ({"candidate_labels": ["a"], "threshold": -0.1}, "between 0 and 1, not -0.1"),
        ({"candidate_labels": ["a"], "stride": 123}, "stride: must be less than 123"),
        ({"candidate_labels": ["a"], "ignore_labels": ["O"]}, "ignore_labels is for a model's own"),
        ({"flat_ner": False}, "flat_ner is for candidate_labels"),
        ({"model": "tagger", "candidate_labels": ["a"]}, "tags texts with labels of its own"),
    ],
)
def test_requests_that_do_not_fit(url: str, parameters: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(url, "/token-classify", "Alice sang.", **parameters)


@pytest.mark.parametrize("name", ["span", "two"])
def test_redaction_with_any_labels(url: str, name: str) -> None:
    labels = {"labels": ["person", "city"], "threshold": 0.3, "model": name}
    entities = ask(
        url, "/token-classify", TEXTS, model=name, candidate_labels=["person", "city"],
        threshold=0.3,
    )  # fmt: skip
    plain = ask(url, "/redact", TEXTS, **labels)
    full = ask(
        url, "/redact", TEXTS, return_original=True, replacement={"city": "<{label}>"}, **labels
    )
    masked = ask(url, "/redact", TEXTS, mask_character="é", **labels)
    assert sum(map(len, entities)) > 5
    for text, found, *answers in zip(TEXTS, entities, plain, full, masked, strict=True):
        for answer in answers:
            places = [
                (each["start"], each["end"], each["label"]) for each in answer["replacements"]
            ]
            assert places == [(e["start"], e["end"], e["entity_group"]) for e in found]
            check_redaction(text, answer)
        assert all("original" not in each for each in answers[0]["replacements"])
        for each, with_original in zip(found, answers[1]["replacements"], strict=True):
            assert with_original["original"] == each["word"]
            inside = answers[1]["text"][with_original["redacted_start"] :]
            city = each["entity_group"] == "city"
            assert inside.startswith("<city>" if city else "[person]")
        assert len(answers[2]["text"]) == len(text)


def check_redaction(text: str, answer: dict[str, Any]) -> None:
    """Outside the replacements, the redacted text is the text."""
    read = written = 0
    for each in [*answer["replacements"], None]:
        start, redacted = (None, None) if each is None else (each["start"], each["redacted_start"])
        assert text[read:start] == answer["text"][written:redacted]
        if each is not None:
            read, written = each["end"], each["redacted_end"]


@pytest.mark.parametrize("name", ["tagger", "filter"])
def test_redaction_with_a_model_s_own_labels(url: str, name: str) -> None:
    text = "alice took the train, from paris to rome."
    entities = ask(url, "/token-classify", text, model=name)
    answer = ask(url, "/redact", text, model=name)
    found = {(each["start"], each["end"]) for each in entities}
    assert {(each["start"], each["end"]) for each in answer["replacements"]} == found != set()
    check_redaction(text, answer)
    label = entities[0]["entity_group"]
    some = ask(url, "/redact", text, model=name, labels=[label], replacement="")
    assert {each["label"] for each in some["replacements"]} == {label}
    assert ask(url, "/redact", text, model=name, threshold=1)["text"] == text
    sentence = refusal(url, "/redact", text, model=name, labels=["planet"])
    assert sentence.startswith(
        f"parameters.labels: 'planet' is none of the labels of model '{name}'"
    )


def test_labels_with_an_encoder_of_their_own(url: str, folder: Path) -> None:
    """They take no room of the text, and are read once."""

    def num_read() -> int:
        series = 'maskdial_prompt_tokens_total{model="two:labels"}'
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        return next(int(float(line.split()[1])) for line in lines if line.startswith(series))

    labels = [f"label {n}" for n in range(100)]
    before = num_read()
    first = ask(url, "/token-classify", TEXTS, model="two", candidate_labels=labels)
    after = num_read()
    assert after - before > 300
    assert ask(url, "/token-classify", TEXTS, model="two", candidate_labels=labels) == first
    assert num_read() == after
    long = {"model": "two", "candidate_labels": ["a", "a " * 127]}
    sentence = refusal(url, "/token-classify", "Alice sang.", **long)
    assert "has 129 tokens, and the model reads at most 128 of a label; shorten it" in sentence
    sentence = refusal(url, "/redact", "Alice sang.", model="two", labels=["a " * 127])
    assert sentence.startswith("parameters.labels: 'a a a")
    copy = folder / "damaged"
    shutil.copytree(folder / "two" / "fp32", copy)
    (copy / "labels" / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"labels/tokenizer\.json has changed since"):
        load_bundle("two", copy)


def test_redactions_that_do_not_fit(url: str) -> None:
    both = {"replacement": "x", "mask_character": "*", "labels": ["a"]}
    assert "exclude each other" in refusal(url, "/redact", "a", **both)
    assert refusal(url, "/redact", "a") == (
        "parameters.labels: model 'span' has no labels of its own; name those to redact"
    )
    sentence = refusal(url, "/redact", "a", labels=["a"], replacement={"b": "c"})
    assert sentence == "parameters.replacement: 'b' is none of the labels to redact"
    assert "parameters.labels: 'a' is there twice" in refusal(
        url, "/redact", "a", labels=["a", "a"]
    )


def test_an_encoder_s_own_tokenizer_and_configuration_are_found(
    references: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Older checkpoints have neither, but the name of their encoder."""
    source = folder / "span" / "checkpoint"
    (tmp_path / "pytorch_model.safetensors").symlink_to(source / "model.safetensors")
    config = json.loads((source / "gliner_config.json").read_text())
    encoder = tmp_path / "encoder"
    make_tokenizer(encoder)
    (encoder / "config.json").write_text(json.dumps(config.pop("encoder_config")))
    config |= {"model_name": str(encoder), "class_token_index": -1, "vocab_size": -1}
    (tmp_path / "gliner_config.json").write_text(json.dumps(config))
    old, new = (
        load_checkpoint(find(str(each), "auto", revision=None, allow_pickle=False))
        for each in (tmp_path, source)
    )
    assert old.entities == new.entities
    assert old.tokenizer.to_str() == new.tokenizer.to_str()
    weights = new.model.state_dict()
    assert all(bool((each == weights[n]).all()) for n, each in old.model.state_dict().items())
    assert weights.keys() == old.model.state_dict().keys()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"words_splitter_type": "spacy"}, "has words_splitter_type 'spacy'"),
        ({"span_mode": "conv_max"}, "has span_mode 'conv_max'"),
        ({"labels_encoder": "bert", "post_fusion_schema": "l2l"}, "has post_fusion_schema 'l2l'"),
        ({"labels_encoder": "bert", "span_mode": "token_level"}, "if they score spans"),
        ({"class_token_index": 3}, "has the class_token_index 3"),
        ({"span_mode": "token_level"}, "lacks the weight scorer.proj_token.weight"),
        ({"encoder_config": {"model_type": "bart-9"}}, "has no model type 'bart-9'"),
    ],
)
def test_checkpoints_that_are_not_supported(
    references: dict[str, Any], folder: Path, tmp_path: Path, change: Any, sentence: str
) -> None:
    source = folder / "deberta" / "checkpoint"
    copy = tmp_path / "checkpoint"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).symlink_to(file)
    config = json.loads((source / "gliner_config.json").read_text()) | change
    (copy / "gliner_config.json").unlink()
    (copy / "gliner_config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=sentence):
        export(str(copy), tmp_path / "bundle")
