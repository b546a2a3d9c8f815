"""Low-rank adapters over HTTP: loaded and unloaded while the server runs, named as models."""

import asyncio
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from maskdial.ask import catalogue
from maskdial.bundle.adapter import ADAPTER_HEAD, ADAPTER_WEIGHTS, AdapterHead
from maskdial.config import Config
from maskdial.errors import BundleError, ConfigError
from maskdial.kernels.installed import find_kernels
from maskdial.metrics import Metrics
from maskdial.registry.catalog import STARTER_FOLDER, find_bundles
from maskdial.registry.loading import start_models
from maskdial.registry.registry import Models
from tests.adapters import make_adapter, pack_tensors, random_matrices, write_adapter
from tests.held import held
from tests.servers import engine_of, wait_for

KEY = "open sesame"
ADMIN = {"authorization": f"Bearer {KEY}"}
HYBRID = STARTER_FOLDER / "hybrid"
PROMPT = "Once upon a time there was a little girl who lived near the sea. " * 12

pytestmark = pytest.mark.skipif(
    find_kernels("auto") is None, reason="adapters need the kernels, which are not built"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base and some adapters of it."""
    root = tmp_path_factory.mktemp("bundles")
    (root / "base").symlink_to(HYBRID)
    make_adapter(root / "adapters" / "one", HYBRID, 1, size=0.15)
    make_adapter(root / "adapters" / "two", HYBRID, 2, rank=6, layers="q_proj", size=0.3)
    return root


@pytest.fixture(scope="module")
def server(root: Path, start_server: Callable[..., Any]) -> Iterator[Any]:
    running = start_server(
        model_dir=root,
        models={"base": HYBRID},
        adapters={"one": (root / "adapters" / "one", "base")},
        adapters_memory=2**30,
        admin_key=KEY,
        slots=4,
    )
    yield running
    running.stop()


@pytest.fixture
def http(server: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, headers=ADMIN) as client:
        yield client


@pytest.fixture
def two(http: httpx.Client) -> Iterator[str]:
    """Another adapter, which is loaded as a client of vLLM does."""
    body = {"lora_name": "two", "lora_path": "adapters/two"}
    reply = http.post("/v1/load_lora_adapter", json=body)
    assert (reply.status_code, reply.text) == (
        200,
        "Success: LoRA adapter 'two' added successfully.",
    )
    yield "two"
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
    assert (gone.status_code, gone.text) == (
        200,
        "Success: LoRA adapter 'two' removed successfully.",
    )


def complete(http: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    reply = http.post("/v1/completions", json=body | fields)
    assert reply.status_code == 200, reply.text
    content: dict[str, Any] = reply.json()
    return content


def logprobs(http: httpx.Client, model: str, **fields: Any) -> list[float]:
    found: list[float] = complete(http, model, **fields)["choices"][0]["logprobs"]["token_logprobs"]
    return found


def test_texts_of_all_adapters_share_passes(server: Any, http: httpx.Client, two: str) -> None:
    """Each answers as alone, also with what the prefix cache has of the others' prompts."""
    names = ("base", "one", two)
    alone = {name: logprobs(http, name) for name in names}
    assert len({tuple(each) for each in alone.values()}) == 3
    for name in names:  # from the prefix cache, which has one prompt under three models
        assert logprobs(http, name) == alone[name]
    engine = engine_of(server, "base")
    for number, salt in enumerate(("a", "b")):
        order = names[number:] + names[:number]
        with ThreadPoolExecutor(3) as pool, held(engine) as go_on:
            asked = [pool.submit(logprobs, http, name, cache_salt=salt) for name in order]
            wait_for(lambda: engine._scheduler.num_waiting == 3)
            go_on()
            assert [each.result() for each in asked] == [alone[name] for name in order]


def test_adapters_are_models_of_every_dialect(http: httpx.Client, server: Any) -> None:
    listed = {each["id"]: each.get("parent") for each in http.get("/v1/models").json()["data"]}
    assert listed == {"base": None, "one": "base"}
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY)
    reply = client.completions.create(model="one", prompt="Once", max_tokens=2, temperature=0)
    assert reply.model == "one"
    body: dict[str, Any] = {"inputs": "Once", "model": "one"}
    own = http.post("/score", json=body).json()
    assert own != http.post("/score", json=body | {"model": "base"}).json()
    body = {"inputs": "Once upon a [MASK].", "model": "one", "mask": "full"}
    filled = http.post("/fill-mask", json=body).json()
    assert filled != http.post("/fill-mask", json=body | {"model": "base"}).json()
    ollama = {"model": "one", "prompt": "Once", "stream": False, "options": {"num_predict": 1}}
    assert http.post("/api/generate", json=ollama).json()["model"] == "one"
    unnamed = http.post("/generate", json={"inputs": "Once", "parameters": {"max_new_tokens": 1}})
    assert unnamed.status_code == 200  # the base is meant
    states = {each["name"]: each["state"] for each in http.get("/models").json()}
    assert states["one"] == "ready"


