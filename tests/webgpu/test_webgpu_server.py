"""Both families on a WebGPU device behind a real server: what they answer is the CPU's answer."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.bundle.bundle import load_bundle, load_bundles
from maskdial.config import load_config
from maskdial.errors import BundleError
from maskdial.metrics import Metrics
from maskdial.registry import causal as causal_models
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.golden import masked_logits
from maskdial.registry.loading import start_model
from maskdial.runtime.providers import webgpu
from maskdial.runtime.providers.webgpu_probe import Device
from maskdial.runtime.session import Session, SessionOptions
from tests.servers import metric, wait_for
from tests.webgpu.conftest import assert_alike

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("adapter")]

SETTINGS: dict[str, Any] = {
    "provider": "webgpu",
    "slots": 3,
    "threads": 1,
}
PROMPTS = ["Once upon a time", "the little dog ran away and", "a"]
LONG = "Tom had a red ball and a blue kite"


def asks(**parameters: object) -> dict[str, object]:
    return {"max_new_tokens": 6, "details": True} | parameters


@pytest.fixture(scope="module")
def servers(
    adapter: None, start_server: Callable[..., Any], hybrid_bundle: Path
) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """On the device, and on the CPU."""
    models = {"dial": hybrid_bundle}
    for bundle in load_bundles("dial", hybrid_bundle):  # compiles shaders, without a deadline
        start_model(bundle, load_config(SETTINGS), Metrics()).stop()
    running = [
        start_server(models=models, **SETTINGS),
        start_server(models=models, provider="cpu"),
    ]
    clients = [httpx.Client(base_url=each.url, timeout=120) for each in running]
    yield clients[0], clients[1]
    for client, server in zip(clients, running, strict=True):
        client.close()
        server.stop()


def generate(http: httpx.Client, prompt: str, parameters: dict[str, object]) -> Any:
    reply = http.post("/generate", json={"inputs": prompt, "parameters": parameters})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_texts_in_company_are_the_cpus(servers: tuple[httpx.Client, httpx.Client]) -> None:
    """More at once than there are slots: prefill beside steps, and steps of ragged rows."""
    device, cpu = servers
    parameters = [
        asks(),
        asks(do_sample=True, seed=3, top_p=0.9),
        asks(n=2, do_sample=True, seed=5),
        asks(grammar={"type": "regex", "value": "[a-z]{3} [0-9]+"}),
    ]
    asked = [(prompt, each) for each in parameters for prompt in PROMPTS]
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda each: generate(device, *each), asked))
    for reply, each in zip(replies, asked, strict=True):
        wanted = generate(cpu, *each)
        pairs = zip(reply, wanted, strict=True) if isinstance(reply, list) else [(reply, wanted)]
        for one, other in pairs:
            assert_alike(one, other)


def test_a_prompt_in_chunks_and_again_from_the_prefix_cache(
    servers: tuple[httpx.Client, httpx.Client],
) -> None:
    device, cpu = servers
    wanted = generate(cpu, LONG, asks(decoder_input_details=True))
    for _ in range(2):
        assert_alike(generate(device, LONG, asks()), wanted)
    usage = device.post(
        "/v1/completions", json={"model": "dial", "prompt": LONG, "max_tokens": 2}
    ).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 32
    scored = generate(device, LONG, asks(decoder_input_details=True))
    assert [token["logprob"] for token in scored["details"]["prefill"][1:]] == pytest.approx(
        [token["logprob"] for token in wanted["details"]["prefill"][1:]], abs=1e-4
    )


def test_a_stream(servers: tuple[httpx.Client, httpx.Client]) -> None:
    device, cpu = servers
    body = {"inputs": PROMPTS[0], "parameters": asks()}
    with device.stream("POST", "/generate_stream", json=body) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data:")]
    events = [json.loads(line.removeprefix("data:")) for line in lines]
    wanted = generate(cpu, PROMPTS[0], asks())
    ids = [event["token"]["id"] for event in events]
    assert ids == [token["id"] for token in wanted["details"]["tokens"]]
    assert events[-1]["generated_text"] == wanted["generated_text"]


def test_beams_are_the_cpus(servers: tuple[httpx.Client, httpx.Client]) -> None:
    """Their keys and values are copied from slot to slot, on the device."""
    device, cpu = servers
    asked = asks(num_beams=3, max_new_tokens=4)
    assert_alike(generate(device, PROMPTS[1], asked), generate(cpu, PROMPTS[1], asked))


def test_a_client_that_leaves_frees_its_slot(servers: tuple[httpx.Client, httpx.Client]) -> None:
    device, cpu = servers
    body = {"inputs": PROMPTS[0], "parameters": asks(max_new_tokens=60)}
    for _ in range(4):  # more than there are slots
        with device.stream("POST", "/generate_stream", json=body) as reply:
            next(reply.iter_lines())
    assert_alike(generate(device, PROMPTS[1], asks()), generate(cpu, PROMPTS[1], asks()))
    wait_for(lambda: not metric(device, "maskdial_requests_running", model="dial"))
    assert metric(device, "maskdial_cancelled_total", model="dial", reason="disconnect") >= 4


def test_masked_texts_of_several_lengths(servers: tuple[httpx.Client, httpx.Client]) -> None:
    texts = [
        "a [MASK]",
        "the dog [MASK] away",
        "[MASK]",
        "a cat and [MASK] dog",
        f"{LONG} and a [MASK]",
    ]
    replies = [http.post("/fill-mask", json={"inputs": texts}) for http in servers]
    assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
    for device, cpu in zip(*(reply.json() for reply in replies), strict=True):
        assert [each["token"] for each in device] == [each["token"] for each in cpu]
        assert [each["score"] for each in device] == pytest.approx(
            [each["score"] for each in cpu], abs=1e-5
        )


@pytest.mark.webgpu
def test_two_models_at_once(servers: tuple[httpx.Client, httpx.Client]) -> None:
    """Their sessions share the device's queue."""
    device, cpu = servers
    body = {"inputs": ["a [MASK]", "the dog [MASK] away"]}
    with ThreadPoolExecutor(4) as pool:
        texts = [pool.submit(generate, device, prompt, asks()) for prompt in PROMPTS[:2]]
        masks = [pool.submit(device.post, "/fill-mask", json=body) for _ in range(6)]
    for prompt, text in zip(PROMPTS, texts, strict=False):
        assert_alike(text.result(), generate(cpu, prompt, asks()))
    wanted = [[each["token"] for each in row] for row in cpu.post("/fill-mask", json=body).json()]
    for mask in masks:
        assert [[each["token"] for each in row] for row in mask.result().json()] == wanted


