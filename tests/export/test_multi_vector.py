"""Models with a vector for each token, in three formats, against sentence-transformers."""

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.util import maxsim
from tokenizers import Tokenizer

from maskdial.bundle.bundle import load_bundle
from maskdial.masked.tasks.muvera import Muvera
from maskdial.masked.tasks.quantized import quantized, restored
from maskdial_export.export import export

Checkpoint = Callable[[str], Path]
FORMATS = ["saved", "pylate", "stanford"]
TOLERANCE = 1e-5
QUERIES = ["the ship", "x", "who is it, so far."]
DOCUMENTS = ["the ship left at dawn, as it did.", "x", "so, it was: nothing."]


def copied(source: Path, folder: Path) -> Path:
    """The model and the tokenizer of a checkpoint, without sentence-transformers' files."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(source / name, folder / name)
    names = ("pad", "unk", "cls", "sep", "mask")
    settings = {f"{name}_token": f"[{name.upper()}]" for name in names}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def change(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | entries))


def make_saved(checkpoint: Checkpoint, folder: Path) -> None:
    """By sentence-transformers itself; the extension is attended to, and cuts no query."""
    base = copied(checkpoint("bert-embed"), folder.with_name("base"))
    expansion: Any = {"strategy": "min", "length": 12, "attend": True}
    modules: list[Any] = [
        Transformer(str(base), query_expansion=expansion, document_length=40),
        Dense(
            32,
            16,
            bias=False,
            activation_function=torch.nn.Identity(),
            module_input_name="token_embeddings",
        ),
        MultiVectorMask([".", ","], skiplist_tasks=["query", "document"]),
        Normalize(module_input_name="token_embeddings"),
    ]
    prompts = {"query": "q ", "document": "d "}
    MultiVectorEncoder(modules=modules, device="cpu", prompts=prompts).save(str(folder))


def make_pylate(checkpoint: Checkpoint, folder: Path) -> None:
    """The markers are tokens that PyLate has added; local and global layers."""
    copied(checkpoint("modernbert-embed"), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["[Q] ", "[D] "])
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    dense: dict[str, Any] = {"in_features": 32, "out_features": 16, "bias": False}
    dense |= {"activation_function": "torch.nn.modules.linear.Identity"}
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(4))
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    change(
        folder / "config_sentence_transformers.json",
        model_type="ColBERT",
        similarity_fn_name="MaxSim",
        query_prefix="[Q] ",
        document_prefix="[D] ",
        query_length=24,
        document_length=40,
        attend_to_expansion_tokens=False,
    )


def make_stanford(checkpoint: Checkpoint, folder: Path) -> None:
    """The markers are unused entries of the vocabulary; the extension is not attended to."""
    copied(checkpoint("bert-embed"), folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    for marker in ("[unused0]", "[unused1]"):
        vocabulary[marker] = len(vocabulary)
    path.write_text(json.dumps(content))
    weights = {
        f"bert.{name}": weight for name, weight in load_file(folder / "model.safetensors").items()
    }
    weights["linear.weight"] = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change(folder / "config.json", architectures=["HF_ColBERT"])
    change(
        folder / "artifact.metadata",
        query_token_id="[unused0]",
        doc_token_id="[unused1]",
        query_maxlen=24,
        doc_maxlen=40,
        mask_punctuation=True,
        attend_to_mask_tokens=False,
    )


@pytest.fixture(scope="module")
def sources(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("multi-vector")
    makers = (make_saved, make_pylate, make_stanford)
    for name, make in zip(FORMATS, makers, strict=True):
        make(checkpoint, root / name)
    return {name: root / name for name in FORMATS}


@pytest.fixture(scope="module")
def bundles(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bundles")
    for name, source in sources.items():
        export(str(source), root / name)
    return {name: root / name for name in sources}


@pytest.fixture(scope="module")
def url(
    bundles: dict[str, Path],
    checkpoint: Checkpoint,
    tmp_path_factory: pytest.TempPathFactory,
    serve: Callable[..., str],
) -> str:
    plain = tmp_path_factory.mktemp("plain") / "bundle"
    export(str(checkpoint("bert-embed")), plain, task="embed-all")
    return serve(plain=plain, **bundles)


def vectors(url: str, model: str, **body: object) -> list[np.ndarray]:
    reply = httpx.post(f"{url}/embed-all", json={"model": model, **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    return [np.array(each, np.float32) for each in reply.json()]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("role", ["query", "document"])
def test_vectors_are_those_of_sentence_transformers(
    name: str, role: str, sources: dict[str, Path], url: str
) -> None:
    reference = MultiVectorEncoder(str(sources[name]), device="cpu")
    texts = QUERIES if role == "query" else DOCUMENTS
    encode = reference.encode_query if role == "query" else reference.encode_document
    expected = encode(texts, convert_to_numpy=True)
    actual = vectors(url, name, inputs=texts, prompt_name=role)
    for text, of, each in zip(texts, expected, actual, strict=True):
        assert each.shape == of.shape
        np.testing.assert_allclose(each, of, atol=TOLERANCE)
        np.testing.assert_allclose(np.linalg.norm(each, axis=1), 1, atol=TOLERANCE)
        (alone,) = vectors(url, name, inputs=text, prompt_name=role)
        np.testing.assert_array_equal(alone, each)
    if role == "document":
        default = vectors(url, name, inputs=texts)
        assert all(map(np.array_equal, default, actual))


def test_other_paths_and_parameters(url: str) -> None:
    body = {"inputs": QUERIES, "prompt_name": "query"}
    expected = httpx.post(f"{url}/embed-all", json=body | {"model": "saved"}, timeout=60).json()
    for path, each in {
        "/embed_all": body | {"model": "saved"},
        "/models/saved": body,
        "/embed-all": {"model": "saved", "inputs": QUERIES, "parameters": {"prompt_name": "query"}},
    }.items():
        assert httpx.post(f"{url}{path}", json=each, timeout=60).json() == expected


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"inputs": ["x", "y " * 60]}, "inputs[1]: the text has 63 tokens; model 'stanford' takes"),
        ({"inputs": "y " * 30, "prompt_name": "query"}, "takes at most 24"),
        ({"inputs": "x", "prompt_name": "passage"}, "prompt_name"),
    ],
)
def test_requests_that_are_refused(url: str, body: dict[str, Any], words: str) -> None:
    reply = httpx.post(f"{url}/embed-all", json={"model": "stanford", **body}, timeout=60)
    assert reply.status_code == 422, reply.text
    assert words in reply.json()["error"]


def test_long_texts_are_cut_as_by_sentence_transformers(sources: dict[str, Path], url: str) -> None:
    reference = MultiVectorEncoder(str(sources["stanford"]), device="cpu")
    text = "so it went on and on " * 5
    expected = reference.encode_document(text, convert_to_numpy=True)
    (actual,) = vectors(url, "stanford", inputs=text, truncate=True)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE)
    (query,) = vectors(url, "stanford", inputs=text, truncate=True, prompt_name="query")
    assert len(query) == 24
    expected = reference.encode_query(text, convert_to_numpy=True)
    np.testing.assert_allclose(query, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", FORMATS)
def test_rerank_scores_by_maxsim(name: str, sources: dict[str, Path], url: str) -> None:
    reference = MultiVectorEncoder(str(sources[name]), device="cpu")
    query = reference.encode_query(QUERIES[:1])
    similarities = reference.similarity(query, reference.encode_document(DOCUMENTS))
    expected = similarities.numpy()[0]
    body: dict[str, Any] = {"model": name, "query": QUERIES[0]}
    ranks = rerank(url, texts=DOCUMENTS, **body)
    order = [each["index"] for each in ranks]
    assert order == np.argsort(-expected, kind="stable").tolist()
    np.testing.assert_allclose([r["score"] for r in ranks], expected[order], atol=1e-4)
    assert np.ptp(expected) > 1e-2
    for each in ranks:
        alone = rerank(url, texts=[DOCUMENTS[each["index"]]], raw_scores=True, **body)
        assert alone == [{"index": 0, "score": each["score"]}]
    reply = httpx.post(f"{url}/v1/rerank", json=body | {"documents": DOCUMENTS}, timeout=60).json()
    assert [each["relevance_score"] for each in reply["results"]] == [r["score"] for r in ranks]
    named = {"query": QUERIES[0], "texts": DOCUMENTS}
    assert httpx.post(f"{url}/models/{name}", json=named, timeout=60).json() == ranks


@pytest.mark.parametrize("dtype", ["float", "int8", "uint8", "binary", "ubinary"])
def test_rerank_scores_stored_vectors(dtype: Any, sources: dict[str, Path], url: str) -> None:
    """As sentence-transformers' MaxSim of a query and what it can still know of documents."""
    reference = MultiVectorEncoder(str(sources["saved"]), device="cpu")
    query = reference.encode_query(QUERIES[0], convert_to_numpy=True)
    documents = vectors(url, "saved", inputs=DOCUMENTS)
    stored = [quantized(each, dtype) for each in documents]
    known = [restored(each, dtype, query.shape[1]) for each in stored]
    scores = np.array([float(maxsim([query], [each])[0, 0]) for each in known])
    body: dict[str, Any] = {"model": "saved", "query": QUERIES[0]}
    written = [each.tolist() for each in stored]
    ranks = rerank(url, vectors={"documents": written, "dtype": dtype}, **body)
    order = [each["index"] for each in ranks]
    np.testing.assert_allclose([each["score"] for each in ranks], scores[order], atol=1e-4)
    assert scores[order].tolist() == sorted(scores, reverse=True)
    packed = [base64.b64encode(each.tobytes()).decode() for each in stored]
    assert rerank(url, vectors={"documents": packed, "dtype": dtype}, **body) == ranks
    (best,) = rerank(url, vectors={"documents": packed, "dtype": dtype}, top_n=1, **body)
    assert best == ranks[0]
    if dtype == "float":
        assert ranks == rerank(url, texts=DOCUMENTS, **body)


