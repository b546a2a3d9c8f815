"""Static embeddings in the layouts of sentence-transformers and model2vec, against both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

from maskdial.bundle.bundle import load_bundle
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from tests.export.conftest import make_tokenizer

TOLERANCE = 1e-6
TEXTS = ["the ship left at dawn.", "a", "é unknown 9 ~", " spaces \n", "she baked bread " * 40]


def save_table(folder: Path, *, normalize: bool = False) -> Path:
    """As sentence-transformers saves one."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    tokenizer.no_truncation()
    modules: list[Any] = [StaticEmbedding(tokenizer, embedding_dim=24)]
    if normalize:
        modules.append(Normalize())
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    return folder


def save_model2vec(folder: Path, **changes: torch.Tensor) -> Path:
    """As model2vec saves one, with vectors that tokens share and weights."""
    torch.manual_seed(1)
    folder.mkdir()
    tokenizer = make_tokenizer()
    size = tokenizer.get_vocab_size()
    stored = {
        "embeddings": torch.randn(7, 24, dtype=torch.float64),
        "mapping": torch.randint(7, (size,)),
        "weights": torch.rand(size, dtype=torch.float64),
    }
    save_file(stored | changes, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(
        '{"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": true, '
        '"max_length": 300, "embedding_dtype": "float64"}'
    )
    return folder


def save_small(folder: Path) -> Path:
    """Vectors far smaller than 1, as those of frequent tokens are."""
    generator = torch.Generator().manual_seed(1)
    return save_model2vec(folder, embeddings=0.001 * torch.randn(7, 24, generator=generator))


def embed(url: str, model: str, texts: list[str], **fields: object) -> Any:
    body = {"model": model, "inputs": texts, **fields}
    reply = httpx.post(f"{url}/embed", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return np.array(reply.json())


@pytest.mark.parametrize("normalize", [False, True])
def test_vectors_are_those_of_sentence_transformers(
    normalize: bool, tmp_path: Path, serve: Callable[..., str]
) -> None:
    folder = save_table(tmp_path / "table", normalize=normalize)
    manifest = export(str(folder), tmp_path / "bundle")
    assert manifest.batch_invariant
    assert manifest.embedding is not None
    assert manifest.embedding.normalized == normalize
    url = serve(table=tmp_path / "bundle")
    found = embed(url, "table", TEXTS)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    alone = [embed(url, "table", [text])[0] for text in TEXTS]
    np.testing.assert_array_equal(found, alone)
    body = {"model": "table", "input": TEXTS}
    data = httpx.post(f"{url}/v1/embeddings", json=body, timeout=60).json()["data"]
    vectors = np.array([each["embedding"] for each in data])
    np.testing.assert_allclose(vectors, expected, atol=TOLERANCE, rtol=0)


def test_vectors_are_those_of_model2vec(tmp_path: Path, serve: Callable[..., str]) -> None:
    """Unknown tokens have no part in them."""
    model2vec = pytest.importorskip("model2vec")
    folder = save_model2vec(tmp_path / "table")
    export(str(folder), tmp_path / "bundle")
    url = serve(table=tmp_path / "bundle")
    texts = [*TEXTS[:4], "she baked bread " * 10]
    expected = model2vec.StaticModel.from_pretrained(str(folder)).encode(texts)
    found = embed(url, "table", texts)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)
    unknown = embed(url, "table", ["~ ~", "~ a ~"])
    assert not unknown[0].any()
    np.testing.assert_allclose(unknown[1], embed(url, "table", ["a"])[0], atol=TOLERANCE)


def test_the_longest_text(tmp_path: Path) -> None:
    export(str(save_table(tmp_path / "table")), tmp_path / "a", max_length=900)
    assert load_bundle("a", tmp_path / "a").manifest.max_length == 900
    export(str(save_model2vec(tmp_path / "m2v")), tmp_path / "b")
    assert load_bundle("b", tmp_path / "b").manifest.max_length == 300


@pytest.mark.parametrize("save", [save_table, save_model2vec, save_small])
def test_int8_takes_a_quarter(
    save: Callable[[Path], Path], tmp_path: Path, serve: Callable[..., str]
) -> None:
    """Rows of integers with one scale each, within the quality gate; only if that is asked for."""
    folder = save(tmp_path / "table")
    manifest = export(str(folder), tmp_path / "int8", precision="int8")
    assert manifest.quality is not None
    assert manifest.quality.loss < 1e-4
    assert export(str(folder), tmp_path / "fp32", rounds=True).precision == "fp32"
    sizes = [(tmp_path / name / "model.onnx.data").stat().st_size for name in ("int8", "fp32")]
    assert sizes[0] < 0.35 * sizes[1]
    url = serve(fp32=tmp_path / "fp32", int8=tmp_path / "int8")
    found = [embed(url, name, TEXTS[:1], normalize=True) for name in ("fp32", "int8")]
    assert (found[0] * found[1]).sum() > 0.999


def test_what_is_refused(tmp_path: Path) -> None:
    folder = save_table(tmp_path / "table")
    with pytest.raises(ExportError, match="can only embed"):
        export(str(folder), tmp_path / "a", task="classify")
    with pytest.raises(ExportError, match="which int4 makes no faster"):
        export(str(folder), tmp_path / "a", precision="int4")
    short = save_model2vec(tmp_path / "short", mapping=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ExportError, match="fewer than its tokenizer"):
        export(str(short), tmp_path / "a")
    wide = save_model2vec(tmp_path / "wide", mapping=torch.full((59,), 7))
    with pytest.raises(ExportError, match="vectors that it does not have"):
        export(str(wide), tmp_path / "a")
    heavy = save_model2vec(tmp_path / "heavy", weights=torch.ones(60))
    with pytest.raises(ExportError, match="other numbers of weights"):
        export(str(heavy), tmp_path / "a")
    broken = save_model2vec(tmp_path / "nan", embeddings=torch.full((7, 24), torch.nan))
    with pytest.raises(ExportError, match="not finite"):
        export(str(broken), tmp_path / "a")
    (broken / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ExportError, match="cannot be read"):
        export(str(broken), tmp_path / "a")
