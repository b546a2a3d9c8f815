"""The code for GPUs behind a real server, in memory that stands in for a GPU's.

The shipped model is batch-invariant, so texts must be those of the usual server.
"""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import maskdial.registry.causal as causal_module
import maskdial.registry.loading as loading_module
from maskdial.bundle.bundle import Bundle
from maskdial.causal.model import CausalModel
from maskdial.causal.sampling.params import SamplingParams
from maskdial.causal.sequence import Sequence
from maskdial.config import Config
from maskdial.engine.fairness import ClientUsage, usage_of_request
from maskdial.errors import BundleError, ConfigError
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.loading import load_model
from maskdial.runtime.placement import Placement
from maskdial.runtime.providers.cpu import CpuProvider
from maskdial.runtime.providers.cuda import CudaProvider
from maskdial.runtime.runner import Runner
from maskdial.runtime.session import Session, SessionOptions
from tests.held import held

pytestmark = pytest.mark.slow

PROMPTS = ["Once upon a time", "The little dog was very", "Lily and Tom went to the", "One day, a"]


class FakeGpuProvider(CpuProvider):
    """The CPU's kernels, which are used as those of a GPU."""

    batch_invariant = CudaProvider.batch_invariant
    slots = CudaProvider.slots
    context_slots = CudaProvider.context_slots
    prefill_chunk_tokens = CudaProvider.prefill_chunk_tokens
    pad_multiple = CudaProvider.pad_multiple
    batch_sizes = CudaProvider.batch_sizes
    captures = CudaProvider.captures


def use_memory(monkeypatch: pytest.MonkeyPatch, memory: Callable[[], Any]) -> None:
    """Places models in such memory from now on."""

    def place(bundle: Bundle, choice: str, start: Callable[[Placement], Any]) -> Any:
        return start(Placement(FakeGpuProvider(), memory()))

    monkeypatch.setattr(loading_module, "place", place)


def asks(**parameters: object) -> dict[str, object]:
    return {"max_new_tokens": 24, "details": True} | parameters


# What the graphs draw, what only the host does, and both at once. Seeds are of draws that do not
# fall between the device's sum, of float32, and the host's, of float64: one in a thousand does if
# all words count.
PARAMETERS = [
    asks(),
    asks(do_sample=True, seed=10),
    asks(do_sample=True, seed=2, temperature=0.7, top_k=20),
    asks(do_sample=True, seed=3, top_p=0.8),
    asks(do_sample=True, seed=4, temperature=5.0, top_p=0.999),
    asks(do_sample=True, seed=5, min_p=0.05, repetition_penalty=1.3),
    asks(repetition_penalty=1.2, frequency_penalty=0.5),
    asks(do_sample=True, seed=6, presence_penalty=0.7, frequency_penalty=0.2),
    asks(do_sample=True, seed=7, typical_p=0.7),
    asks(do_sample=True, seed=8, top_n_tokens=3),
    asks(do_sample=True, seed=9, n=5),
    asks(stop=["the"], decoder_input_details=True),
    asks(grammar={"type": "regex", "value": "[a-z]{3,12} [0-9]+"}),
]


@pytest.fixture(scope="module")
def http_on_device(
    start_server: Callable[..., Any], device_memory: Callable[[], Any]
) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        use_memory(patch, device_memory)
        running = start_server(models={"hybrid": STARTER_FOLDER / "hybrid"}, slots=6)
    with httpx.Client(base_url=running.url, timeout=60) as client:
        yield client
    running.stop()


def generate(http: httpx.Client, prompt: str, parameters: dict[str, object]) -> Any:
    body = {"inputs": prompt, "parameters": parameters}
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def texts(reply: Any) -> Any:
    return [each["generated_text"] for each in (reply if isinstance(reply, list) else [reply])]


def logprobs(reply: Any) -> list[float]:
    each = reply[0] if isinstance(reply, list) else reply
    return [token["logprob"] for token in each["details"]["tokens"]]


def test_every_kind_of_text_is_that_of_the_host(
    http: httpx.Client, http_on_device: httpx.Client
) -> None:
    """All at once, so that they share passes; then again, from the prefix cache."""
    asked = [(prompt, parameters) for parameters in PARAMETERS for prompt in PROMPTS]
    wanted = [generate(http, *each) for each in asked]
    for _ in range(2):
        with ThreadPoolExecutor(12) as pool:
            replies = list(pool.map(lambda each: generate(http_on_device, *each), asked))
        for reply, expected, what in zip(replies, wanted, asked, strict=True):
            assert texts(reply) == texts(expected), what
            assert logprobs(reply) == pytest.approx(logprobs(expected), abs=1e-4)


def test_a_long_prompt_and_its_continuation(
    http: httpx.Client, http_on_device: httpx.Client
) -> None:
    prompt = "Tom had a red ball and a blue kite. " * 40
    parameters: dict[str, object] = {"max_new_tokens": 20, "truncate": 400}
    assert generate(http_on_device, prompt, parameters) == generate(http, prompt, parameters)