def test_rerank_scores_int8_with_a_scale(url: str) -> None:
    query = "who?"
    (document,) = vectors(url, "saved", inputs="a short text")
    values = np.rint(document / 0.01).clip(-128, 127)
    stored = {"documents": [values.astype(int).tolist()], "dtype": "int8", "scale": 0.01}
    near = {"documents": [(values.astype(np.float32) * np.float32(0.01)).tolist()]}
    body: dict[str, Any] = {"model": "saved", "query": query}
    assert rerank(url, vectors=stored, **body) == rerank(url, vectors=near, **body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "texts: must be given, or vectors in place of them, not both"),
        ({"texts": ["a"], "vectors": {"documents": [[[1]]]}}, "vectors in place of them, not both"),
        ({"vectors": {"documents": [[[1.0]]]}}, "vectors.documents[0]: vector 0 has 1 numbers"),
        (
            {"vectors": {"documents": [[[10**400]]]}},
            "vectors.documents[0][0][0]: Input should be a ",
        ),
        ({"vectors": {"documents": [[["1"]]]}}, "[0][0][0]: Input should be a valid number"),
        ({"vectors": {"documents": [1]}}, "vectors.documents[0]: Input should be a valid array"),
        ({"vectors": {"documents": [[[1e38] * 16]]}}, "not finite, or beyond 1e+09"),
        ({"vectors": {"documents": ["AAAA"], "dtype": "int4"}}, "vectors.dtype"),
        ({"vectors": {"documents": ["AAAA"], "scale": 0}}, "vectors.scale"),
        ({"vectors": {"documents": ["AAAA"], "scale": 1}}, "vectors.scale: only int8 and uint8"),
        ({"vectors": {"documents": []}}, "vectors.documents: must have at least"),
        ({"vectors": {"documents": ["AAAA"]}, "return_text": True}, "return_text: there are"),
    ],
)
def test_stored_vectors_that_are_refused(url: str, body: dict[str, Any], words: str) -> None:
    error = rerank(url, 422, model="saved", query="who?", **body)["error"]
    assert words in error