def test_masked_texts_answer_as_alone_in_any_company(http: httpx.Client, two: str) -> None:
    def fill(name: str) -> Any:
        body = {"inputs": "Once upon a [MASK].", "model": name, "mask": "full"}
        return http.post("/fill-mask", json=body).json()

    names = ("base", "one", two) * 4
    alone = {name: fill(name) for name in set(names)}
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(fill, names)) == [alone[name] for name in names]


def test_an_adapter_that_is_removed_finishes_its_requests(server: Any, http: httpx.Client) -> None:
    body = {"model": "spare", "path": "adapters/two", "base": "base"}
    assert http.post("/models/load", json=body).json()["state"] == "ready"
    expected = logprobs(http, "spare")
    engine = engine_of(server, "base")
    with ThreadPoolExecutor(2) as pool, held(engine, 2) as go_on:
        running = pool.submit(logprobs, http, "spare")
        wait_for(lambda: bool(engine._scheduler.running))
        unloading = pool.submit(http.post, "/models/unload", json={"model": "spare"})
        wait_for(lambda: "spare" not in http.get("/v1/models").text)
        assert not unloading.done()
        go_on()
        assert running.result() == expected
        assert unloading.result().status_code == 200
    refused = http.post("/v1/completions", json={"model": "spare", "prompt": "a"})
    assert refused.status_code == 404


def test_those_unused_for_longest_make_room(root: Path, start_server: Callable[..., Any]) -> None:
    # In memory its rank of 6 is one of 8, so two of them fit into three of its files.
    size = (root / "adapters" / "two" / ADAPTER_WEIGHTS).stat().st_size
    names = dict.fromkeys("abc", (root / "adapters" / "two", "base"))
    running = start_server(
        models={"base": HYBRID}, adapters=names, adapters_memory=3 * size, slots=2
    )
    with httpx.Client(base_url=running.url, timeout=60) as http:

        def loaded() -> set[str]:
            states = http.get("/models").json()
            return {each["name"] for each in states if each["state"] == "ready"} - {"base"}

        assert loaded() == {"b", "c"}
        assert len(complete(http, "a")["choices"]) == 1
        assert loaded() == {"a", "c"}
    running.stop()


def broken(root: Path, name: str, **changes: Any) -> Path:
    """An adapter bundle with a fault."""
    folder = root / "broken" / name
    matrices = random_matrices(HYBRID, 3, layers="layers.0.self_attn.q_proj")
    ((layer, (a, b)),) = matrices.items()
    if "matrices" in changes:
        layer, a, b = changes.pop("matrices")(layer, a, b)
    content = changes.pop("content", None) or pack_tensors({f"{layer}.a": a, f"{layer}.b": b})
    return write_adapter(folder, HYBRID, content, **changes)


def with_nan(layer: str, a: Any, b: Any) -> tuple[str, Any, Any]:
    a[0, 0] = np.nan
    return layer, a, b


def bomb(size: int) -> bytes:
    return struct.pack("<Q", size) + b"{}"


