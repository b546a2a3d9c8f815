"""Encoder-decoder models on the device, behind a server: what they answer is the CPU's answer."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.bundle.bundle import Bundle, load_bundle
from maskdial.config import load_config
from maskdial.errors import BundleError
from maskdial.metrics import Metrics
from maskdial.registry.golden import text_to_text_logits
from maskdial.registry.loading import start_model
from maskdial.runtime.encoder import Encoder
from maskdial.runtime.memory import HostMemory
from maskdial.runtime.providers import webgpu
from maskdial.runtime.providers.webgpu_probe import Device
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions
from tests.servers import metric, wait_for
from tests.webgpu.conftest import assert_alike

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("adapter")]

SETTINGS: dict[str, Any] = {"slots": 3, "threads": 1}
LONG = "the door opened, and there stood the owner of the house."  # more than 32 tokens
SOURCES = ["a", LONG, "the dog ran", "to and fro."]
Servers = tuple[httpx.Client, httpx.Client]


@pytest.fixture(
    scope="module",
    params=["t5", *(pytest.param(each, marks=pytest.mark.webgpu) for each in ("bart", "marian"))],
)
def servers(
    request: pytest.FixtureRequest,
    adapter: None,
    start_server: Callable[..., Any],
    exported: Callable[[str], Path],
) -> Iterator[Servers]:
    """On the device, and on the CPU."""
    folder = exported(request.param)
    device = SETTINGS | {"provider": "webgpu"}
    # Compiles shaders, without a deadline.
    start_model(load_bundle("mine", folder), load_config(device), Metrics()).stop()
    running = [
        start_server(models={"mine": folder}, **each)
        for each in (device, SETTINGS | {"provider": "cpu"})
    ]
    clients = [httpx.Client(base_url=each.url, timeout=120) for each in running]
    yield clients[0], clients[1]
    for client, server in zip(clients, running, strict=True):
        client.close()
        server.stop()


def generate(http: httpx.Client, source: str, parameters: Mapping[str, object]) -> Any:
    defaults = {"max_new_tokens": 5, "details": True, "num_beams": 1}
    reply = http.post(
        "/generate", json={"inputs": source, "parameters": {**defaults, **parameters}}
    )
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_texts_in_company_are_the_cpus(servers: Servers) -> None:
    """More at once than there are slots, sources of all lengths, steps of ragged rows."""
    device, cpu = servers
    parameters: list[Mapping[str, object]] = [
        {},
        {"do_sample": True, "seed": 3, "max_new_tokens": 3},
    ]
    asked = [(source, each) for each in parameters for source in SOURCES]
    with ThreadPoolExecutor(6) as pool:
        replies = list(pool.map(lambda each: generate(device, *each), asked))
    for reply, each in zip(replies, asked, strict=True):
        assert_alike(reply, generate(cpu, *each))


def test_beams_are_the_cpus(servers: Servers) -> None:
    """Keys and values of texts and sources are copied from slot to slot, on the device."""
    device, cpu = servers
    asked = {"num_beams": 3, "no_repeat_ngram_size": 1, "max_new_tokens": 4}
    assert_alike(generate(device, LONG, asked), generate(cpu, LONG, asked))


def test_a_client_that_leaves_frees_its_slot(servers: Servers) -> None:
    device, cpu = servers
    endless = {"max_new_tokens": 50, "min_new_tokens": 50}
    for source in (*SOURCES, LONG):  # more than there are slots
        body = {"inputs": source, "parameters": endless}
        with device.stream("POST", "/generate_stream", json=body) as reply:
            next(reply.iter_lines())
    assert_alike(generate(device, LONG, {}), generate(cpu, LONG, {}))
    wait_for(lambda: not metric(device, "maskdial_requests_running", model="mine"))
    assert metric(device, "maskdial_cancelled_total", model="mine", reason="disconnect") >= 4


def with_short_text(bundle: Bundle, num_tokens: int) -> Bundle:
    """The bundle, with the beginning of its golden text as the golden text."""
    manifest, options = bundle.manifest, SessionOptions("cpu", 1)
    assert manifest.kv is not None
    assert manifest.text_to_text is not None
    golden = manifest.golden
    golden = golden.model_copy(update={"input_ids": golden.input_ids[:num_tokens]})
    runner = Runner(
        Session(bundle.graph, options),
        manifest.kv,
        slots=1,
        max_length=1,
        vocab_size=manifest.vocab_size,
        max_source_length=num_tokens,
    )
    assert runner.cache.source is not None
    session = Session(bundle.encoder, options)
    encoder = Encoder(session, runner.cache.source, HostMemory(), num_tokens)
    row = text_to_text_logits(runner, encoder, manifest.text_to_text.start_token_id, golden)
    golden = golden.model_copy(update={"logits": row[list(golden.columns)].tolist()})
    return replace(bundle, manifest=manifest.model_copy(update={"golden": golden}))


@pytest.mark.usefixtures("software")
def test_long_sources_that_the_device_computes_wrongly_are_refused(
    exported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the export's text is short: among padding, the encoder's pass is long."""
    monkeypatch.setattr(webgpu, "probe", lambda: Device(attention_works=True, has_half=False))
    bundle = with_short_text(load_bundle("mine", exported("t5")), 12)
    config = load_config(SETTINGS | {"provider": "webgpu"})
    with pytest.raises(BundleError, match=r"'mine': logits on this machine differ by [0-9.]+"):
        start_model(bundle, config, Metrics())