@pytest.mark.parametrize("role", ["query", "document"])
def test_one_vector_of_all_of_a_text(url: str, role: str) -> None:
    settings = {"k_sim": 3, "dim_proj": 4, "r_reps": 2, "random_seed": 5}
    given = {"model": "saved", "inputs": DOCUMENTS, "prompt_name": role}
    several = vectors(url, "saved", inputs=DOCUMENTS, prompt_name=role)
    reply = httpx.post(f"{url}/embed-all", json=given | {"muvera": settings}, timeout=60).json()
    assert reply["muvera"] == settings | {"final_dimension": None}
    wanted = [Muvera(**settings).encode(each, is_query=role == "query") for each in several]
    np.testing.assert_allclose(reply["vectors"], wanted, atol=1e-6)
    again = {"parameters": {"muvera": reply["muvera"]}}
    assert httpx.post(f"{url}/embed-all", json=given | again, timeout=60).json() == reply
    large = {"muvera": {"dim_proj": 4096}}
    refused = httpx.post(f"{url}/embed-all", json=given | large, timeout=60)
    assert refused.status_code == 422
    assert "muvera.dim_proj: must be at most" in refused.json()["error"]


def rerank(url: str, status: int = 200, **body: object) -> Any:
    reply = httpx.post(f"{url}/rerank", json=body, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_rerank_reads_texts_as_their_kind(url: str) -> None:
    """Queries and documents have limits of their own, and errors name the one that is too long."""
    body: dict[str, Any] = {"model": "stanford", "query": "x", "texts": ["y", "y " * 60]}
    error = rerank(url, 422, **body)["error"]
    assert "texts[1]: the text has 63 tokens" in error
    assert len(rerank(url, **body, truncate=True)) == 2
    error = rerank(url, 422, **body | {"query": "y " * 30})["error"]
    assert "query: the text has 33 tokens" in error
    assert "takes at most 24" in error
    error = rerank(url, 422, **body | {"texts": ["y"], "instruction": "find it"})["error"]
    assert error.startswith("instruction: model 'stanford' has no place for an instruction")
    models = {each["name"]: each for each in httpx.get(f"{url}/models", timeout=60).json()}
    assert models["stanford"]["tasks"] == ["embed-all", "embed-chunks", "rerank", "tokenize"]


def test_an_ordinary_encoder_has_the_hidden_states_that_it_pools(
    checkpoint: Checkpoint, load_reference: Callable[[Path], Any], url: str
) -> None:
    source = checkpoint("bert-embed")
    tokenizer, model = Tokenizer.from_file(str(source / "tokenizer.json")), load_reference(source)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    actual = vectors(url, "plain", inputs=DOCUMENTS)
    for text, each in zip(DOCUMENTS, actual, strict=True):
        with torch.no_grad():
            output = model(torch.tensor([tokenizer.encode(text).ids]))
        expected = output.last_hidden_state[0].numpy()
        np.testing.assert_allclose(each, expected, atol=TOLERANCE)


def test_chunks_have_the_means_of_their_tokens(
    checkpoint: Checkpoint, load_reference: Callable[[Path], Any], url: str
) -> None:
    """Late chunking: tokens attend to the whole text; chunks may overlap, and end within words."""
    source = checkpoint("bert-embed")
    tokenizer, model = Tokenizer.from_file(str(source / "tokenizer.json")), load_reference(source)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    text = "the ship left at dawn, as it did. who is it, so far."
    chunks = [[0, 33], [33, len(text)], [4, 8], [0, 6], [0, len(text)], [20, 40]]
    encoding = tokenizer.encode(text)
    with torch.no_grad():
        hidden = model(torch.tensor([encoding.ids])).last_hidden_state[0]
    expected = []
    for start, end in chunks:
        tokens = [i for i, (a, b) in enumerate(encoding.offsets) if b > a and start < b <= end]
        assert tokens
        expected.append(hidden[tokens].mean(0).numpy())
    body: dict[str, Any] = {"model": "plain", "inputs": text, "chunks": chunks}
    reply = httpx.post(f"{url}/embed-chunks", json=body | {"normalize": False}, timeout=60)
    np.testing.assert_allclose(reply.json(), expected, atol=TOLERANCE)
    unit = np.array(httpx.post(f"{url}/embed-chunks", json=body, timeout=60).json())
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
    dispatched = httpx.post(f"{url}/models/plain", json=body, timeout=60)
    assert dispatched.json() == unit.tolist()
    # The same words, not read together, have other vectors.
    apart = httpx.post(
        f"{url}/embed-chunks", json=body | {"inputs": text[:33], "chunks": [[0, 33]]}, timeout=60
    ).json()
    assert np.abs(np.array(apart[0]) - unit[0]).max() > 1e-3


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"chunks": []}, "chunks: must have between 1 and 4096 chunks, not 0"),
        ({"chunks": [[0, 4], [2, 2]]}, "chunks: item 1 must begin at 0 or later, and before it"),
        ({"chunks": [[0, 4], [-1, 2]]}, "chunks: item 1 must begin at 0 or later, and before it"),
        ({"chunks": [[0, 4, 5]]}, "chunks: item 0 must be [start, end], in characters"),
        ({"chunks": [[0, 4], [0, 6]]}, "chunks[1]: ends at 6, and the text has 5 characters"),
        ({"chunks": [[0, 4], [3, 4]]}, "chunks[1]: no token ends in it"),
        ({"chunks": [[0, 5]] * 4096}, "chunks: they overlap so much that they have 16,384 tokens"),
        ({"inputs": "the " * 400, "chunks": [[0, 4]]}, "inputs: the text has 1202 tokens"),
        (
            {"inputs": "the " * 400, "chunks": [[1500, 1600]], "truncate": True},
            "chunks[0]: no token ends in it; ",
        ),
        ({"model": "saved", "chunks": [[0, 4]], "dimensions": 3}, "dimensions: unknown field"),
    ],
)
def test_chunks_that_cannot_be_embedded(url: str, body: dict[str, Any], words: str) -> None:
    body = {"model": "plain", "inputs": "the .", **body}
    reply = httpx.post(f"{url}/embed-chunks", json=body, timeout=60)
    assert reply.status_code == 422
    assert reply.json()["error"].startswith(words)


def test_the_bundles_are_exact_and_batch_invariant(bundles: dict[str, Path]) -> None:
    for name, folder in bundles.items():
        manifest = load_bundle(name, folder).manifest
        assert manifest.task == "embed-all"
        assert manifest.embedding is not None
        assert manifest.embedding.dimension == 16
        assert manifest.batch_invariant


def test_int8_keeps_the_vectors(sources: dict[str, Path], tmp_path: Path) -> None:
    manifest = export(str(sources["saved"]), tmp_path / "int8", precision="int8")
    assert manifest.quality is not None
    assert manifest.quality.figures["mean_cosine"] > 0.99
