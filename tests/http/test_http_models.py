"""Models that come and go over HTTP: loading, unloading, replacing, and who may do so."""

import asyncio
import gc
import json
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.bundle.bundle import read_manifests, write_manifest
from maskdial.errors import ConfigError
from maskdial.registry import versions
from maskdial.registry.catalog import STARTER_FOLDER
from maskdial.registry.registry import Models
from maskdial_client import Client, ModelStatus, UnauthorizedError, ValidationError
from tests.held import held
from tests.servers import engine_of, wait_for

KEY = "open sesame"
ADMIN = {"authorization": f"Bearer {KEY}"}
TEXT = "A warm, funny and quietly moving film."


def make_version(folder: Path, *labels: str) -> Path:
    """The classifier with labels of its own, by which its replies are known."""
    shutil.copytree(STARTER_FOLDER / "sentiment", folder)
    (manifest,) = read_manifests("sentiment", folder)
    write_manifest(folder, manifest.model_copy(update={"labels": labels}))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of bundles: two versions of a classifier, a model with both masks, a broken one."""
    root = tmp_path_factory.mktemp("bundles")
    make_version(root / "acme" / "first", "NO", "YES")
    make_version(root / "second", "BAD", "GOOD")
    (root / "hybrid").symlink_to(STARTER_FOLDER / "hybrid")
    broken = make_version(root / "broken", "NO", "YES")
    (broken / "tokenizer.json").write_text("{}")
    return root


@pytest.fixture
def shelf(root: Path, start_server: Callable[..., Any]) -> Iterator[Any]:
    running = start_server(model_dir=root, admin_key=KEY)
    yield running
    running.stop()


@pytest.fixture
def http(shelf: Any) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shelf.url, timeout=60) as client:
        yield client


def states(http: httpx.Client) -> dict[str, str]:
    return {each["name"]: each["state"] for each in http.get("/models").json()}


def label(http: httpx.Client, model: str, **body: object) -> str:
    reply = http.post("/classify", json={"inputs": TEXT, "model": model, **body})
    assert reply.status_code == 200, reply.text
    return str(reply.json()[0][0]["label"])


@pytest.mark.parametrize(("model", "path"), [("hybrid", "/generate"), ("second", "/classify")])
def test_what_is_unloaded_has_no_cycles(
    shelf: Any, http: httpx.Client, model: str, path: str
) -> None:
    """The collector does not look at models that were there when their server began."""
    gc.collect()
    gc.disable()
    try:
        body = {"inputs": TEXT, "model": model}
        assert http.post(path, json=body).status_code == 200
        gone = weakref.ref(engine_of(shelf, model))
        unloading = http.post("/models/unload", json={"model": model}, headers=ADMIN)
        assert unloading.status_code == 200, unloading.text
        wait_for(lambda: gone() is None)
    finally:
        gc.enable()


def test_a_folder_is_served_and_loaded_by_its_requests(http: httpx.Client) -> None:
    assert set(states(http).values()) == {"unloaded"}
    listed = {each["name"]: each for each in http.get("/models").json()}
    assert listed["acme/first"]["labels"] == ["NO", "YES"]
    assert listed["acme/first"]["tasks"] == ["classify", "tokenize"]
    assert not listed["acme/first"]["ready"]
    assert http.get("/health/ready").status_code == 200
    assert [each["id"] for each in http.get("/v1/models").json()["data"]] == [*listed]
    assert label(http, "acme/first") == "YES"
    assert label(http, "second") == "GOOD"
    (classified,) = http.post("/models/acme/first", json={"inputs": TEXT}).json()
    assert classified[0]["label"] == "YES"
    body = {"inputs": "Once upon", "parameters": {"max_new_tokens": 2}}
    assert http.post("/generate", json=body).status_code == 200  # the only one that generates
    assert http.get("/tokenizer_info").json()["model_max_length"] > 0
    assert states(http) == {
        "acme/first": "ready",
        "broken": "unloaded",
        "hybrid": "ready",
        "second": "ready",
    }
    text = http.get("/metrics").text
    assert 'maskdial_model_state{model="acme/first",state="ready"} 1.0' in text
    assert 'maskdial_model_loads_total{model="second",outcome="ok"} 1.0' in text
    route = 'model="acme/first",outcome="ok",route="/models/{name}"'
    assert f"maskdial_requests_total{{{route}}} 1.0" in text


def test_a_bundle_that_cannot_be_served_says_why(http: httpx.Client) -> None:
    for reply in (
        http.post("/classify", json={"inputs": TEXT, "model": "broken"}),
        http.post("/models/broken", json={"inputs": TEXT}),
    ):
        assert reply.status_code == 503
        assert "tokenizer.json has changed" in reply.json()["error"]
    reply = http.post("/models/load", json={"model": "broken"}, headers=ADMIN)
    assert reply.status_code == 422
    assert reply.json()["error"].startswith("model 'broken' could not be loaded: tokenizer.json")
    item = next(each for each in http.get("/models").json() if each["name"] == "broken")
    assert item["state"] == "failed"
    assert "tokenizer.json has changed" in item["reason"]
    assert http.get("/health/ready").status_code == 200


def test_models_are_loaded_replaced_and_unloaded(http: httpx.Client) -> None:
    def change(route: str, status: int = 200, **body: object) -> Any:
        reply = http.post(f"/models/{route}", json=body, headers=ADMIN)
        assert reply.status_code == status, reply.text
        return reply.json()

    ready = {"model": "taste", "state": "ready", "reason": ""}
    assert change("load", model="taste", path="acme/first") == ready
    assert label(http, "taste") == "YES"
    assert change("load", model="taste", path="second", keep_alive="off") == ready
    assert label(http, "taste") == "GOOD"
    assert change("unload", model="taste")["state"] == "unloaded"
    assert "taste" not in states(http), "it was no bundle of that name"
    assert "taste" in change("unload", 404, model="taste")["error"]
    assert "--model-dir" in change("load", 422, model="taste", path="../../etc")["error"]
    assert "no model 'nobody'" in change("load", 404, model="nobody")["error"]
    assert "one '/' at most" in change("load", 422, model="a/b/c", path="second")["error"]
    for wrong, words in (
        (-1, "must be at least 0, not -1"),
        ("x", "Input should be a valid number"),
    ):
        refused = change("load", 422, model="second", keep_alive=wrong)
        assert refused["error"] == f"keep_alive: {words}"
    assert "unknown field" in change("load", 422, model="second", force=True)["error"]


def test_the_client_manages_models(shelf: Any) -> None:
    with Client(shelf.url, api_key=KEY) as client:
        assert {each.state for each in client.models()} == {"unloaded"}
        status = client.load_model("taste", "second", keep_alive=60)
        assert status == ModelStatus("taste", "ready", "")
        assert client.classify(TEXT, model="taste").label == "GOOD"
        scores = [client.score(TEXT, model="hybrid", mask=mask) for mask in ("full", "causal")]
        assert [score.method for score in scores] == ["pseudo", "causal"]
        assert client.unload_model("taste").state == "unloaded"
        with pytest.raises(ValidationError, match="has changed since"):
            client.load_model("broken")
        infos = {(each.name, each.mask): each for each in client.models()}
        assert "tokenizer.json" in infos["broken", "full"].reason
        assert infos["hybrid", "causal"].ready
    with Client(shelf.url) as client, pytest.raises(UnauthorizedError, match="is missing"):
        client.unload_model("hybrid")


@pytest.mark.parametrize(
    "path", ["/models/load", "/models/unload", "/v2/repository/models/second/load"]
)
def test_only_the_admin_key_opens_them(
    http: httpx.Client, url: str, path: str, start_server: Callable[..., Any]
) -> None:
    body = {"model": "second"}
    wrong = [("authorization", "Bearer no"), ("x-api-key", ""), ("x-api-key", "é")]
    for headers in ([], *([(name.encode(), value.encode())] for name, value in wrong)):
        reply = http.post(path, json=body, headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error_type"] == "unauthorized"
        assert reply.headers["www-authenticate"] == "Bearer"
    assert http.post(path, json=body, headers={"x-api-key": "wrong"}).status_code == 401
    reply = httpx.post(f"{url}{path}", json=body, headers=ADMIN)  # a server without a key
    assert reply.status_code == 403
    assert "MASKDIAL_ADMIN_KEY" in reply.json()["error"]


def test_kserve_manages_the_repository(http: httpx.Client) -> None:
    assert http.get("/v2").json()["name"] == "maskdial"
    assert http.get("/v2/health/live").status_code == 200
    assert http.get("/v2/health/ready").json() == {"ready": True}
    model = "/v2/repository/models/acme/first"
    assert http.get("/v2/models/acme/first/ready").status_code == 503
    assert http.post(f"{model}/load", headers=ADMIN).json() == {}
    assert http.get("/v2/models/acme/first/ready").json()["ready"]
    metadata = http.get("/v2/models/acme/first").json()
    assert metadata["name"] == "acme/first"
    assert [each["name"] for each in metadata["outputs"]] == ["label", "score"]
    assert http.post("/v2/repository/index", json={"ready": True}).json() == [
        {"name": "acme/first", "version": "1", "state": "READY", "reason": ""}
    ]
    unload = {"parameters": {"unload_dependents": True}}
    assert http.post(f"{model}/unload", json=unload, headers=ADMIN).json() == {}
    index = {each["name"]: each for each in http.post("/v2/repository/index").json()}
    assert index["acme/first"]["state"] == "UNAVAILABLE"
    assert index["acme/first"]["reason"] == "unloaded"
    assert set(index) == {"acme/first", "broken", "hybrid", "second"}
    reply = http.post(f"{model}/load", json={"parameters": {"config": "{}"}}, headers=ADMIN)
    assert "parameters.config: unknown field" in reply.json()["error"]
    assert http.get("/v2/models/nobody").status_code == 404
    assert http.get("/v2/models/nobody/ready").status_code == 404


@pytest.fixture
def held_loads(shelf: Any) -> Iterator[threading.Event]:
    """Loads wait in their thread until it is set."""
    versions = shelf.server.config.app.state.context.models._versions
    held, start = threading.Event(), versions._start

    def wait_and_start(name: str, folder: Path) -> Any:
        assert held.wait(30)
        return start(name, folder)

    versions._start = wait_and_start
    yield held
    held.set()


def models_of(shelf: Any) -> Models:
    models = shelf.server.config.app.state.context.models
    assert isinstance(models, Models)
    return models


@pytest.mark.parametrize("path", ["/classify", "/models/second"])
def test_waiting_for_a_load_ends_with_the_timeout_or_the_client(
    shelf: Any, http: httpx.Client, held_loads: threading.Event, path: str
) -> None:
    body = {"inputs": TEXT, "model": "second", "timeout": 0.05}
    reply = http.post(path, json=body)
    assert reply.status_code == 504
    assert "timeout of 0.05 seconds" in reply.json()["error"]
    entry = models_of(shelf).entry("second")

    def active() -> int:
        return sum(not waiter.done() for waiter in entry.waiters)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=shelf.url, timeout=60) as client:
            waiting = asyncio.create_task(client.post(path, json=body | {"timeout": 60}))
            await asyncio.to_thread(wait_for, lambda: active() == 1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(leave())
    wait_for(lambda: active() == 0)
    held_loads.set()
    assert label(http, "second") == "GOOD"
    assert entry.current is not None
    wait_for(lambda: entry.current is not None and entry.current.num_leases == 0)


def test_a_stream_outlives_the_unload_of_its_model(shelf: Any, http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 150, "ignore_eos": True}
    body = {"inputs": "Once", "model": "hybrid", "parameters": parameters}
    named = {"model": "hybrid"}
    assert http.post("/models/load", json=named, headers=ADMIN).json()["state"] == "ready"
    with (
        held(engine_of(shelf, "hybrid"), num_steps=2) as go_on,
        http.stream("POST", "/generate_stream", json=body) as stream,
        ThreadPoolExecutor() as pool,
        httpx.Client(base_url=shelf.url, timeout=60) as other,
    ):
        events = stream.iter_lines()
        next(events)
        unloading = pool.submit(other.post, "/models/unload", json=named, headers=ADMIN)
        wait_for(lambda: models_of(shelf).entry("hybrid").state == "draining")
        assert not unloading.done()
        go_on()
        received = [json.loads(line[5:]) for line in events if line.startswith("data:")]
        assert received[-1]["details"]["generated_tokens"] == 150
        assert unloading.result().json()["state"] == "unloaded"


def test_a_model_whose_weights_are_overwritten_answers_nothing_more(
    http: httpx.Client,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(versions, "_WATCH_SECONDS", 0.05)
    folder = make_version(root / "overwritten", "NO", "YES")
    load = {"model": "overwritten"}
    assert http.post("/models/load", json=load, headers=ADMIN).json()["state"] == "ready"
    assert label(http, "overwritten") == "YES"
    assert label(http, "second") == "GOOD"
    weights = folder / "model.onnx.data"
    intact = weights.read_bytes()
    with weights.open("r+b") as file:
        file.seek(len(intact) // 2)
        file.write(b"other weights")
    wait_for(lambda: states(http)["overwritten"] == "failed")
    reply = http.post("/classify", json={"inputs": TEXT, "model": "overwritten"})
    assert reply.status_code == 503
    cause = "model.onnx.data of model 'overwritten' was overwritten while in use"
    assert cause in reply.json()["error"]
    assert [each.message for each in caplog.records if each.levelname == "CRITICAL"] == [cause]
    refused = http.post("/models/load", json=load, headers=ADMIN)
    assert refused.status_code == 422
    assert "SHA-256 differs" in refused.json()["error"]
    assert label(http, "second") == "GOOD"
    weights.write_bytes(intact)
    assert http.post("/models/load", json=load, headers=ADMIN).json()["state"] == "ready"
    assert label(http, "overwritten") == "YES"
    shutil.rmtree(folder)


def test_no_request_is_lost_while_versions_are_swapped(shelf: Any, http: httpx.Client) -> None:
    """`python -m loadtests faults swaps` does this at length, and looks at what is kept."""
    expected = {"acme/first": "YES", "second": "GOOD"}
    http.post("/models/load", json={"model": "m", "path": "acme/first"}, headers=ADMIN)
    finished = threading.Event()

    def ask() -> list[str]:
        with httpx.Client(base_url=shelf.url) as client:
            labels = []
            while not finished.is_set():
                labels.append(label(client, "m"))
            return labels

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(ask) for _ in range(4)]
        try:
            for number in range(6):
                path = [*expected][(number + 1) % 2]
                body = {"model": "m", "path": path}
                assert http.post("/models/load", json=body, headers=ADMIN).status_code == 200
                assert label(http, "m") == expected[path]
        finally:
            finished.set()
        seen = [label for client in clients for label in client.result()]
    assert set(seen) == {"YES", "GOOD"}
    assert len(seen) >= 12
    wait_for(lambda: not models_of(shelf).entry("m").draining)
    engines = [thread for thread in threading.enumerate() if thread.name == "maskdial-m"]
    assert len(engines) == 1
    assert 'maskdial_engine_up{model="m"} 1.0' in http.get("/metrics").text


def test_a_file_in_the_folder_is_exported_by_its_first_request(
    tmp_path: Path, start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASKDIAL_CACHE", str(tmp_path / "cache"))
    exported: list[str] = []

    def export(options: list[str], folder: Path, *_: object) -> None:
        exported.append(options[-1])
        if "bad" in options[-1]:
            raise ConfigError("it is bad")
        make_version(folder, "NO", "YES")

    monkeypatch.setattr("maskdial.intake.export_apart", export)
    root = tmp_path / "models"
    (root / "acme" / "folder").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (root / "acme" / "folder" / name).write_text("{}")
    for name in ("taste-Q4_K_M", "bad", "parts-00001-of-00002", "parts-00002-of-00002"):
        (root / f"{name}.gguf").write_bytes(b"GGUF")
    (root / "acme" / "settings").mkdir()
    (root / "acme" / "settings" / "config.json").write_text("{}")  # without weights
    names = ["acme/folder", "bad", "parts-00001-of-00002", "taste-Q4_K_M"]
    running = start_server(model_dir=root)
    try:
        with httpx.Client(base_url=running.url, timeout=60) as http:
            assert states(http) == dict.fromkeys(names, "unloaded")
            assert [each["id"] for each in http.get("/v1/models").json()["data"]] == names
            assert label(http, "taste-Q4_K_M") == "YES"
            assert label(http, "acme/folder") == "YES"
            assert label(http, "taste-Q4_K_M") == "YES"
            assert exported == [str(root / "taste-Q4_K_M.gguf"), str(root / "acme" / "folder")]
            refused = http.post("/classify", json={"inputs": TEXT, "model": "bad"})
            assert refused.status_code == 503
            assert "model bad: it is bad" in refused.text
            assert states(http)["bad"] == "failed"
    finally:
        running.stop()
    running = start_server(model_dir=root)
    try:
        with httpx.Client(base_url=running.url, timeout=60) as http:
            listed = {each["name"]: each for each in http.get("/models").json()}
            assert listed["taste-Q4_K_M"]["labels"] == ["NO", "YES"]  # the cache has it
    finally:
        running.stop()
    assert len(exported) == 3
