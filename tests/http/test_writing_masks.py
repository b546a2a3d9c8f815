"""`"mask": "prefix"`: a prompt read in both directions, and a text behind it from left to right.
`"mask": "block"`: texts by unmasking over the KV cache. Both as torch does it with the mask written
out, step for step.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch

from maskdial.bundle.manifest import FULL_GRAPH, FULL_MANIFEST
from maskdial.engine.philox import Philox
from maskdial.kernels.installed import find_kernels
from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.test_joint_filling import MASK, Reference, confidence
from tests.http.written import WAYS
from tests.servers import metric, wait_for

EOS = 2
PROMPT = "Once upon"
PROMPTS = [PROMPT, "One", "The longest of these is this one.", "x"]

pytestmark = pytest.mark.skipif(
    find_kernels("auto") is None, reason="these masks need the kernels, which are not built"
)

New = Callable[..., tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def server(
    deep_hybrid_bundle: Path,
    start_server: Callable[..., Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    causal = tmp_path_factory.mktemp("masks") / "causal"
    shutil.copytree(deep_hybrid_bundle, causal)
    for name in (FULL_MANIFEST, FULL_GRAPH):
        (causal / name).unlink()
    models = {
        "dial": deep_hybrid_bundle,
        "starter": STARTER_FOLDER / "hybrid",
        "causal": causal,
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
def continued(reference: Reference, prompt: str, num_tokens: int) -> tuple[list[int], list[float]]:
    """The likeliest continuation, whose prompt's tokens see each other."""
    ids = reference.ids(prompt)
    num_prompt = len(ids)
    logprobs = []
    for _ in range(num_tokens):
        seen = torch.ones(len(ids), len(ids)).tril().bool()
        seen[:num_prompt, :num_prompt] = True
        mask = torch.where(seen, 0.0, float("-inf"))[None, None]
        logits = reference.model(ids[None], attention_mask=mask).logits[0, -1].double()
        own = logits.log_softmax(-1)
        logits[MASK] = -torch.inf  # a text has no masks
        best = int(logits.argmax())
        logprobs.append(float(own[best]))
        ids = torch.cat([ids, torch.tensor([best])])
    return ids[num_prompt:].tolist(), logprobs


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


def post(http: httpx.Client, status: int = 200, route: str = "/generate", **body: Any) -> Any:
    reply = http.post(route, json={"model": "dial", **body})
    assert reply.status_code == status, reply.text
    return reply.json()


def write(http: httpx.Client, mask: str, prompt: str = PROMPT, **parameters: object) -> Any:
    return post(http, mask=mask, inputs=prompt, parameters={"details": True, **parameters})


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prefix_texts_are_those_of_torch(
    http: httpx.Client, reference: Reference, prompt: str
) -> None:
    ids, logprobs = continued(reference, prompt, 8)
    reply = write(http, "prefix", prompt, max_new_tokens=8, ignore_eos=True)
    tokens = reply["details"]["tokens"]
    assert [token["id"] for token in tokens] == ids
    assert [token["logprob"] for token in tokens] == pytest.approx(logprobs, abs=1e-4)


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
def test_block_texts_are_those_of_torch(
    http: httpx.Client, reference: Reference, given: dict[str, Any]
) -> None:
    reply = write(http, "block", **given)
    given["num_tokens"] = given.pop("max_new_tokens")
    tokens = sample(reference, **{"block_length": given["num_tokens"], **given})
    details = reply["details"]["tokens"]
    assert [(each["id"], each["step"]) for each in details] == [(t, s) for t, s, _ in tokens]
    assert [each["logprob"] for each in details] == pytest.approx(
        [logprob for _, _, logprob in tokens], abs=1e-4
    )
    assert reply["generated_text"] == reference.tokenizer.decode([each[0] for each in tokens])


def requests() -> list[dict[str, Any]]:
    """Texts under every mask of writing, drawn and not."""
    drawn = {"temperature": 1.0, "max_new_tokens": 24, "details": True}
    return [
        {"mask": mask, "inputs": prompt, "parameters": {**drawn, **more, "seed": seed}}
        for seed, prompt in enumerate(("The old king lived", "One day", "She said that the"))
        for mask, more in (
            ("block", {"block_length": 8, "steps": 9}),
            ("block", {"block_length": 24, "threshold": 0.2}),
            ("prefix", {}),
            ("causal", {}),
        )
    ]


def test_texts_are_the_same_to_the_last_bit_in_company(http: httpx.Client) -> None:
    """int8, over a KV cache of integers; the passes are shared."""

    def answer(body: dict[str, Any]) -> Any:
        return post(http, **{"model": "starter", **body})

    def passes() -> float:
        return metric(http, "maskdial_batch_size_count", model="starter")

    bodies = requests()
    began = passes()
    alone = [answer(body) for body in bodies]
    num_alone = passes() - began
    assert len({each["generated_text"] for each in alone}) == len(bodies)
    with ThreadPoolExecutor(len(bodies)) as threads:
        assert list(threads.map(answer, bodies)) == alone
    assert passes() - began - num_alone < 0.7 * num_alone


def test_copies_of_a_prefix_prompt_are_read_once(http: httpx.Client) -> None:
    def write_all(**parameters: object) -> list[str]:
        sampled = {"temperature": 1.0, "max_new_tokens": 8, **parameters}
        replies = post(http, mask="prefix", inputs=PROMPTS[2], parameters=sampled)
        return (
            [each["generated_text"] for each in replies]
            if "n" in sampled
            else [replies["generated_text"]]
        )

    alone = [write_all(seed=seed)[0] for seed in (5, 6, 7)]
    read = metric(http, "maskdial_prompt_tokens_total", model="dial")
    assert write_all(n=3, seed=5) == alone
    assert metric(http, "maskdial_prompt_tokens_total", model="dial") - read < 40


