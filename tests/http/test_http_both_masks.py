"""One model under both masks, served under one name: fills, writes and is listed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers

from maskdial import cli
from maskdial_client import Client

MASK = 1
TEXT = "The [MASK] sat."
PROMPT = "The"

New = Callable[..., tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def dial(hybrid_bundle: Path, start_server: Callable[..., Any]) -> Iterator[httpx.Client]:
    running = start_server(models={"dial": hybrid_bundle}, threads=1)
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield client
    running.stop()


@pytest.fixture(scope="module")
def reference(hybrid: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(hybrid, attn_implementation="eager")
    return model.eval()


def post(dial: httpx.Client, route: str, status: int = 200, **body: object) -> Any:
    reply = dial.post(route, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_fills_as_torch_under_the_full_mask(
    dial: httpx.Client, reference: Any, byte_tokenizer: New
) -> None:
    ids = byte_tokenizer().encode(TEXT).ids
    everything = torch.zeros(1, 1, len(ids), len(ids))
    with torch.no_grad():
        logits = reference(torch.tensor([ids]), attention_mask=everything).logits[0]
    expected = logits[ids.index(MASK) - 1].softmax(-1).topk(5)
    fillings = post(dial, "/fill-mask", inputs=TEXT, model="dial")
    assert [filling["token"] for filling in fillings] == expected.indices.tolist()
    assert [filling["score"] for filling in fillings] == pytest.approx(
        expected.values.tolist(), abs=1e-6
    )
    assert post(dial, "/fill-mask", inputs=[TEXT, "A longer text with [MASK] in it."])[0] == (
        fillings
    )


def test_writes_as_torch_under_the_causal_mask(
    dial: httpx.Client, reference: Any, byte_tokenizer: New
) -> None:
    parameters = {"max_new_tokens": 6, "do_sample": False, "details": True}
    reply = post(dial, "/generate", inputs=PROMPT, model="dial", parameters=parameters)
    ids = torch.tensor([byte_tokenizer().encode(PROMPT).ids])
    written = reference.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert [token["id"] for token in reply["details"]["tokens"]] == written.tolist()


def test_what_both_masks_can_do_is_done_by_the_causal_one(
    dial: httpx.Client, byte_tokenizer: New
) -> None:
    (score,) = post(dial, "/score", inputs=PROMPT, model="dial")
    assert score["method"] == "causal"
    assert post(dial, "/score", inputs=PROMPT) == [score]
    (tokens,) = post(dial, "/tokenize", inputs=PROMPT)
    assert [token["id"] for token in tokens] == byte_tokenizer().encode(PROMPT).ids


def test_the_route_of_the_name_fills_texts_with_masks(dial: httpx.Client) -> None:
    fillings = post(dial, "/fill-mask", inputs=TEXT)
    for mark in ("[MASK]", "<mask>"):
        assert post(dial, "/models/dial", inputs=TEXT.replace("[MASK]", mark)) == fillings
    assert post(dial, "/models/dial", inputs=[TEXT, TEXT]) == [fillings, fillings]
    (written,) = post(dial, "/models/dial", inputs=PROMPT, parameters={"max_new_tokens": 2})
    assert set(written) == {"generated_text"}


def test_a_mask_may_be_named_on_any_route(dial: httpx.Client) -> None:
    fillings = post(dial, "/fill-mask", inputs=TEXT)
    choices: list[dict[str, Any]] = [{"model": "dial:full"}, {"mask": "full"}]
    for choice in (*choices, {"model": "dial", "mask": "full"}):
        assert post(dial, "/fill-mask", inputs=TEXT, **choice) == fillings
    assert post(dial, "/models/dial:full", inputs=TEXT) == fillings
    assert post(dial, "/models/dial", inputs=TEXT, mask="full") == fillings
    error = post(dial, "/models/dial:full", 422, inputs=PROMPT)["error"]
    assert "no mask" in error  # it is filled, not continued
    parameters = {"max_new_tokens": 2, "do_sample": False}
    written = post(dial, "/generate", inputs=PROMPT, model="dial:causal", parameters=parameters)
    assert post(dial, "/models/dial:causal", inputs=PROMPT, parameters=parameters) == [written]
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    completed = post(dial, "/v1/completions", model="dial:causal", **body)
    assert completed["model"] == "dial"
    assert completed["choices"][0]["text"] == written["generated_text"]
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    refused = post(dial, "/v1/responses", 400, model="dial:full", input=PROMPT)["error"]
    assert refused["message"].startswith("input: model 'dial' has no chat template")
    assert refused["param"] == "input"
    refused = post(dial, "/v1/chat/completions", 400, model="dial:full", **chat)["error"]
    assert refused["message"].startswith("messages: model 'dial' has no chat template")
    assert refused["param"] == "messages"
    refused = post(dial, "/v1/completions", 400, model="dial:full", mask="causal", **body)["error"]
    assert "contradicts" in refused["message"]
    pseudo, causal = (
        post(dial, "/score", inputs=PROMPT, model="dial", mask=mask)[0]["method"]
        for mask in ("full", "causal")
    )
    assert (pseudo, causal) == ("pseudo", "causal")
    assert dial.get("/v1/models/dial:full").json()["id"] == "dial"


def test_a_task_of_neither_mask(dial: httpx.Client) -> None:
    error = post(dial, "/classify", 422, inputs=TEXT, model="dial")["error"]
    assert (
        error
        == "model 'dial' cannot do classify; it does generate, score, tokenize, fill-mask, infill"
    )


def test_listed_for_each_mask(dial: httpx.Client) -> None:
    listed = [(each["name"], each["family"], each["ready"]) for each in dial.get("/models").json()]
    assert listed == [("dial", "causal", True), ("dial", "masked", True)]
    with Client(str(dial.base_url)) as client:
        tasks = [model.tasks for model in client.models()]
        assert tasks == [
            ("generate", "score", "tokenize"),
            ("fill-mask", "infill", "score", "tokenize"),
        ]
        assert [model.name for model in client.info().models] == ["dial", "dial"]


def test_engines_report_apart_and_requests_by_name(dial: httpx.Client) -> None:
    post(dial, "/fill-mask", inputs=TEXT)
    lines = dict(
        line.rsplit(" ", 1)
        for line in dial.get("/metrics").text.splitlines()
        if not line.startswith("#")
    )
    assert lines['maskdial_engine_up{model="dial"}'] == "1.0"
    assert lines['maskdial_engine_up{model="dial:full"}'] == "1.0"
    assert float(lines['maskdial_batch_size_count{model="dial:full"}']) >= 1
    filled = 'maskdial_requests_total{model="dial",outcome="ok",route="/fill-mask"}'
    assert float(lines[filled]) >= 1
    assert not any("requests_total" in line and "dial:full" in line for line in lines)


def test_readiness_is_red_once_both_engines_are_down(
    hybrid_bundle: Path, start_server: Callable[..., Any]
) -> None:
    running = start_server(models={"dial": hybrid_bundle}, threads=1)
    try:
        causal, full = running.server.config.app.state.context.models.named("dial")
        full.engine.stop(0)
        assert httpx.get(f"{running.url}/health/ready").status_code == 200
        causal.engine.stop(0)
        reply = httpx.get(f"{running.url}/health/ready")
        assert reply.status_code == 503
        assert reply.json() == {"status": "engine down", "models": ["dial", "dial:full"]}
    finally:
        running.stop()


def test_commands_on_a_model_with_both_masks(
    dial: httpx.Client, hybrid_bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(hybrid_bundle)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("hashes verified") == 2
    assert "model.full.onnx" in shown
    url = ["--url", str(dial.base_url), "--model", "dial"]
    assert cli.main(["fill", TEXT, *url]) == 0
    assert cli.main(["generate", PROMPT, "--max-new-tokens", "2", *url]) == 0
