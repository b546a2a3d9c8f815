"""Adapters of encoders with heads of their own, against PEFT, in passes that they share."""

import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import pytest
import safetensors.torch
import torch
import transformers

from maskdial.bundle.adapter import read_adapter
from maskdial.errors import BundleError, InferenceError
from maskdial.kernels.installed import find_kernels
from maskdial.runtime.head import Head
from maskdial_export.export import export
from tests.conftest import MakeOnce
from tests.export.conftest import make_tokenizer
from tests.export.test_adapting import export_adapter, read, settings_of, weights_of
from tests.held import held
from tests.servers import engine_of, wait_for

New = Callable[[str], Path]
__all__ = ["export_adapter"]
pytestmark = [
    # Of peft 0.21 with transformers 5.23
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    pytest.mark.skipif(find_kernels("auto") is None, reason="the kernels are not built"),
]
TEXTS = ("a b c d e f", "the quick brown fox, and more", "x")
ADMIN = {"authorization": "Bearer open sesame"}


@pytest.fixture
def base(checkpoint: New, made_once: MakeOnce) -> Callable[..., tuple[Path, Path]]:
    """A checkpoint and its bundle, which returns hidden states."""

    def get(name: str, precision: str = "fp32") -> tuple[Path, Path]:
        source = checkpoint(name)
        folder = made_once(
            f"features/{name}-{precision}",
            lambda folder: export(str(source), folder, task="embed-all", precision=precision),
        )
        return source, folder

    return get


def train_head(source: Path, folder: Path, auto: str, seed: int, labels: int, **lora: Any) -> Any:
    """An adapter with a head, with random weights as if trained; returns the adapted model."""
    torch.manual_seed(seed)
    model = getattr(transformers, auto).from_pretrained(
        source, num_labels=labels, attn_implementation="eager"
    )
    kind = "TOKEN_CLS" if "Token" in auto else "SEQ_CLS"
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type=kind, lora_alpha=8, **lora))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    names = {str(index): f"{folder.name}-{index}" for index in range(labels)}
    (folder / "config.json").write_text(json.dumps({"id2label": names}))
    return adapted.eval()


def expected(adapted: Any, text: str) -> Any:
    tokenizer = make_tokenizer()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
        return adapted(input_ids=ids).logits[0].numpy()


CLASSIFY, TAG = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
QUERY_VALUE = {"r": 4, "target_modules": ["query", "value"]}
POOLED = {"modules_to_save": ["classifier", "pooler"]}
HEADS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "three": (CLASSIFY, 3, QUERY_VALUE | POOLED),
    "one": (CLASSIFY, 1, {"r": 2, "target_modules": ["key", "output.dense"]} | POOLED),
    "tags": (TAG, 5, {"r": 3, "target_modules": ["query", "dense"]}),
    "alone": (CLASSIFY, 7, {"r": 4, "target_modules": ["pooler.dense"]}),
}
"""Of BERT: with matrices in the body, in the body and the pooler, and in the pooler alone."""


