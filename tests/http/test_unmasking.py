"""`/generate` under the full mask, step for step as the published samplers do it in torch."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch

from tests.http.test_joint_filling import MASK, Reference, confidence

EOS = 2
PROMPT = "Once upon"

New = Callable[..., tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def http(hybrid_bundle: Path, start_server: Callable[..., Any]) -> Iterator[httpx.Client]:
    running = start_server(models={"dial": hybrid_bundle}, threads=1)
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield client
    running.stop()


@pytest.fixture(scope="module")
def reference(hybrid: Path, byte_tokenizer: New) -> Reference:
    return Reference(hybrid, byte_tokenizer())


def sample(
    reference: Reference,
    num_tokens: int,
    block_length: int,
    steps: int,
    remasking: str = "confidence",
    threshold: float | None = None,
) -> tuple[list[int], list[int]]:
    """LLaDA's `generate` without noise, or Fast-dLLM's: the ids, and the pass of each."""
    prompt = reference.ids(PROMPT)
    x = torch.cat([prompt, torch.full((num_tokens,), MASK)])
    passes = torch.full_like(x, -1)
    num_blocks = num_tokens // block_length
    assert num_tokens % block_length == 0
    assert steps % num_blocks == 0
    at = 0
    for block in range(num_blocks):
        end = len(prompt) + (block + 1) * block_length
        num_masked = int((x[:end] == MASK).sum())
        per_step = steps // num_blocks
        base, remainder = divmod(num_masked, per_step)
        for step in range(num_masked):
            masked = x == MASK
            masked[end:] = False
            if not masked.any():
                break
            logprobs = reference.logits(x).log_softmax(-1)
            logprobs[:, [0, MASK]] = -torch.inf  # an end of text may be written
            x0 = logprobs.argmax(-1)
            scores = torch.where(masked, confidence(remasking, logprobs, x0), -torch.inf)
            num_transferred = base + (step < remainder) if threshold is None else int(masked.sum())
            chosen = scores.topk(num_transferred).indices
            if threshold is not None:
                keep = scores[chosen] >= threshold
                keep[0] = True
                chosen = chosen[keep]
            x[chosen] = x0[chosen]
            passes[chosen] = at
            at += 1
    written = x[len(prompt) :].tolist()
    length = written.index(EOS) + 1 if EOS in written else num_tokens
    return written[:length], passes[len(prompt) :][:length].tolist()


def write(http: httpx.Client, status: int = 200, **parameters: object) -> Any:
    body: dict[str, Any] = {"model": "dial", "mask": "full", "inputs": PROMPT}
    body["parameters"] = {"details": True, **parameters}
    reply = http.post("/generate", json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


@pytest.mark.parametrize(
    ("parameters", "given"),
    [
        ((12, 12, 12), {}),
        ((12, 4, 6), {"block_length": 4, "steps": 6}),
        ((24, 8, 9, "topk_margin"), {"block_length": 8, "steps": 9, "order": "topk_margin"}),
        ((12, 6, 4, "entropy"), {"block_length": 6, "steps": 4, "order": "entropy"}),
        ((16, 8, 16, "confidence", 0.015), {"block_length": 8, "threshold": 0.015}),
    ],
)
def test_texts_are_those_of_the_published_samplers(
    http: httpx.Client, reference: Reference, parameters: Any, given: dict[str, Any]
) -> None:
    ids, passes = sample(reference, *parameters)
    reply = write(http, max_new_tokens=parameters[0], **given)
    tokens = reply["details"]["tokens"]
    assert [token["id"] for token in tokens] == ids
    assert [token["step"] for token in tokens] == passes
    assert reply["generated_text"] == reference.tokenizer.decode(ids)
    assert reply["details"]["generated_tokens"] == len(ids)


def test_a_block_that_ends_the_text_is_the_last(http: httpx.Client, reference: Reference) -> None:
    seeds = (
        write(http, max_new_tokens=40, block_length=8, temperature=3, seed=seed)
        for seed in range(40)
    )
    ended = next(each for each in seeds if each["details"]["finish_reason"] == "eos_token")
    tokens = ended["details"]["tokens"]
    assert [token["id"] for token in tokens].index(EOS) == len(tokens) - 1
    assert tokens[-1]["special"]
    assert max(token["step"] for token in tokens) < -(-len(tokens) // 8) * 8


def test_streams_send_a_block_when_it_is_done(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 12, "block_length": 4, "temperature": 1, "seed": 3}
    body = {"model": "dial:full", "inputs": PROMPT, "parameters": parameters}
    reply = http.post("/generate_stream", json=body)
    lines = reply.text.split("\n\n")
    events = [json.loads(line.removeprefix("data:")) for line in lines if line]
    whole = write(http, **parameters)
    assert [event["token"] for event in events] == whole["details"]["tokens"]
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["generated_text"] == whole["generated_text"]
    assert [event["generated_text"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["details"] == {
        name: value for name, value in whole["details"].items() if name not in ("tokens", "prefill")
    }
    joined = http.post(
        "/generate", json=body | {"parameters": parameters | {"return_full_text": True}}
    )
    assert joined.json() == {"generated_text": PROMPT + whole["generated_text"]}


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        (
            {"steps": 2, "max_new_tokens": 12, "block_length": 4},
            "parameters.steps: must be between 3",
        ),
        ({"steps": 13, "max_new_tokens": 12}, "parameters.steps: must be between 1, the number of"),
        ({"steps": 3, "threshold": 0.9}, "parameters.threshold: with it, steps means nothing"),
        ({"block_length": 13, "max_new_tokens": 12}, "parameters.block_length: must be at most 12"),
        ({"max_new_tokens": 60}, "inputs: has 10 tokens, and 60 are to be written; model 'dial'"),
        ({"top_p": 0.5}, "parameters.top_p: is for the causal mask; model 'dial' writes by"),
        ({"order": "best"}, "parameters.order: "),
    ],
)
def test_what_cannot_be_unmasked_is_refused(
    http: httpx.Client, parameters: dict[str, Any], sentence: str
) -> None:
    assert write(http, 422, **parameters)["error"].startswith(sentence)


def test_prompts_that_cannot_be_unmasked_are_refused(http: httpx.Client) -> None:
    def error(**body: object) -> str:
        reply = http.post("/generate", json={"model": "dial", "mask": "full", **body})
        assert reply.status_code == 422, reply.text
        return str(reply.json()["error"])

    sentence = "inputs[1]: has a mask of its own; send texts with masks to /fill-mask"
    assert error(inputs=["a", "b [MASK]"], parameters={"max_new_tokens": 1}) == sentence
    assert error(inputs="a [MASK]", parameters={"max_new_tokens": 1}) == (
        "inputs: has a mask of its own; send texts with masks to /fill-mask"
    )
    chat = [{"role": "user", "content": "a"}]
    assert error(messages=chat).startswith("messages: model 'dial' has no chat template")
    causal = error(inputs="a", mask="causal", parameters={"steps": 2})
    sentence = "parameters.steps: is for the full and the block mask; set mask to one of them"
    assert causal == sentence
