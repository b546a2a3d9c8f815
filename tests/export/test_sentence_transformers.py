"""Checkpoints as sentence-transformers writes them: its modules and prompts, dense and sparse."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.sentence_transformer.modules import LayerNorm, Normalize, Pooling
from sentence_transformers.sentence_transformer.modules import Transformer as Encoder
from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

from maskdial_client import Client
from maskdial_export.checkpoint.embedding import read_pooler
from maskdial_export.checkpoint.source import find
from maskdial_export.errors import ExportError
from maskdial_export.export import export

New = Callable[[str], Path]
PROMPTS = {
    "query": "query: ",
    "passage": "passage: ",
    "nothing": "",
    "task": "Instruct: find passages\nQuery: ",
}
TEXTS = ["the baker repaired the old bridge", "a", "nobody here, at all.", "x" * 30]
# In the order of older versions, which is the one of this list whatever the settings' order
MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
TOLERANCE = 2e-5


def save_encoder(folder: Path, backbone: Path, modules: Sequence[Any], **settings: Any) -> Path:
    """A checkpoint of that BERT and modules, with random weights."""
    torch.manual_seed(5)
    model = SentenceTransformer(
        modules=[Encoder(str(backbone)), *modules], device="cpu", prompts=PROMPTS, **settings
    )
    for module in modules:
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
    model.save(str(folder))
    return folder


def find_saved(folder: Path) -> Any:
    return find(str(folder), "auto", revision=None, allow_pickle=False)


@pytest.mark.parametrize("modes", [*([mode] for mode in MODES), ["max", "cls", "mean"]])
def test_poolings(modes: list[str], backbone: Path, tmp_path: Path) -> None:
    pooling = Pooling(32, pooling_mode=modes)
    source = find_saved(save_encoder(tmp_path / "saved", backbone, [pooling]))
    assert source.task == "embed"
    pooler = read_pooler(source, 32)
    assert pooler.embedding.dimension == 32 * len(modes)
    hidden = torch.randn(4, 11, 32, generator=torch.Generator().manual_seed(3))
    lengths = torch.tensor([11, 1, 7, 10])
    mask = (torch.arange(11)[None] < lengths[:, None]).long()
    expected = pooling({"token_embeddings": hidden, "attention_mask": mask})["sentence_embedding"]
    torch.testing.assert_close(pooler(hidden, lengths), expected)


def test_poolings_as_older_versions_write_them(backbone: Path, tmp_path: Path) -> None:
    folder = save_encoder(tmp_path / "saved", backbone, [Pooling(32)])
    settings: dict[str, Any] = {"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}
    settings |= {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    assert read_pooler(find_saved(folder), 32).embedding.pooling == "cls+max"


@pytest.fixture(scope="module")
def encoder(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    modules = [
        Pooling(32, pooling_mode=("mean", "max", "weightedmean")),
        Dense(96, 48, activation_function=torch.nn.GELU(), use_residual=True),
        LayerNorm(48),
        Dense(48, 48, bias=False, activation_function=torch.nn.Identity()),
        Normalize(),
    ]
    folder = tmp_path_factory.mktemp("encoder") / "saved"
    return save_encoder(folder, backbone, modules, default_prompt_name="passage")


@pytest.fixture(scope="module")
def sparse_encoder(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse") / "saved"
    modules: list[Any] = [MLMTransformer(str(backbone)), SpladePooling()]
    SparseEncoder(modules=modules, device="cpu", prompts=PROMPTS).save(str(folder))
    return folder


@pytest.fixture(scope="module")
def url(
    encoder: Path,
    sparse_encoder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    serve: Callable[..., str],
) -> str:
    folder = tmp_path_factory.mktemp("bundles")
    for name, source in {"dense": encoder, "sparse": sparse_encoder}.items():
        export(str(source), folder / name)
    return serve(dense=folder / "dense", sparse=folder / "sparse")


@pytest.mark.parametrize("name", [None, "query", "passage", "nothing"])
def test_vectors_and_prompts_are_those_of_sentence_transformers(
    encoder: Path, url: str, name: str | None
) -> None:
    reference = SentenceTransformer(str(encoder), device="cpu")
    expected = reference.encode(TEXTS, prompt_name=name)
    with Client(url) as client:
        vectors = np.array(client.embed(TEXTS, prompt_name=name))
        assert vectors.shape == (4, 48)
        np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
        alone = [client.embed(text, prompt_name=name) for text in TEXTS]
        np.testing.assert_array_equal(vectors, alone)
        similarities = client.similarity(TEXTS[0], TEXTS[1:], prompt_name=name)
    np.testing.assert_allclose(similarities, expected[1:] @ expected[0], atol=TOLERANCE)
    body = {"model": "dense", "input": TEXTS, **({} if name is None else {"prompt_name": name})}
    data = httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).json()["data"]
    np.testing.assert_array_equal([each["embedding"] for each in data], vectors)


@pytest.mark.parametrize("dimensions", [1, 13, 48])
def test_leading_dimensions_are_those_of_sentence_transformers(
    encoder: Path, url: str, dimensions: int
) -> None:
    """Matryoshka: cut by request here, by ``truncate_dim`` there, and of length 1 in both."""
    reference = SentenceTransformer(str(encoder), device="cpu", truncate_dim=dimensions)
    expected = reference.encode(TEXTS, prompt_name="query", normalize_embeddings=True)
    with Client(url) as client:
        vectors = np.array(client.embed(TEXTS, prompt_name="query", dimensions=dimensions))
    assert vectors.shape == (4, dimensions)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
    body = {"model": "dense", "input": TEXTS, "prompt_name": "query", "dimensions": dimensions}
    data = httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).json()["data"]
    np.testing.assert_array_equal([each["embedding"] for each in data], vectors)


def test_an_instruction_stands_in_the_prompt_of_its_form(encoder: Path, url: str) -> None:
    reference = SentenceTransformer(str(encoder), device="cpu")
    prompt = "Instruct: find the bridge\nQuery: "
    expected = reference.encode(TEXTS, prompt=prompt)
    given: dict[str, Any] = {"prompt_name": "task", "instruction": "find the bridge"}
    with Client(url) as client:
        vectors = np.array(client.embed(TEXTS, **given))
        similarities = client.similarity(TEXTS[0], TEXTS[1:], **given)
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
    np.testing.assert_allclose(similarities, expected[1:] @ expected[0], atol=TOLERANCE)
    body = {"model": "dense", "input": TEXTS, **given}
    data = httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).json()["data"]
    np.testing.assert_array_equal([each["embedding"] for each in data], vectors)
    # Of the sparse model, which has no default prompt, this is the only one that takes one
    with Client(url) as client:
        named = client.embed_sparse(TEXTS[0], **given)
        assert client.embed_sparse(TEXTS[0], instruction="find the bridge") == named
        assert client.embed_sparse(TEXTS[0]) != named


def test_weights_are_those_of_a_sparse_encoder(sparse_encoder: Path, url: str) -> None:
    reference = SparseEncoder(str(sparse_encoder), device="cpu")
    expected = reference.encode(TEXTS, prompt_name="query", convert_to_sparse_tensor=False)
    with Client(url) as client:
        weights = client.embed_sparse(TEXTS, prompt_name="query")
        alone = [client.embed_sparse(text, prompt_name="query") for text in TEXTS]
    assert weights == alone
    dense = np.zeros(tuple(expected.shape), np.float32)
    for row, entry in enumerate(weights):
        assert list(entry) == sorted(entry)
        assert all(entry.values())
        dense[row, list(entry)] = list(entry.values())
    np.testing.assert_allclose(dense, expected.numpy(), atol=TOLERANCE)
    assert 0 < (dense > 0).mean() < 1


def test_sparse_weights_on_the_wire(url: str) -> None:
    replies = [
        httpx.post(f"{url}{path}", json={"inputs": TEXTS[0]}, timeout=60).json()
        for path in ("/embed-sparse", "/embed_sparse", "/models/sparse")
    ]
    assert replies[0] == replies[1] == replies[2]
    ((first, *_),) = replies[0]
    assert set(first) == {"index", "value"}


@pytest.mark.parametrize(
    ("route", "body", "words"),
    [
        (
            "/embed",
            {"inputs": "a", "prompt_name": "other"},
            "prompt_name: model 'dense' has no prompt 'other'; it has ",
        ),
        ("/embed", {"inputs": "a", "parameters": {"prompt_name": 3}}, "parameters.prompt_name"),
        (
            "/embed",
            {"inputs": "a", "prompt_name": "query", "parameters": {"prompt_name": "query"}},
            "also given beside the inputs",
        ),
        ("/embed", {"inputs": "a", "model": "sparse"}, "cannot do embed; it does embed-sparse"),
        ("/embed-sparse", {"inputs": "a", "prompt_name": "x"}, "prompt_name: model 'sparse'"),
        ("/embed", {"inputs": "a", "instruction": "find it"}, "instruction: model 'dense' takes"),
        ("/embed", {"inputs": "a", "instruction": " "}, "instruction"),
        ("/embed-sparse", {"inputs": "word " * 200}, "takes at most 128"),
    ],
)
def test_requests_that_cannot_be_answered(
    url: str, route: str, body: dict[str, Any], words: str
) -> None:
    reply = httpx.post(f"{url}{route}", json=body, timeout=60)
    assert reply.status_code == 422, reply.text
    assert words in reply.json()["error"]


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@pytest.mark.parametrize(
    ("module", "settings", "why"),
    [
        ("1_Pooling", {"pooling_mode": "median"}, "pools by median; supported: cls, max"),
        ("1_Pooling", {"include_prompt": False}, "include_prompt"),
        ("2_Dense", {"activation_function": "my.Tanh"}, "activation 'my.Tanh'"),
        ("2_Dense", {"activation_function": "torch.nn.modules.rnn.LSTM"}, "needs settings"),
        ("2_Dense", {"module_input_name": "token_embeddings"}, "reads or writes"),
        (".", {"default_prompt_name": "other"}, "'other', which is none of its prompts"),
        (".", {"prompts": {"query": 3}}, "must be texts by name"),
    ],
)
def test_settings_that_the_graph_cannot_follow(
    module: str, settings: dict[str, Any], why: str, encoder: Path, tmp_path: Path
) -> None:
    source = find_saved(_copy(encoder, tmp_path / "saved"))
    if module == ".":
        path = source.path / "config_sentence_transformers.json"
        path.write_text(json.dumps(settings))
    else:
        change(source.path / module, **settings)
    with pytest.raises(ExportError, match=why):
        read_pooler(source, 32)


def test_modules_that_the_graph_does_not_have(encoder: Path, tmp_path: Path) -> None:
    source = find_saved(_copy(encoder, tmp_path / "saved"))
    weights = source.path / "2_Dense" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:100])
    with pytest.raises(ExportError, match="cannot be read"):
        read_pooler(source, 32)
    weights.unlink()
    with pytest.raises(ExportError, match="load and save the checkpoint"):
        read_pooler(source, 32)
    weights.write_bytes(content)
    with pytest.raises(ExportError, match="needs a weight of the shape"):
        read_pooler(source, 16)
    path = source.path / "modules.json"
    path.write_text(path.read_text().replace("layer_norm.LayerNorm", "cnn.CNN"))
    with pytest.raises(ExportError, match="has a CNN module"):
        read_pooler(source, 32)


def _copy(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))