def test_heads_of_one_base_share_passes(
    base: Any, tmp_path: Path, export_adapter: Any, start_server: Callable[..., Any]
) -> None:
    """Each text has the answer of PEFT, and the bits that it has alone."""
    source, bundle = base("bert-pretraining")
    adapted = {
        name: train_head(source, tmp_path / name, auto, seed, labels, **lora)
        for seed, (name, (auto, labels, lora)) in enumerate(HEADS.items())
    }
    for name in adapted:
        dest = tmp_path / "bundles" / name
        code, line = export_adapter(tmp_path / name, dest, "--base", bundle, "--checkpoint", source)
        assert code == 0, line
        manifest = read(dest)
        assert manifest["parity"]["difference"] < 1e-4
        assert manifest["head"]["rows"] == ("all" if name == "tags" else "first")
    assert read(tmp_path / "bundles" / "alone")["num_layers"] == 0
    server = start_server(
        models={"base": bundle},
        adapters={name: (tmp_path / "bundles" / name, "base") for name in adapted},
        model_dir=tmp_path / "bundles",
        admin_key="open sesame",
    )

    def ask(name: str, text: str) -> Any:
        route, parameters = "classify", dict[str, Any](function_to_apply="none")
        if name == "tags":
            route = "token-classify"
            parameters = {"aggregation_strategy": "none", "ignore_labels": []}
        body = {"model": name, "inputs": [text], "parameters": parameters}
        reply = httpx.post(f"{server.url}/{route}", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        (answer,) = reply.json()
        return answer

    asked = [(name, text) for name in adapted for text in TEXTS]
    alone = [ask(*each) for each in asked]
    for (name, text), answer in zip(asked, alone, strict=True):
        logits = expected(adapted[name], text)
        if name == "tags":
            best = logits[1:-1].argmax(axis=1)
            assert [each["entity"] for each in answer] == [f"tags-{index}" for index in best]
        else:
            found = {each["label"]: each["score"] for each in answer}
            scores = [found[f"{name}-{index}"] for index in range(len(logits))]
            np.testing.assert_allclose(scores, logits, rtol=0, atol=1e-4)
    engine = engine_of(server, "base")
    sizes: list[int] = []
    run = engine._run

    def counted(batch: Any, stop: Any) -> Any:
        sizes.append(len(batch))
        return run(batch, stop)

    engine._run = counted
    vectors = httpx.post(f"{server.url}/embed-all", json={"inputs": TEXTS[0]}).json()
    with ThreadPoolExecutor(len(asked) + 1) as pool, held(engine) as go_on:
        answers = [pool.submit(ask, *each) for each in asked]
        whole = pool.submit(httpx.post, f"{server.url}/embed-all", json={"inputs": TEXTS[0]})
        wait_for(lambda: len(engine._batcher) == len(asked) + 1)
        go_on()
        assert [each.result() for each in answers] == alone
        assert whole.result().json() == vectors
    assert max(sizes) > len(HEADS)  # so texts of several heads were in a pass
    ranked = httpx.post(
        f"{server.url}/rerank",
        json={"model": "one", "query": "a b", "texts": ["c", "d e"], "raw_scores": True},
    ).json()
    assert sorted(each["index"] for each in ranked) == [0, 1]
    body = {"model": "three", "query": "a", "texts": ["b"]}
    refused = httpx.post(f"{server.url}/rerank", json=body)
    assert "it does classify" in refused.json()["error"]
    by_name = httpx.post(f"{server.url}/models/three", json={"inputs": [TEXTS[0]]}).json()[0]
    assert {each["label"] for each in by_name} == {"three-0", "three-1", "three-2"}
    listed = {each["name"]: each for each in httpx.get(f"{server.url}/models").json()}
    assert "classify" in listed["three"]["tasks"]
    assert "token-classify" in listed["tags"]["tasks"]
    with ThreadPoolExecutor(2) as pool, held(engine) as go_on:  # it is removed while in use
        running = pool.submit(ask, "three", TEXTS[0])
        wait_for(lambda: len(engine._batcher) == 1)
        gone = {"model": "three"}
        unloading = pool.submit(
            httpx.post, f"{server.url}/models/unload", json=gone, headers=ADMIN, timeout=60
        )
        wait_for(
            lambda: (
                {each["name"]: each for each in httpx.get(f"{server.url}/models").json()}["three"][
                    "state"
                ]
                != "ready"
            )
        )
        go_on()
        assert running.result() == alone[0]
        assert unloading.result().status_code == 200
    server.stop()
    check_fit(tmp_path / "bundles" / "three")


def test_kept_answers_are_those_of_their_head(
    base: Any, tmp_path: Path, export_adapter: Any, start_server: Callable[..., Any]
) -> None:
    """Also where two have no matrices, so that the same pass serves both."""
    source, bundle = base("bert-pretraining")
    auto, labels, lora = HEADS["alone"]
    adapted = {
        name: train_head(source, tmp_path / name, auto, seed, labels, **lora)
        for seed, name in enumerate(("first", "second"))
    }
    for name in adapted:
        given = (tmp_path / name, tmp_path / f"{name}-bundle", "--base", bundle)
        code, line = export_adapter(*given, "--checkpoint", source)
        assert code == 0, line
    server = start_server(
        models={"base": bundle},
        adapters={name: (tmp_path / f"{name}-bundle", "base") for name in adapted},
        answer_cache_bytes=1_000_000,
    )
    for is_cached in (False, True):
        for name, model in adapted.items():
            parameters = {"function_to_apply": "none"}
            body = {"model": name, "inputs": [TEXTS[0]], "parameters": parameters}
            reply = httpx.post(f"{server.url}/classify", json=body, timeout=60)
            assert ("x-cached-tokens" in reply.headers) == is_cached, reply.text
            found = {each["label"]: each["score"] for each in reply.json()[0]}
            scores = [found[f"{name}-{index}"] for index in range(labels)]
            np.testing.assert_allclose(scores, expected(model, TEXTS[0]), rtol=0, atol=1e-4)
    server.stop()


def check_fit(dest: Path) -> None:
    """A head is refused for another base, or if its manifest has other labels."""
    adapter = read_adapter("mine", dest)
    settings, content = adapter.manifest.head, adapter.head
    assert settings is not None
    assert content is not None
    fewer = settings.model_copy(update={"labels": ("a", "b")})
    for its, graph, columns, why in (
        (fewer, content, 32, r"logits of shape \(3,\), and its manifest 2 labels"),
        (settings, content, 31, "its head cannot be computed"),
        (settings, b"no graph", 32, "its head is no ONNX graph"),
    ):
        with pytest.raises(BundleError, match=why):
            Head("mine", its, graph, columns)
    holders = sys.getrefcount(content)
    head = Head("mine", settings, content, 32)
    assert sys.getrefcount(content) == holders, "weights are in memory once"
    with pytest.raises(InferenceError, match="the head of adapter 'mine' failed"):
        head(np.zeros((1, 31), np.float32))


@pytest.mark.parametrize(
    ("name", "lora", "rows"),
    [
        ("roberta", QUERY_VALUE, "first"),
        ("qwen3", {"target_modules": ["q_proj", "v_proj"]}, "last"),
    ],
)
def test_heads_of_other_architectures(
    base: Any,
    tmp_path: Path,
    export_adapter: Any,
    name: str,
    lora: dict[str, Any],
    rows: str,
) -> None:
    source, bundle = base(name)
    train_head(source, tmp_path / "adapter", CLASSIFY, 3, 4, **lora)
    dest = tmp_path / "dest"
    code, line = export_adapter(tmp_path / "adapter", dest, "--base", bundle)
    assert code == 0, line
    assert read(dest)["head"]["rows"] == rows


def test_a_head_on_integers(base: Any, tmp_path: Path, export_adapter: Any) -> None:
    source, bundle = base("bert", "int8")
    train_head(source, tmp_path / "adapter", CLASSIFY, 3, 3, **QUERY_VALUE, **POOLED)
    code, line = export_adapter(tmp_path / "adapter", tmp_path / "dest", "--base", bundle)
    assert code == 0, line
    parity = read(tmp_path / "dest")["parity"]
    assert parity["difference"] < parity["tolerance"] < 0.3


def nameless(folder: Path) -> None:
    (folder / "config.json").unlink()


def misnamed(folder: Path) -> None:
    (folder / "config.json").write_text('{"id2label": {"1": "a", "2": "b", "3": "c"}}')


def too_few(folder: Path) -> None:
    (folder / "config.json").write_text('{"num_labels": 2}')


def embeddings(folder: Path) -> None:
    name = "base_model.model.bert.embeddings.word_embeddings.weight"
    weights_of(folder, **{name: torch.zeros(101, 32)})
    settings_of(folder, modules_to_save=["classifier", "pooler", "word_embeddings"])


def without_pooler(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    kept = {k: v for k, v in safetensors.torch.load_file(path).items() if "pooler" not in k}
    safetensors.torch.save_file(kept, path)
    settings_of(folder, modules_to_save=["classifier"])


FAULTS: dict[Callable[[Path], None], str] = {
    nameless: "does not name its labels",
    misnamed: "is not a name for each number",
    too_few: "does not fit the model",
    embeddings: "changes bert.embeddings.word_embeddings.weight, which is none of",
    without_pooler: "lacks 2 weights (for example bert.pooler.dense.bias)",
}


def test_heads_that_are_refused(
    base: Any, bundle: New, tmp_path: Path, export_adapter: Any
) -> None:
    source, features = base("bert", "int8")
    good = tmp_path / "good"
    train_head(source, good, CLASSIFY, 3, 3, **QUERY_VALUE, **POOLED)
    for number, (spoil, why) in enumerate(FAULTS.items()):
        folder = tmp_path / str(number)
        shutil.copytree(good, folder)
        spoil(folder)
        code, line = export_adapter(folder, tmp_path / "dest", "--base", features)
        assert (code, why in line) == (1, True), (spoil.__name__, line)
    code, line = export_adapter(good, tmp_path / "dest", "--base", bundle("bert"))
    assert (code, "exported with --task embed-all" in line) == (1, True), line
