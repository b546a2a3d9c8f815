"""The texts of tokens under a tokenizer that writes spaces as SentencePiece does."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.bundle.bundle import hash_files, read_manifests, write_manifest
from maskdial.bundle.manifest import TOKENIZER
from maskdial.registry.catalog import STARTER_FOLDER

TEXT = "The old king lived in a house by the sea."
PARAMETERS = {"max_new_tokens": 12, "top_n_tokens": 3, "details": True}


def make_bundle(folder: Path) -> Path:
    """The causal starter; its tokens that begin with a space are spelled with U+2581."""
    shutil.copytree(STARTER_FOLDER / "hybrid", folder, ignore=shutil.ignore_patterns("*.full.*"))
    path = folder / TOKENIZER
    spelled = path.read_text(encoding="utf-8").replace("\u0120", "\u2581")
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    tokenizer = json.loads(spelled) | {"decoder": spaces, "pre_tokenizer": spaces}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    (manifest,) = read_manifests("spaces", folder)
    files = hash_files(folder, manifest.files)
    write_manifest(folder, manifest.model_copy(update={"files": files}))
    return folder


@pytest.fixture(scope="module")
def http(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = make_bundle(tmp_path_factory.mktemp("bundles") / "spaces")
    server = start_server(models={"spaces": folder})
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()


def joined(tokens: list[dict[str, Any]]) -> str:
    return "".join(token["text"] for token in tokens)


def test_the_tokens_of_a_score_join_to_the_text(http: httpx.Client) -> None:
    (score,) = http.post("/score", json={"inputs": TEXT}).json()
    assert joined(score["tokens"]) == TEXT
    assert score["tokens"][0]["text"] == "The", "the space that SentencePiece prepends is no text"
    assert score["tokens"][1]["text"] == " old"


def test_the_tokens_of_a_prompt_join_to_it(http: httpx.Client) -> None:
    body = {"inputs": TEXT, "parameters": {"decoder_input_details": True, "max_new_tokens": 1}}
    prefill = http.post("/generate", json=body).json()["details"]["prefill"]
    assert joined(prefill[1:]) == TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_the_likeliest_tokens_read_as_the_one_that_was_chosen(
    http: httpx.Client, stream: bool
) -> None:
    body = {"inputs": "The", "parameters": PARAMETERS}
    if stream:
        with http.stream("POST", "/generate_stream", json=body) as reply:
            lines = [line.removeprefix("data:") for line in reply.iter_lines() if line]
        events = [json.loads(line) for line in lines if not line.startswith(":")]
        tokens = [event["token"] for event in events]
        tops = [event["top_tokens"] for event in events]
    else:
        details = http.post("/generate", json=body).json()["details"]
        tokens, tops = details["tokens"], details["top_tokens"]
    assert len(tokens) == len(tops) == 12
    for token, top in zip(tokens, tops, strict=True):
        assert len(top) == 3
        assert (top[0]["id"], top[0]["text"]) == (token["id"], token["text"])
    assert any(each["text"].startswith(" ") for top in tops for each in top)