def test_streams_send_a_block_when_it_is_done(http: httpx.Client) -> None:
    parameters: dict[str, Any] = {
        "max_new_tokens": 12,
        "block_length": 4,
        "steps": 6,
        "order": "entropy",
    }
    body = {"model": "dial:block", "inputs": PROMPT, "parameters": parameters}
    whole = write(http, "block", **parameters)
    generated = metric(http, "maskdial_generation_tokens_total", model="dial")
    shown = body | {"parameters": {**parameters, "stream_unmasking": True}}
    for asked in (body, shown):
        lines = http.post("/generate_stream", json=asked).text.split("\n\n")
        events = [json.loads(line.removeprefix("data:")) for line in lines if line]
        passes = [event for event in events if "unmasked" in event]
        events = [event for event in events if "token" in event]
        assert [event["token"] for event in events] == whole["details"]["tokens"]
        assert events[-1]["generated_text"] == whole["generated_text"]
        found = sorted(t["index"] for each in passes for t in each["unmasked"])
        assert found == (list(range(1, 13)) if asked is shown else [])
    assert metric(http, "maskdial_generation_tokens_total", model="dial") - generated == 24
    chunks = http.post(
        "/v1/completions",
        json={"model": "dial:block", "prompt": PROMPT, "max_tokens": 12, "stream": True}
        | {"block_length": 4, "steps": 6, "order": "entropy"},
    ).text.split("\n\n")
    texts = [json.loads(each.removeprefix("data: "))["choices"][0]["text"] for each in chunks[:-2]]
    assert len(texts) == 3
    assert "".join(texts) == whole["generated_text"]


def test_a_text_whose_reader_leaves_gives_up_its_slot(server: Any, http: httpx.Client) -> None:
    body = {"model": "starter:block", "inputs": "One", "parameters": {"max_new_tokens": 400}}
    with http.stream("POST", "/generate_stream", json=body) as reply:
        next(reply.iter_lines())
    wait_for(lambda: metric(http, "maskdial_requests_running", model="starter") == 0)
    late = http.post("/generate", json=body | {"timeout": 0.01})
    assert late.status_code == 504
    wait_for(lambda: metric(http, "maskdial_requests_running", model="starter") == 0)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            {"mask": "block", "model": "causal", "inputs": "a"},
            "mask: model 'causal' fills no masks, so it cannot write under the block mask",
        ),
        (
            {"mask": "prefix", "model": "starter", "inputs": "a " * 70},
            "the prompt has 72 tokens; under the prefix mask it is read in one pass, of at most 64",
        ),
        (
            {"mask": "prefix", "inputs": "a", "parameters": {"decoder_input_details": True}},
            "parameters.decoder_input_details: under the prefix mask, each token of the prompt",
        ),
        (
            {"mask": "block", "inputs": "a", "parameters": {"steps": 0}},
            "parameters.steps: must be at least 1, not 0",
        ),
        (
            {"mask": "block", "inputs": "a", "parameters": {"max_new_tokens": 4, "steps": 5}},
            "parameters.steps: must be between 1, the number of blocks, and 4, the tokens to write",
        ),
        (
            {"mask": "block", "inputs": "a", "parameters": {"block_length": 101}},
            "parameters.block_length: must be at most 62, the tokens to write, not 101",
        ),
        (
            {"mask": "block", "inputs": "a", "parameters": {"block_length": 40}},
            "parameters.block_length: must be at most 31: a pass reads two blocks, and at most 64 "
            "tokens",
        ),
        (
            {"mask": "block", "inputs": "a", "parameters": {"max_new_tokens": 63}},
            "inputs: has 2 tokens, and 63 are to be written; model 'dial' takes 64 together",
        ),
        (
            {"mask": "block", "inputs": "a", "parameters": {"num_beams": 2}},
            "parameters.num_beams: is for the causal mask; model 'dial' writes by unmasking",
        ),
        (
            {"mask": "block", "inputs": "a[MASK]"},
            "inputs: has a mask of its own; send texts with masks to /fill-mask",
        ),
        (
            {"mask": "block", "model": "dial:causal", "inputs": "a"},
            "model 'dial' contradicts the mask 'block'; give one of them",
        ),
    ],
)
def test_what_cannot_be_written_is_refused(
    http: httpx.Client, body: dict[str, Any], sentence: str
) -> None:
    assert post(http, 422, **body)["error"].startswith(sentence)


def test_other_tasks_know_no_masks_of_writing(http: httpx.Client) -> None:
    refused = post(http, 422, "/score", mask="prefix", inputs=[PROMPT])
    assert refused["error"] == "the prefix mask is for writing texts, not score"
    refused = post(http, 422, "/fill-mask", model="dial:block", inputs="a[MASK]")
    assert refused["error"] == "the block mask is for writing texts, not fill-mask"


@pytest.mark.parametrize("way", [name for name in WAYS if not WAYS[name].chats])
def test_every_dialect_writes_block_by_block(http: httpx.Client, way: str) -> None:
    expected = write(http, "block", max_new_tokens=12)["generated_text"]
    assert WAYS[way].ask(http, "dial:block", PROMPT, 12) == expected
    if way != "kserve tensors":
        assert WAYS[way].stream(http, "dial:block", PROMPT, 12) == expected