@pytest.mark.usefixtures("software")
def test_long_passes_that_the_device_computes_wrongly_are_refused(
    hybrid_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the golden check says if the probe did not find it."""
    assert not webgpu.probe().attention_works
    monkeypatch.setattr(webgpu, "probe", lambda: Device(attention_works=True, has_half=False))
    causal, full = load_bundles("dial", hybrid_bundle)
    config = load_config({"provider": "webgpu", "slots": 1, "threads": 1})
    with pytest.raises(BundleError, match=r"'dial': logits on this machine differ by [0-9.]+"):
        start_model(full, config, Metrics())
    with pytest.raises(BundleError, match=r"logits on this machine differ by [0-9.]+"):
        start_model(causal, config, Metrics())
    # As of a shorter text.
    monkeypatch.setattr(causal_models, "check_golden", lambda *_, **__: None)
    with pytest.raises(BundleError, match="48 tokens has other logits in one pass than in pieces"):
        start_model(causal, config, Metrics())


def test_what_the_server_says_of_itself(servers: tuple[httpx.Client, httpx.Client]) -> None:
    device, _ = servers
    models = device.get("/models").json()
    rows = models["models"] if isinstance(models, dict) else models
    assert {row["provider"] for row in rows} == {"webgpu"}
    assert not any(row["batch_invariant"] for row in rows)


@pytest.mark.webgpu
def test_int8_weights_stand_for_floats() -> None:
    """The starter's graph has them in every layer; the device rounds no inputs."""
    bundle = load_bundle("sentiment", STARTER_FOLDER / "sentiment")
    session = Session(bundle.graph, SessionOptions("webgpu", 1))
    golden = bundle.manifest.golden
    row = masked_logits(session, golden)[list(golden.columns)]
    assert row == pytest.approx(golden.logits, abs=golden.tolerance)


@pytest.mark.webgpu
def test_a_model_comes_and_goes_beside_another(
    servers: tuple[httpx.Client, httpx.Client], hybrid_bundle: Path
) -> None:
    """What it frees, it frees between the other's passes."""
    device, cpu = servers
    full = load_bundles("other", hybrid_bundle)[1]
    with ThreadPoolExecutor(1) as pool:
        texts = [pool.submit(generate, device, prompt, asks()) for prompt in PROMPTS * 4]
        while not texts[-1].done():
            start_model(full, load_config(SETTINGS), Metrics()).stop()
    for prompt, text in zip(PROMPTS * 4, texts, strict=True):
        assert_alike(text.result(), generate(cpu, prompt, asks()))
