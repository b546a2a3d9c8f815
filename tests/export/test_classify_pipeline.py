"""`/classify`, `/zero-shot-classify` and `/rerank` against transformers, on the same weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from maskdial_export.export import export

TOLERANCE = 1e-4
MAX_LENGTH = 128
LETTERS = "abcdefghijklmnopqrstuvwxyzéא"
WORDS = ["the", "film", "is", "good", "bad", "not", "example", "this", "😀", ".", ",", "!"]
SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
VOCABULARY = [*SPECIAL.values(), *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}

BODY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.35,
}
# name -> (class, configuration)
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "multi-label": (
        "BertForSequenceClassification",
        {"id2label": dict(enumerate("pqrs")), "problem_type": "multi_label_classification"},
    ),
    "regression": (
        "BertForSequenceClassification",
        {"id2label": {0: "x", 1: "y"}, "problem_type": "regression"},
    ),
    "cross-encoder": ("BertForSequenceClassification", {"id2label": {0: "LABEL_0"}}),
    "next-sentence": ("BertForNextSentencePrediction", {}),
    "nli": (
        "BertForSequenceClassification",
        {"id2label": NLI, "label2id": {label: i for i, label in NLI.items()}},
    ),
    "nli-bart": (
        "BartForSequenceClassification",
        {"id2label": NLI, "label2id": {label: i for i, label in NLI.items()}, "init_std": 0.35}
        | {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
        | {"encoder_layers": 1, "decoder_layers": 2, "bos_token_id": 2, "eos_token_id": 3}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        | {"decoder_start_token_id": 3, "forced_eos_token_id": None},
    ),
}
TEXTS = [
    "The film is good.",
    "the  film \n\n is\tnot   good",
    "Café, naïve, élan! Ünïcödé",
    "😀 the film 😀😀",
    "אבא is not the film",
    "a" * 90,
    ".",
    "the film is not good, " * 8,
]
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[4], TEXTS[2]), (TEXTS[6], TEXTS[3]), (TEXTS[3], TEXTS[7])]
LONG = "this good film is not bad, " * 20 + "the example!"


def make_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordPiece({token: i for i, token in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    return tokenizer


def make_checkpoint(name: str, folder: Path) -> Path:
    """Saves a checkpoint with weights so large that scores differ clearly between texts."""
    architecture, settings = CHECKPOINTS[name]
    model_class = getattr(transformers, architecture)
    is_bert = architecture.startswith("Bert")
    config = model_class.config_class(
        vocab_size=len(VOCABULARY),
        max_position_embeddings=MAX_LENGTH,
        pad_token_id=0,
        **(BODY if is_bert else {}),
        **settings,
    )
    torch.manual_seed(3)
    model_class(config).save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(),
        model_max_length=MAX_LENGTH,
        model_input_names=["input_ids", *["token_type_ids"] * is_bert, "attention_mask"],
        **SPECIAL,
    )
    fast.save_pretrained(folder)
    return folder


class Served:
    """The bundles behind a server, and the checkpoints in transformers."""

    def __init__(self, url: str, checkpoints: Path) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=60)
        self._checkpoints = checkpoints

    def post(self, route: str, status: int = 200, **body: object) -> Any:
        reply = self.http.post(route, json=body)
        assert reply.status_code == status, reply.text
        return reply.json()

    def pipeline(self, task: str, name: str, truncation_side: str = "right") -> Any:
        folder = self._checkpoints / name
        model_class = getattr(transformers, CHECKPOINTS[name][0])
        return transformers.pipeline(
            task,
            model=model_class.from_pretrained(folder).eval(),
            tokenizer=transformers.PreTrainedTokenizerFast.from_pretrained(
                folder, truncation_side=truncation_side
            ),
            device="cpu",
        )


@pytest.fixture(scope="module")
def served(made_once: Callable[..., Path], start_server: Callable[..., Any]) -> Iterator[Served]:
    def make(folder: Path) -> None:
        for name in CHECKPOINTS.keys() - {"nli-bart"}:
            source = make_checkpoint(name, folder / "checkpoints" / name)
            export(str(source), folder / "bundles" / name)

    root = made_once("classify-pipeline", make)
    models = {name: root / "bundles" / name for name in CHECKPOINTS if name != "nli-bart"}
    server = start_server(models=models)
    running = Served(server.url, root / "checkpoints")
    yield running
    running.http.close()
    server.stop()


@pytest.fixture(scope="module")
def served_bart(
    tmp_path_factory: pytest.TempPathFactory, start_server: Callable[..., Any]
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("bart")
    export(str(make_checkpoint("nli-bart", root / "nli-bart")), root / "bundle")
    server = start_server(models={"nli-bart": root / "bundle"})
    running = Served(server.url, root)
    yield running
    running.http.close()
    server.stop()


def assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [each["label"] for each in actual] == [each["label"] for each in expected]
    scores = [each["score"] for each in actual]
    np.testing.assert_allclose(scores, [e["score"] for e in expected], atol=TOLERANCE, rtol=0)


def as_pair(first: str, second: str) -> dict[str, str]:
    return {"text": first, "text_pair": second}


INPUTS: list[Any] = [*TEXTS, *(as_pair(*pair) for pair in PAIRS)]


@pytest.mark.parametrize("name", ["nli", "multi-label", "regression", "cross-encoder"])
@pytest.mark.parametrize("function", [None, "softmax", "sigmoid", "none"])
def test_classify_scores_as_transformers(served: Served, name: str, function: str | None) -> None:
    reference = served.pipeline("text-classification", name)
    asked = {} if function is None else {"function_to_apply": function}
    expected = [reference(text, top_k=None, **asked) for text in INPUTS]
    answers = served.post("/classify", model=name, inputs=INPUTS, parameters=asked)
    for answer, each in zip(answers, expected, strict=True):
        assert_same(answer, each)
    leaders = {answer[0]["label"] for answer in answers}
    assert name == "cross-encoder" or len(leaders) > 1, "the weights always say the same"
    alone = served.post("/classify", model=name, inputs=INPUTS[2], parameters=asked)
    assert alone == answers[2:3]


def test_top_k_keeps_the_best_labels(served: Served) -> None:
    every = served.post("/classify", model="multi-label", inputs=TEXTS)
    best = served.post("/classify", model="multi-label", inputs=TEXTS, parameters={"top_k": 2})
    assert best == [labels[:2] for labels in every]


def test_regression_heads_have_no_bounds(served: Served) -> None:
    answers = served.post("/classify", model="regression", inputs=TEXTS)
    scores = [each["score"] for answer in answers for each in answer]
    assert min(scores) < 0 or max(scores) > 1


def test_next_sentence_prediction(served: Served) -> None:
    """The pipeline knows the labels by number only: 0 is what BERT calls isNext."""
    reference = served.pipeline("text-classification", "next-sentence")
    pairs = [as_pair(*pair) for pair in PAIRS]
    answers = served.post("/classify", model="next-sentence", inputs=pairs)
    names = {"LABEL_0": "isNext", "LABEL_1": "notNext"}
    for pair, answer in zip(pairs, answers, strict=True):
        expected = [each | {"label": names[each["label"]]} for each in reference(pair, top_k=None)]
        assert_same(answer, expected)


@pytest.mark.parametrize("direction", ["left", "right"])
def test_classify_cuts_long_texts_as_transformers(served: Served, direction: str) -> None:
    reference = served.pipeline("text-classification", "nli", direction)
    asked = {"truncate": True, "truncation_direction": direction}
    pairs = [(LONG, TEXTS[0]), (TEXTS[1], LONG), (LONG, LONG + "good")]
    inputs: list[str | dict[str, str]] = [LONG, *(as_pair(*pair) for pair in pairs)]
    reply = served.http.post(
        "/classify", json={"model": "nli", "inputs": inputs, "parameters": asked}
    )
    assert reply.status_code == 200, reply.text
    for text, answer in zip(inputs, reply.json(), strict=True):
        assert_same(answer, reference(text, top_k=None, truncation=True))
    lengths = [len(reference.tokenizer(*text_of(text))["input_ids"]) for text in inputs]
    assert int(reply.headers["x-truncated-tokens"]) == sum(lengths) - 4 * MAX_LENGTH
    assert int(reply.headers["x-compute-tokens"]) == 4 * MAX_LENGTH


def text_of(item: str | dict[str, str]) -> list[str]:
    return [item] if isinstance(item, str) else list(item.values())


def test_long_texts_are_refused_with_both_lengths(served: Served) -> None:
    length = len(make_tokenizer().encode(LONG))
    error = served.post("/classify", 422, model="nli", inputs=[TEXTS[0], LONG])["error"]
    assert error.startswith("inputs[1]: ")
    assert f"{length} tokens" in error
    assert f"at most {MAX_LENGTH}" in error


LABELS = ["good", "bad film", "é", "אבא 😀", "the example, not this"]


@pytest.mark.parametrize("labels", [LABELS, LABELS[1:2]])
@pytest.mark.parametrize("asked", [{}, {"multi_label": True}, {"hypothesis_template": "Is it {}?"}])
@pytest.mark.parametrize("fixture", ["served", "served_bart"])
def test_zero_shot_scores_as_transformers(
    request: pytest.FixtureRequest, fixture: str, labels: list[str], asked: dict[str, Any]
) -> None:
    served: Served = request.getfixturevalue(fixture)
    model = "nli" if fixture == "served" else "nli-bart"
    reference = served.pipeline("zero-shot-classification", model)
    texts = TEXTS[:7]
    parameters = asked | {"candidate_labels": labels}
    answers = served.post("/zero-shot-classify", model=model, inputs=texts, parameters=parameters)
    for text, answer in zip(texts, answers, strict=True):
        expected = reference(text, candidate_labels=labels, **asked)
        assert_same(answer, by_label(expected))
    body: dict[str, Any] = {"inputs": texts[1], "parameters": parameters}
    assert served.post("/zero-shot-classify", model=model, **body) == answers[1]


def by_label(expected: dict[str, Any]) -> list[dict[str, Any]]:
    pairs = zip(expected["labels"], expected["scores"], strict=True)
    return [{"label": label, "score": score} for label, score in pairs]


@pytest.mark.parametrize("direction", ["left", "right"])
def test_zero_shot_cuts_the_premise_only(served: Served, direction: str) -> None:
    reference = served.pipeline("zero-shot-classification", "nli", direction)
    asked: dict[str, Any] = {"candidate_labels": LABELS}
    error = served.post("/zero-shot-classify", 422, inputs=LONG, parameters=asked)["error"]
    pair = make_tokenizer().encode(LONG, "This example is good.")
    assert f"hypothesis of 'good' take {len(pair)} tokens" in error
    labels = [*LABELS, "good " * 70]  # more than half of what there is room for
    asked = {"candidate_labels": labels, "truncate": True, "truncation_direction": direction}
    answer = served.post("/zero-shot-classify", inputs=LONG, parameters=asked)
    assert_same(answer, by_label(reference(LONG, candidate_labels=labels)))
    endless = asked | {"candidate_labels": ["good", "a" * 99 + " " + "b" * 99]}
    body = {"inputs": [TEXTS[0], LONG], "parameters": endless}
    assert "leaves 0 for the first" in served.post("/zero-shot-classify", 422, **body)["error"]


def sentence(reply: dict[str, Any]) -> str:
    return str(reply["error"])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({}, "parameters.candidate_labels: this field is required"),
        ({"candidate_labels": []}, "candidate_labels: must have between 1 and 256 labels, not 0"),
        ({"candidate_labels": ["a"] * 257}, "at most 256 items, not 257"),
        (
            {"candidate_labels": ["a"], "hypothesis_template": "about it"},
            "parameters.hypothesis_template: must have {} where the label goes",
        ),
        ({"candidate_labels": "a,b"}, "parameters.candidate_labels"),
    ],
)
def test_zero_shot_refusals(served: Served, parameters: dict[str, Any], message: str) -> None:
    body = {"inputs": "the film", "parameters": parameters}
    assert message in sentence(served.post("/zero-shot-classify", 422, **body))


def test_too_many_pairs_are_refused_at_once(served: Served) -> None:
    parameters = {"candidate_labels": ["a", "b", "c", "d", "e"]}
    body = {"inputs": ["the film"] * 256, "parameters": parameters}
    error = sentence(served.post("/zero-shot-classify", 422, **body))
    assert (
        "256 texts with 5 labels each are 1,280 pairs; one request may make at most 1,024" in error
    )
    body["inputs"] = ["the film"] * 257
    assert "at most 256" in sentence(served.post("/zero-shot-classify", 422, **body))


def test_zero_shot_needs_a_model_of_inference(served: Served) -> None:
    body = {"inputs": "the film", "parameters": {"candidate_labels": ["a"]}}
    error = sentence(served.post("/zero-shot-classify", 422, model="multi-label", **body))
    assert "cannot do zero-shot-classify" in error
    error = sentence(served.post("/models/multi-label", 422, **body))
    assert "cannot do zero-shot-classify" in error


DOCUMENTS = [*TEXTS, "the film is good", "good"]


def cross_encoder_logits(served: Served, query: str, truncation_side: str = "right") -> np.ndarray:
    reference = served.pipeline("text-classification", "cross-encoder", truncation_side)
    pairs = [as_pair(query, document) for document in DOCUMENTS]
    scored = [reference(p, truncation=True, function_to_apply="none", top_k=None) for p in pairs]
    return np.array([each[0]["score"] for each in scored])


def test_rerank_scores_as_the_cross_encoder(served: Served) -> None:
    logits = cross_encoder_logits(served, "Is the film good?")
    order = np.argsort(-logits).tolist()
    body: dict[str, Any] = {"query": "Is the film good?", "texts": DOCUMENTS}
    ranked = served.post("/rerank", **body)
    assert all(set(each) == {"index", "score"} for each in ranked)
    assert [each["index"] for each in ranked] == order
    sigmoid = 1 / (1 + np.exp(-logits[order]))
    np.testing.assert_allclose([each["score"] for each in ranked], sigmoid, atol=TOLERANCE)

    raw = served.post("/rerank", **body, raw_scores=True, return_text=True)
    assert [each["index"] for each in raw] == order
    assert [each["text"] for each in raw] == [DOCUMENTS[index] for index in order]
    np.testing.assert_allclose([each["score"] for each in raw], logits[order], atol=TOLERANCE)
    assert served.post("/models/cross-encoder", **body) == ranked


@pytest.mark.parametrize("direction", ["Left", "right"])
def test_rerank_cuts_the_longer_text(served: Served, direction: str) -> None:
    body: dict[str, Any] = {"query": LONG, "texts": DOCUMENTS}
    error = sentence(served.post("/rerank", 422, **body))
    pair = make_tokenizer().encode(LONG, DOCUMENTS[0])
    assert f"texts[0]: the query and the text take {len(pair)} tokens together" in error
    body |= {"truncate": True, "truncation_direction": direction, "raw_scores": True}
    logits = cross_encoder_logits(served, LONG, direction.lower())
    scores = {each["index"]: each["score"] for each in served.post("/rerank", **body)}
    actual = [scores[index] for index in range(len(DOCUMENTS))]
    np.testing.assert_allclose(actual, logits, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": "", "texts": ["a"]}, "query: must not be empty"),
        ({"query": "a", "texts": []}, "texts: must have at least 1"),
        ({"query": "a", "texts": ["a", " "]}, "texts[1]: must not be empty"),
        ({"query": "a", "texts": ["a"] * 257}, "at most 256"),
        ({"texts": ["a"]}, "query: this field is required"),
        ({"query": "a", "texts": ["a"], "model": "nli"}, "cannot do rerank"),
    ],
)
def test_rerank_refusals(served: Served, body: dict[str, Any], message: str) -> None:
    assert message in sentence(served.post("/rerank", 422, **body))


@pytest.mark.parametrize("path", ["zero-shot-classify", "models/nli"])
def test_inference_client_zero_shot(served: Served, path: str) -> None:
    client = InferenceClient(model=f"{served.url}/{path}")
    expected = served.post(
        "/zero-shot-classify", inputs=TEXTS[0], parameters={"candidate_labels": LABELS}
    )
    elements = client.zero_shot_classification(TEXTS[0], LABELS)
    assert [(each.label, each.score) for each in elements] == [
        (each["label"], each["score"]) for each in expected
    ]
    several = client.zero_shot_classification(
        TEXTS[0], LABELS, multi_label=True, hypothesis_template="It is {}."
    )
    assert sum(each.score for each in several) != pytest.approx(1)


def test_a_model_of_inference_classifies_pairs_by_name(served: Served) -> None:
    client = InferenceClient(model=f"{served.url}/models/nli")
    labels = client.text_classification(TEXTS[0])
    assert {each.label for each in labels} == set(NLI.values())
    pair = as_pair(TEXTS[0], TEXTS[1])
    assert served.post("/models/nli", inputs=pair) == served.post(
        "/classify", model="nli", inputs=pair
    )


def test_the_models_say_what_they_do(served: Served) -> None:
    tasks = {each["name"]: each["tasks"] for each in served.http.get("/models").json()}
    assert "zero-shot-classify" in tasks["nli"]
    assert "zero-shot-classify" not in tasks["multi-label"]
    assert [name for name, done in tasks.items() if "rerank" in done] == ["cross-encoder"]