def header(**entry: Any) -> bytes:
    whole = {"dtype": "F16", "shape": [4, 256], "data_offsets": [0, 2048]} | entry
    text = json.dumps({"model.a": whole, "model.b": whole}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(2048)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "other_base": ({"base_sha256": "0" * 64}, "was made for"),
    "layer": ({"matrices": lambda _, a, b: ("model.nowhere", a, b)}, "'model.nowhere' is none of"),
    "shape": (
        {"matrices": lambda layer, a, b: (layer, a[:, 1:].copy(), b)},
        "has 255 inputs and 256 outputs, but 256 and 256 in model 'base'",
    ),
    "ranks": ({"matrices": lambda layer, a, b: (layer, a[1:], b)}, "do not fit together"),
    "nan": ({"matrices": with_nan}, "has numbers that are not finite"),
    "hash": ({"weights_sha256": "0" * 64}, "has changed since it was exported"),
    "bomb": ({"content": bomb(2**63)}, "its header would have 9,223,372,036,854,775,808 bytes"),
    "short": ({"content": b"abc"}, "it has no header"),
    "text": ({"content": bomb(1)}, "its header is not JSON"),
    "deep": ({"content": struct.pack("<Q", 10**5) + b"[" * 10**5}, "its header is not JSON"),
    "beyond": ({"content": header(data_offsets=[0, 2**40])}, "is not a matrix within it"),
    "huge": ({"content": header(shape=[2**40, 2**40])}, "is not a matrix within it"),
    "negative": ({"content": header(shape=[-4, -256])}, "is not a matrix within it"),
    "dtype": ({"content": header(dtype="F64")}, "is not a matrix within it"),
    "empty": ({"content": struct.pack("<Q", 2) + b"{}"}, "adapter.safetensors has no matrices"),
    "half": (
        {"content": pack_tensors({"model.a": np.zeros((4, 256), np.float16)})},
        "has not an a and a b of each layer",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_adapters_that_cannot_be_loaded(root: Path, http: httpx.Client, fault: str) -> None:
    changes, why = FAULTS[fault]
    folder = broken(root, fault, **changes)
    body = {"lora_name": fault, "lora_path": f"broken/{fault}", "base_model_name": "base"}
    reply = http.post("/v1/load_lora_adapter", json=body)
    assert reply.status_code == 400, reply.text
    assert why in reply.json()["error"]["message"]
    assert fault not in http.get("/v1/models").text
    shutil.rmtree(folder)


def as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def sparse(file: Path) -> None:
    """A terabyte, none of which is stored."""
    os.truncate(file, 2**40)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (as_pipe, "adapter.safetensors is not a file"),
        (sparse, "adapter.safetensors is larger than 4 GiB"),
        (Path.unlink, "adapter.safetensors cannot be read: No such file or directory"),
    ],
)
def test_weights_that_are_not_read(
    root: Path, http: httpx.Client, spoil: Callable[[Path], None], why: str
) -> None:
    folder = broken(root, "unread")
    spoil(folder / ADAPTER_WEIGHTS)
    body = {"lora_name": "unread", "lora_path": "broken/unread", "base_model_name": "base"}
    reply = http.post("/v1/load_lora_adapter", json=body)
    assert (reply.status_code, why in reply.text) == (400, True), reply.text
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "head.onnx cannot be read: No such file or directory"),
        (b"another", "head.onnx has changed since it was exported"),
        (b"head", "model 'base' does not return; export that with --task embed-all"),
    ],
)
def test_heads_that_cannot_be_loaded(
    root: Path, http: httpx.Client, content: bytes | None, why: str
) -> None:
    digest = hashlib.sha256(b"head").hexdigest()
    head = AdapterHead(task="classify", labels=("a",), rows="first", sha256=digest)
    folder = broken(root, "headed", head=head)
    if content is not None:
        (folder / ADAPTER_HEAD).write_bytes(content)
    body = {"lora_name": "headed", "lora_path": "broken/headed", "base_model_name": "base"}
    reply = http.post("/v1/load_lora_adapter", json=body)
    assert (reply.status_code, why in reply.text) == (400, True), reply.text
    shutil.rmtree(folder)


