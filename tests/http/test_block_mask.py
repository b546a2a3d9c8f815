"""`"mask": "block"`: texts by unmasking over the KV cache, step for step as torch does it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch

from maskdial.engine.philox import Philox
from maskdial.kernels.installed import find_kernels
from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.test_joint_filling import MASK, Reference, confidence

EOS = 2
PROMPT = "Once upon"

pytestmark = pytest.mark.skipif(
    find_kernels("auto") is None, reason="the block mask needs the kernels, which are not built"
)

New = Callable[..., tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def server(
    deep_hybrid_bundle: Path, generator_bundle: Path, start_server: Callable[..., Any]
) -> Iterator[Any]:
    models = {
        "dial": deep_hybrid_bundle,
        "starter": STARTER_FOLDER / "hybrid",
        "causal": generator_bundle,
    }
    running = start_server(models=models, threads=1, prefill_chunk_tokens=64)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def reference(deep_hybrid: Path, byte_tokenizer: New) -> Reference:
    return Reference(deep_hybrid, byte_tokenizer())


@torch.no_grad()
def block_logits(reference: Reference, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Logits for the positions of the last block, which begins at ``start``.

    The block and the token before it see each other; all tokens see what comes before them.
    """
    seen = torch.ones(len(ids), len(ids)).tril().bool()
    seen[start - 1 :] = True
    mask = torch.where(seen, 0.0, float("-inf"))[None, None]
    logits: torch.Tensor = reference.model(ids[None], attention_mask=mask).logits[0].double()
    return logits[start - 1 : -1]


def sample(
    reference: Reference,
    num_tokens: int,
    block_length: int,
    steps: int | None = None,
    order: str = "confidence",
    threshold: float | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[tuple[int, int, float]]:
    """The text's tokens, the pass of each, and its log-probability in it."""
    prompt = reference.ids(PROMPT)
    whole = len(prompt) + num_tokens
    x, found, at = prompt, {}, 0
    num_blocks = -(-num_tokens // block_length)
    for block in range(num_blocks):
        start = len(x)
        size = min(block_length, whole - start)
        x = torch.cat([x, torch.full((size,), MASK)])
        per_block = size
        if steps is not None:
            per_block = steps // num_blocks + (block < steps % num_blocks)
        step = 0
        while left := [i for i in range(start, start + size) if i not in found]:
            logits = block_logits(reference, x, start)[[i - start for i in left]]
            logprobs = logits.log_softmax(-1)
            written = logprobs.clone()
            written[:, [0, MASK]] = -torch.inf  # an end of text may be written
            if temperature:
                heights = (written / temperature).softmax(-1).cumsum(-1)
                u = [Philox().uniform(seed, 2 * (at * whole + position)) for position in left]
                chosen = torch.tensor(
                    [int(torch.searchsorted(h, h[-1] * v)) for h, v in zip(heights, u, strict=True)]
                )
            else:
                chosen = written.argmax(-1)
            own = logprobs.gather(-1, chosen[:, None])[:, 0]
            scores = own if order == "confidence" else confidence(order, written, chosen)
            ranked = scores.argsort(descending=True, stable=True).tolist()
            number = size // per_block + (step < size % per_block)
            if threshold is not None:
                ranked = [r for i, r in enumerate(ranked) if not i or own[r].exp() >= threshold]
            else:
                ranked = ranked[:number]
            for place in ranked:
                position = left[place]
                x[position] = chosen[place]
                found[position] = (int(chosen[place]), at, float(own[place]))
            at, step = at + 1, step + 1
        if EOS in x[start:]:
            break
    tokens = [found[i] for i in range(len(prompt), len(x))]
    ends = [i for i, (token, _, _) in enumerate(tokens) if token == EOS]
    return tokens[: ends[0] + 1] if ends else tokens


def write(http: httpx.Client, status: int = 200, model: str = "dial", **parameters: object) -> Any:
    body: dict[str, Any] = {"model": model, "mask": "block", "inputs": PROMPT}
    body["parameters"] = {"details": True, **parameters}
    reply = http.post("/generate", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


@pytest.mark.parametrize(
    "given",
    [
        {"max_new_tokens": 12},
        {"max_new_tokens": 20, "block_length": 8, "steps": 9},
        {"max_new_tokens": 24, "block_length": 8, "steps": 9, "order": "topk_margin"},
        {"max_new_tokens": 12, "block_length": 6, "steps": 4, "order": "entropy"},
        {"max_new_tokens": 9, "block_length": 2, "order": "left_to_right"},
        {"max_new_tokens": 24, "block_length": 8, "threshold": 0.02},
        {"max_new_tokens": 24, "block_length": 6, "steps": 12, "temperature": 0.8, "seed": 7},
    ],
    ids=str,
)
def test_texts_are_those_of_torch(
    http: httpx.Client, reference: Reference, given: dict[str, Any]
) -> None:
    reply = write(http, **given)
    given["num_tokens"] = given.pop("max_new_tokens")
    tokens = sample(reference, **{"block_length": given["num_tokens"], **given})
    details = reply["details"]["tokens"]
    assert [(each["id"], each["step"]) for each in details] == [(t, s) for t, s, _ in tokens]
    assert [each["logprob"] for each in details] == pytest.approx(
        [logprob for _, _, logprob in tokens], abs=1e-4
    )
    assert reply["generated_text"] == reference.tokenizer.decode([each[0] for each in tokens])