def test_both_masks_and_the_service_routes(http_on_device: httpx.Client) -> None:
    filled = http_on_device.post("/fill-mask", json={"inputs": "The dog [MASK] away."})
    assert filled.status_code == 200
    info = http_on_device.get("/info").json()
    assert info["limits"]["slots"] == 6
    assert [model["ready"] for model in info["models"]] == [True, True]


def test_more_texts_at_once_than_a_captured_step_of_the_gpus_first_sizes(
    http: httpx.Client,
    start_server: Callable[..., Any],
    device_memory: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of up to 160 rows, padded to 96, 128 and 160, sampled in passes of fewer rows."""
    use_memory(monkeypatch, device_memory)
    monkeypatch.setattr(causal_module, "_SAMPLED_BYTES", 40 * 4 * 12_000)
    passes, run = set[int](), Runner.decode

    def decode(runner: Runner, token_ids: Any, *rest: Any) -> Any:
        passes.add(len(token_ids))
        return run(runner, token_ids, *rest)

    monkeypatch.setattr(Runner, "decode", decode)
    running = start_server(models={"hybrid": STARTER_FOLDER / "hybrid"}, slots=160, max_context=64)
    asked = [(PROMPTS[i % 4], asks(max_new_tokens=20 + i % 5)) for i in range(150)]
    asked += [(PROMPTS[i], asks(max_new_tokens=20, do_sample=True, seed=i)) for i in range(4)]
    with httpx.Client(base_url=running.url, timeout=60) as client, ThreadPoolExecutor(154) as pool:
        replies = list(pool.map(lambda each: generate(client, *each), asked))
    running.stop()
    assert max(passes) == 160  # of the warm-up
    assert sorted(passes)[-2] > 64, sorted(passes)
    wanted = {str(each): texts(generate(http, *each)) for each in asked}
    for reply, each in zip(replies, asked, strict=True):
        assert texts(reply) == wanted[str(each)], each


def test_a_cache_that_does_not_fit_is_one_sentence_at_start(
    device_memory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_memory(monkeypatch, lambda: device_memory(30_000_000))
    with pytest.raises(
        ConfigError, match=r"model 'mine': a KV cache of 64 slots .* --slots \d+ or"
    ):
        load_model(
            "mine", STARTER_FOLDER / "hybrid", Config(slots=64, kv_cache_dtype="float"), Metrics()
        )
    # More than the device has.
    beyond = Config(slots=64, kv_cache_bytes=10**12, kv_cache_dtype="float")
    with pytest.raises(ConfigError, match=r"and 30\.0 MB may be used: --slots \d+ or"):
        load_model("mine", STARTER_FOLDER / "hybrid", beyond, Metrics())
    roomy = Config(kv_cache_dtype="float")
    model = load_model("mine", STARTER_FOLDER / "hybrid", roomy, Metrics())
    assert isinstance(model, CausalModel)
    assert 1 <= model.slots < 64
    model.stop()


def test_a_text_in_the_background_goes_on_from_main_memory(
    device_memory: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values are copied from the device and back."""
    use_memory(monkeypatch, device_memory)
    model = load_model("mine", STARTER_FOLDER / "hybrid", Config(slots=1), Metrics())
    assert isinstance(model, CausalModel)
    prompts = [model.tokenizer.encode(prompt).ids for prompt in PROMPTS[:2]]

    def sequence(prompt: list[int], num_tokens: int) -> Sequence:
        return Sequence(prompt, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))

    aside, set_aside = list[Sequence](), Sequence.set_aside

    def note(sequence: Sequence) -> None:
        aside.append(sequence)
        set_aside(sequence)

    monkeypatch.setattr(Sequence, "set_aside", note)

    async def text(other: Sequence | None) -> list[int]:
        ids = []
        with held(model.engine, 10) as go_on:
            token = usage_of_request.set(ClientUsage("batch", background=True))
            stream = model.engine.stream(sequence(prompts[0], 60))
            usage_of_request.reset(token)
            async for event in stream:
                ids.append(event.token_id)
                if len(ids) == 5:
                    reply = None if other is None else model.engine.stream(other)
                    go_on()
                    if reply is not None:
                        assert len([_ async for _ in reply]) == 8
        return ids

    alone = asyncio.run(text(None))
    apart = asyncio.run(text(sequence(prompts[1], 8)))
    model.stop()
    assert len(alone) == 60
    assert apart == alone
    assert len(aside) == 1


def test_a_graph_that_cannot_be_captured_is_served_without(
    device_memory: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Uncapturable(Session):
        def __init__(self, graph: Path, options: SessionOptions, *rest: Any) -> None:
            if options.captures:
                raise BundleError("not all nodes are on the GPU")
            super().__init__(graph, options, *rest)

    use_memory(monkeypatch, device_memory)
    monkeypatch.setattr(causal_module, "Session", Uncapturable)
    model = load_model("mine", STARTER_FOLDER / "hybrid", Config(slots=2), Metrics())
    model.stop()
    assert "model mine runs without CUDA graphs: not all nodes are on the GPU" in caplog.messages