def test_requests_about_adapters_that_are_refused(root: Path, http: httpx.Client) -> None:
    def load(**body: Any) -> tuple[int, str]:
        reply = http.post("/v1/load_lora_adapter", json=body)
        return reply.status_code, reply.json()["error"]["message"]

    place = {"lora_path": "adapters/two"}
    assert load(lora_name="one", **place)[1] == (
        "adapter 'one' is loaded already; to replace it, set load_inplace"
    )
    assert load(lora_name="base", **place)[1] == "adapter 'base': a model has this name"
    status, message = load(lora_name="x", base_model_name="one", **place)
    assert (status, message) == (400, "adapter 'x': 'one' is an adapter itself; name its base")
    assert load(lora_name="x", base_model_name="nobody", **place)[0] == 404
    assert load(lora_name="x", lora_path="../one")[0] == 400
    assert load(lora_name="x", lora_path="base")[0] == 400
    other = broken(root, "orphan", base_sha256="1" * 64)
    assert "no model here is its base" in load(lora_name="x", lora_path="broken/orphan")[1]
    shutil.rmtree(other)
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "base"})
    assert gone.status_code == 404
    body = {"model": "one", "keep_alive": 5}
    assert http.post("/models/load", json=body).status_code == 422
    assert logprobs(http, "one")  # which was not harmed


def test_a_server_is_ready_beside_a_base_that_fails_its_check(
    root: Path, tmp_path: Path, start_server: Callable[..., Any]
) -> None:
    """The base stops alone, and its adapters with it; /models and the metrics say so."""
    drifted = tmp_path / "drifted"
    shutil.copytree(STARTER_FOLDER / "sentiment", drifted)
    manifest = json.loads((drifted / "maskdial.json").read_text())
    manifest["golden"]["logits"] = [7.0, -7.0]
    (drifted / "maskdial.json").write_text(json.dumps(manifest))
    running = start_server(
        models={"good": STARTER_FOLDER / "sentiment", "drifted": drifted},
        adapters={"one": (root / "adapters" / "one", "drifted")},
    )
    try:
        assert httpx.get(f"{running.url}/health/ready").status_code == 200
        listed = {each["name"]: each for each in httpx.get(f"{running.url}/models").json()}
        states = {name: each["state"] for name, each in listed.items()}
        assert states == {"good": "ready", "drifted": "failed", "one": "failed"}
        assert listed["one"]["reason"] == f"its base failed: {listed['drifted']['reason']}"
        page = httpx.get(f"{running.url}/metrics").text
        assert 'maskdial_model_state{model="one",state="failed"} 1.0' in page
        for name, status in ("good", 200), ("drifted", 503), ("one", 503):
            body = {"model": name, "inputs": "A warm film."}
            assert httpx.post(f"{running.url}/classify", json=body).status_code == status
    finally:
        running.stop()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kernels": "off"}, "runs without the kernels, which compute adapters"),
        ({"adapters": {"one": (Path("adapters/one"), "nobody")}}, "no model 'nobody' is served"),
    ],
)
def test_servers_that_cannot_serve_adapters(root: Path, settings: dict[str, Any], why: str) -> None:
    adapters = {"one": (root / "adapters" / "one", "base")}
    config = Config(**({"models": {"base": HYBRID}, "adapters": adapters, "slots": 1} | settings))
    metrics = Metrics()

    async def open_models() -> None:
        start = partial(start_models, config=config, metrics=metrics)
        models = Models(catalogue.LISTED, config, metrics, start)
        try:
            await models.open(find_bundles(config))
        finally:
            await models.close()

    with pytest.raises((BundleError, ConfigError), match=why):
        asyncio.run(open_models())


@pytest.mark.parametrize(
    "pair", ["one", "one=dir", "one=@base", "one=dir@", "a b=dir@base", "load=dir@base"]
)
def test_settings_that_name_no_adapter(pair: str) -> None:
    with pytest.raises((ConfigError, ValueError)):
        Config(adapters=[pair])


def test_a_setting_that_names_an_adapter() -> None:
    config = Config(adapters=["one=my@dir@base"])
    assert config.adapters == {"one": (Path("my@dir"), "base")}
    assert config.takes_adapters
