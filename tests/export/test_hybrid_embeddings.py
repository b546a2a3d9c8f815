"""BGE-M3's layout: dense, sparse and token vectors from one pass, by FlagEmbedding's arithmetic."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from maskdial_export.checkpoint.source import find
from maskdial_export.errors import ExportError
from maskdial_export.export import export
from maskdial_export.quantize.gate import Gate

TEXTS = ["the baker repaired the old bridge", "a", "the the bridge, nobody at all. the"]
TOKEN_DIMENSION = 24
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def source(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with the two heads beside it; its unknown token has no weight."""
    folder = tmp_path_factory.mktemp("hybrid") / "m3"
    shutil.copytree(checkpoint("xlm-roberta-embed"), folder)
    columns = json.loads((folder / "config.json").read_text())["hidden_size"]
    draw = torch.Generator().manual_seed(7)
    for name, outputs in (("sparse_linear.pt", 1), ("colbert_linear.pt", TOKEN_DIMENSION)):
        state = {
            "weight": torch.randn(outputs, columns, generator=draw),
            "bias": torch.randn(outputs, generator=draw) * 0.1,
        }
        torch.save(state, folder / name)
    names = {"cls": "[CLS]", "eos": "[SEP]", "pad": "[PAD]", "unk": "[UNK]"}
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(settings | {f"{key}_token": each for key, each in names.items()}))
    return folder


@pytest.fixture(scope="module")
def url(
    source: Path, start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("bundles")
    manifest = export(str(source), folder / "m3", allow_pickle=True)
    assert manifest.task == "embed-hybrid"
    assert manifest.batch_invariant
    server = start_server(models={"m3": folder / "m3"})
    yield server.url
    server.stop()


def expected(source: Path, text: str) -> dict[str, Any]:
    """By FlagEmbedding's M3 (modeling.py, m3.py), written anew: `BGEM3FlagModel.encode`."""
    model = transformers.XLMRobertaModel.from_pretrained(source, add_pooling_layer=False).eval()
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode(text).ids
    with torch.no_grad():
        hidden = model(torch.tensor([ids]))[0][0]
        heads = [torch.load(source / f"{name}_linear.pt") for name in ("sparse", "colbert")]
        weigh, project = (torch.nn.functional.linear(hidden, *each.values()) for each in heads)
    unused = {tokenizer.token_to_id(f"[{name}]") for name in ("CLS", "SEP", "PAD", "UNK")}
    weights: dict[int, float] = {}
    for token, weight in zip(ids, torch.relu(weigh[:, 0]).tolist(), strict=True):
        if token not in unused and weight > weights.get(token, 0):
            weights[token] = weight
    tokens = torch.nn.functional.normalize(project[1:], dim=-1)
    dense = torch.nn.functional.normalize(hidden[0], dim=-1)
    return {"dense": dense.numpy(), "sparse": weights, "multi_vector": tokens.numpy()}


def ask(url: str, route: str, **body: Any) -> Any:
    reply = httpx.post(f"{url}{route}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def weights_of(vector: list[dict[str, Any]]) -> dict[int, float]:
    assert [each["index"] for each in vector] == sorted(each["index"] for each in vector)
    return {each["index"]: each["value"] for each in vector}


def test_all_kinds_are_flag_embeddings(source: Path, url: str) -> None:
    replies = ask(url, "/embed-hybrid", inputs=TEXTS)
    found = []
    for text, reply in zip(TEXTS, replies, strict=True):
        right = expected(source, text)
        np.testing.assert_allclose(reply["dense"], right["dense"], atol=TOLERANCE)
        np.testing.assert_allclose(reply["multi_vector"], right["multi_vector"], atol=TOLERANCE)
        weights = weights_of(reply["sparse"])
        assert weights.keys() == right["sparse"].keys()
        for token, weight in right["sparse"].items():
            assert weights[token] == pytest.approx(weight, abs=TOLERANCE)
        found.append(weights)
    assert any(len(each) > 2 for each in found)


def test_each_kind_has_its_route_with_the_same_bits(url: str) -> None:
    """Alone as in company, and whichever kinds are wanted."""
    replies = ask(url, "/embed-hybrid", inputs=TEXTS)
    for route, kind in (
        ("/embed", "dense"),
        ("/embed-sparse", "sparse"),
        ("/embed-all", "multi_vector"),
    ):
        assert ask(url, route, inputs=TEXTS) == [reply[kind] for reply in replies]
        assert ask(url, "/embed-hybrid", inputs=TEXTS[2], outputs=[kind]) == {
            kind: replies[2][kind]
        }
    assert ask(url, "/embed-all", inputs=TEXTS, prompt_name="query") == [
        reply["multi_vector"] for reply in replies
    ]
    (vector,) = ask(url, "/v1/embeddings", input=TEXTS[:1])["data"]
    assert vector["embedding"] == replies[0]["dense"]
    cosine = np.dot(replies[0]["dense"], replies[2]["dense"])
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    assert ask(url, "/similarity", inputs=inputs)[1] == pytest.approx(cosine, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"outputs": []}, "outputs: must have between 1 and 3 kinds"),
        ({"outputs": ["dens"]}, "outputs[0]: Input should be 'dense', 'sparse' or 'multi_vector'"),
        ({"prompt_name": "song"}, "prompt_name: model 'm3' has no prompt 'song'"),
    ],
)
def test_kinds_that_cannot_be_given(url: str, body: dict[str, Any], words: str) -> None:
    reply = httpx.post(f"{url}/embed-hybrid", json={"inputs": "a", **body})
    assert reply.status_code == 422
    assert reply.json()["error"].startswith(words)


def test_int8_keeps_the_kinds(source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXTS) * 4)
    gate = Gate(text=text, max_loss=1.0)
    manifest = export(str(source), tmp_path / "m3", allow_pickle=True, precision="int8", gate=gate)
    assert manifest.embedding is not None
    assert manifest.embedding.hybrid is not None
    assert manifest.embedding.hybrid.token_dimension == TOKEN_DIMENSION


def test_heads_that_are_missing_or_pickles(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"are pickles, .* pass --allow-pickle"):
        find(str(source), "auto", revision=None, allow_pickle=False)
    assert find(str(source), "embed", revision=None, allow_pickle=False).task == "embed"
    broken = tmp_path / "m3"
    shutil.copytree(source, broken)
    torch.save({"weight": torch.zeros(1, 5), "bias": torch.zeros(1)}, broken / "sparse_linear.pt")
    with pytest.raises(ExportError, match=r"must have \d+ columns"):
        export(str(broken), tmp_path / "bundle", allow_pickle=True)
    (broken / "sparse_linear.pt").write_bytes(b"no pickle")
    with pytest.raises(ExportError, match=r"sparse_linear.pt has no linear layer"):
        export(str(broken), tmp_path / "bundle", allow_pickle=True)
    (broken / "sparse_linear.pt").unlink()
    assert find(str(broken), "auto", revision=None, allow_pickle=True).task != "embed-hybrid"
    with pytest.raises(ExportError, match=r"has no sparse_linear\.pt"):
        find(str(broken), "embed-hybrid", revision=None, allow_pickle=True)
