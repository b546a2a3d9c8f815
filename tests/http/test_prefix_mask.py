"""`"mask": "prefix"`: a prompt read in both directions, what follows from left to right."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch

from maskdial.kernels.installed import find_kernels
from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.test_joint_filling import Reference

PROMPT = "Once upon a"
OTHERS = ["One", "The longest of these is this one.", "x", "Once upon a time"]

pytestmark = pytest.mark.skipif(
    find_kernels("auto") is None, reason="the prefix mask needs the kernels, which are not built"
)

New = Callable[..., tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def server(deep_hybrid_bundle: Path, start_server: Callable[..., Any]) -> Iterator[Any]:
    models = {"dial": deep_hybrid_bundle, "starter": STARTER_FOLDER / "hybrid"}
    running = start_server(models=models, threads=1)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@torch.no_grad()
def continued(reference: Reference, prompt: str, num_tokens: int) -> tuple[list[int], list[float]]:
    """The likeliest continuation in torch, with the mask written out."""
    ids = reference.ids(prompt)
    num_prompt = len(ids)
    logprobs = []
    for _ in range(num_tokens):
        seen = torch.ones(len(ids), len(ids)).tril().bool()
        seen[:num_prompt, :num_prompt] = True
        mask = torch.where(seen, 0.0, float("-inf"))[None, None]
        logits = reference.model(ids[None], attention_mask=mask).logits[0, -1].double()
        own = logits.log_softmax(-1)
        logits[1] = -torch.inf  # a text has no masks
        best = int(logits.argmax())
        logprobs.append(float(own[best]))
        ids = torch.cat([ids, torch.tensor([best])])
    return ids[num_prompt:].tolist(), logprobs


def write(http: httpx.Client, prompt: str = PROMPT, **parameters: object) -> Any:
    body: dict[str, Any] = {"model": "dial", "mask": "prefix", "inputs": prompt}
    body["parameters"] = {"details": True, "max_new_tokens": 12, **parameters}
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("prompt", [PROMPT, *OTHERS])
def test_texts_are_those_of_torch(http: httpx.Client, reference: Reference, prompt: str) -> None:
    ids, logprobs = continued(reference, prompt, 12)
    tokens = write(http, prompt, ignore_eos=True)["details"]["tokens"]
    assert [token["id"] for token in tokens] == ids
    assert [token["logprob"] for token in tokens] == pytest.approx(logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def reference(deep_hybrid: Path, byte_tokenizer: New) -> Reference:
    return Reference(deep_hybrid, byte_tokenizer())
