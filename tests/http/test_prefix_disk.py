"""A server whose prefixes are on disk: restarts, kills, reloads, other settings, and two keys."""

import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from maskdial.kernels.installed import find_kernels
from maskdial.registry.catalog import STARTER_FOLDER
from tests.adapters import make_adapter
from tests.disk import until
from tests.http.process import Process

HYBRID = STARTER_FOLDER / "hybrid"
KEYS = "alice:one\nalice:another\nbob:two\n"
STORY = "the king and the queen went to the sea. " * 20

Start = Callable[..., Any]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def ask(http: httpx.Client, prompt: str, key: str = "", **fields: Any) -> tuple[Any, int]:
    """What is written, to the last bit, and how much of the prompt was cached."""
    body = {"model": "hybrid", "prompt": prompt, "max_tokens": 8, "logprobs": 3, "seed": 3}
    reply = http.post("/v1/completions", json=body | fields, headers=bearer(key))
    assert reply.status_code == 200, reply.text
    content = reply.json()
    details = content["usage"]["prompt_tokens_details"]
    return content["choices"], int(details["cached_tokens"])


def disk_of(http: httpx.Client, key: str = "") -> dict[str, Any]:
    """What the server says of its prefixes on disk."""
    info: dict[str, Any] = http.get("/info", headers=bearer(key)).json()["prefix_disk"]
    return info


def counted(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


@contextmanager
def serving(start_server: Start, folder: Path, **settings: Any) -> Iterator[httpx.Client]:
    """A server with a folder, until its end, when it has written what it knows."""
    settings = {"models": {"hybrid": HYBRID}} | settings
    running = start_server(prefix_cache_dir=folder, **settings)
    try:
        with httpx.Client(base_url=running.url, timeout=60) as http:
            yield http
    finally:
        running.stop()


def test_a_restart(start_server: Start, tmp_path: Path) -> None:
    with serving(start_server, tmp_path) as http:
        first, cached = ask(http, STORY)
        assert cached == 0
        again, cached = ask(http, STORY)
        assert (again, cached >= 128) == (first, True)
        assert counted(http, "maskdial_prefix_cache_disk_hits_total") == 0
    with serving(start_server, tmp_path) as http:
        blocks = disk_of(http)["blocks"]
        assert blocks == cached // 64
        restored, from_disk = ask(http, STORY)
        assert (restored, from_disk) == (first, cached)
        assert counted(http, "maskdial_prefix_cache_disk_hits_total") == cached
        assert counted(http, "maskdial_prefix_cache_hits_total") == cached
        assert counted(http, "maskdial_prefix_disk_read_bytes_total") > 0
        info = disk_of(http)
        assert (info["problem"], info["blocks"]) == ("", blocks)
        files = [path for path in tmp_path.iterdir() if path.name != "lock"]
        assert info["bytes"] == sum(path.stat().st_size for path in files)
        (tier,) = info["models"]
        assert (tier["model"], tier["pays"]) == ("hybrid", True)
        assert tier["bytes_per_token"] > 0
        assert tier["read_bytes_per_second"] > 0
        assert tier["prefill_tokens_per_second"] is None or tier["prefill_tokens_per_second"] > 0
        assert ask(http, STORY)[0] == first
        assert counted(http, "maskdial_prefix_cache_disk_hits_total") == cached


def test_what_decides_the_bits_is_part_of_the_key(start_server: Start, tmp_path: Path) -> None:
    """Another type of KV cache, other kernels: nothing is found, and nothing is wrong."""
    if find_kernels("auto") is None:
        pytest.skip("the kernels are not built")
    cached = {}
    for settings in ({}, {"kv_cache_dtype": "float"}, {"kernels": "off"}, {}):
        with serving(start_server, tmp_path, **settings) as http:
            answer, cached[str(settings)] = ask(http, STORY)
        running = start_server(models={"hybrid": HYBRID}, **settings)
        with httpx.Client(base_url=running.url, timeout=60) as http:
            assert ask(http, STORY)[0] == answer
        running.stop()
    assert [found > 0 for found in cached.values()] == [True, False, False]


def test_unloading_and_a_new_version(start_server: Start, tmp_path: Path) -> None:
    """A bundle with the same weights finds what another one has read."""
    shelf = tmp_path / "bundles"
    shutil.copytree(HYBRID, shelf / "first")
    shutil.copytree(HYBRID, shelf / "second")
    admin = bearer("root")
    settings = {"models": {}, "model_dir": shelf, "admin_key": "root"}
    with serving(start_server, tmp_path / "disk", **settings) as http:

        def load(path: str) -> None:
            body = {"model": "mine", "path": path}
            assert http.post("/models/load", json=body, headers=admin).status_code == 200

        load("first")
        first, cached = ask(http, STORY, "root", model="mine")
        assert cached == 0
        until(lambda: disk_of(http, "root")["blocks"] >= 2)
        reply = http.post("/models/unload", json={"model": "mine"}, headers=admin)
        assert reply.status_code == 200
        load("first")
        again, cached = ask(http, STORY, "root", model="mine")
        assert (again, cached > 0) == (first, True)
        load("second")
        swapped, cached_by_second = ask(http, STORY, "root", model="mine")
        assert (swapped, cached_by_second) == (first, cached)


def test_adapters_are_kept_apart(start_server: Start, tmp_path: Path) -> None:
    if find_kernels("auto") is None:
        pytest.skip("adapters need the kernels, which are not built")
    one = make_adapter(tmp_path / "one", HYBRID, 1, size=0.15)
    settings = {"models": {"hybrid": HYBRID}, "adapters": {"one": (one, "hybrid")}}
    with serving(start_server, tmp_path / "disk", **settings) as http:
        base, cached = ask(http, STORY)
        assert cached == 0
        adapted, cached = ask(http, STORY, model="one")
        assert cached == 0
        assert adapted != base
    with serving(start_server, tmp_path / "disk", **settings) as http:
        for model, wanted in (("hybrid", base), ("one", adapted)):
            found, cached = ask(http, STORY, model=model)
            assert (found, cached > 0) == (wanted, True)


def test_two_keys_learn_nothing_of_each_others_prompts(start_server: Start, tmp_path: Path) -> None:
    """Neither by `cached_tokens` nor by what is read from disk for them, which takes time."""
    keys = tmp_path / "keys"
    keys.write_text(KEYS)
    settings = {"api_key_file": keys, "metrics_key": "m"}
    read = "maskdial_prefix_disk_read_bytes_total"
    with serving(start_server, tmp_path / "disk", **settings) as http:
        first, _ = ask(http, STORY, "one")
        ask(http, "It is " + STORY, "one", cache_salt="hers")
    with serving(start_server, tmp_path / "disk", **settings) as http:
        http.headers["authorization"] = "Bearer m"

        def bytes_read() -> float:
            return counted(http, read)

        for prompt in (STORY, "It is " + STORY):
            assert ask(http, prompt, "two")[1] == 0
        assert ask(http, "It is " + STORY, "one")[1] == 0  # without the salt
        assert bytes_read() == 0
        found, cached = ask(http, STORY, "another")  # of the same name
        assert (found, cached > 0) == (first, True)
        assert bytes_read() > 0
        assert ask(http, "It is " + STORY, "one", cache_salt="hers")[1] > 0


def test_what_a_key_can_see_is_the_same_for_a_right_guess_and_a_wrong_one(
    start_server: Start, tmp_path: Path
) -> None:
    """Every channel: `cached_tokens`, the tokens that are computed and the bytes that are read from
    disk, which are the time that it takes, `/metrics`, `/info`, and `/v1/prefill`.
    """
    keys, disk = tmp_path / "keys", tmp_path / "disk"
    keys.write_text(KEYS)
    settings = {"api_key_file": keys, "admin_key": "root", "metrics_key": "m"}
    secret = "Her number is 4711, " + STORY
    for_her = "You help the king. " * 30
    with serving(start_server, disk, **settings) as http:
        wanted, _ = ask(http, secret, "one")
        body = {"model": "hybrid", "key": "alice", "messages": [], "prompt": ""}
        refused = http.post("/v1/prefill", json=body, headers=bearer("two"))
        unknown = http.post("/v1/prefill", json=body | {"key": "nobody"}, headers=bearer("two"))
        assert (refused.status_code, refused.json()) == (401, unknown.json())
        ask(http, for_her, "one")

    def seen(guess: str, key: str = "two") -> dict[str, Any]:
        """What changes when a guess is sent, by a server to which all of it is new in memory."""
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(disk, copy)
        with serving(start_server, copy, **settings) as http:
            before = page(http)
            answers = [ask(http, guess, key) for _ in range(2)]
            after, info = page(http), disk_of(http, key)
        changed = {name: after[name] - before.get(name, 0.0) for name in after}
        return {
            "answer": [answer for answer, _ in answers],
            "cached": [cached for _, cached in answers],
            "metrics": {name: change for name, change in changed.items() if change},
            "written": sorted(path.stat().st_size for path in copy.iterdir()),  # `/info`, by then
            "pays": [tier["pays"] for tier in info["models"]],
            "read": [tier["read_bytes_per_second"] for tier in info["models"]],
        }

    right, wrong = seen(secret), seen(secret.replace("4711", "4712"))
    assert right.pop("answer") == [wanted] * 2  # which is no channel: the model writes it anyway
    wrong.pop("answer")
    assert right == wrong
    assert right["cached"][0] == 0
    assert right["cached"][1] > 0
    assert right["read"] == [None]
    assert right["metrics"]["maskdial_prefix_cache_hits_total"] == right["cached"][1]
    # And these are channels: to her, each tells.
    hers = seen(secret, "another")
    assert hers.pop("answer") == [wanted] * 2
    for channel in ("cached", "metrics", "written", "read"):
        assert hers[channel] != right[channel]


def page(http: httpx.Client) -> dict[str, float]:
    """The counts of `/metrics` that tell of prompts, by name, over all labels; without what is
    written behind, at whatever moment.
    """
    told = ("prefix", "prompt_tokens", "pass_tokens", "padded")
    found: dict[str, float] = {}
    for line in http.get("/metrics", headers=bearer("m")).text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        behind = name.startswith("maskdial_prefix_disk") and "read" not in name
        if not line.startswith("#") and not behind and any(word in name for word in told):
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def test_a_folder_of_another_server_is_not_used(start_server: Start, tmp_path: Path) -> None:
    with serving(start_server, tmp_path) as first, serving(start_server, tmp_path) as second:
        answer, _ = ask(first, STORY)
        assert ask(second, STORY) == (answer, 0)
        assert "another server has it" in disk_of(second)["problem"]
        assert disk_of(first)["problem"] == ""


def test_a_stored_response_goes_on_after_a_restart(
    start_server: Start, chat_bundle: Path, tmp_path: Path
) -> None:
    """Its conversation comes from the store of responses, and its prefix from disk."""
    settings = {
        "models": {"chat": chat_bundle},
        "responses_store": tmp_path / "responses.db",
    }

    def respond(http: httpx.Client, previous: str | None, text: str) -> tuple[str, Any, int]:
        body = {
            "model": "chat",
            "input": text,
            "previous_response_id": previous,
            "max_output_tokens": 16,
            "temperature": 0,
        }
        reply = http.post("/v1/responses", json=body)
        assert reply.status_code == 200, reply.text
        content = reply.json()
        cached = content["usage"]["input_tokens_details"]["cached_tokens"]
        return content["id"], content["output"][0]["content"], int(cached)

    folder = tmp_path / "disk"
    with serving(start_server, folder, **settings) as http:
        first, _, cached = respond(http, None, STORY)
        assert cached == 0
        until(lambda: disk_of(http)["blocks"] > 2)
    with serving(start_server, folder, **settings) as http:
        _, warm, cached = respond(http, first, "Who was at sea?")
        assert cached >= 128
        assert counted(http, "maskdial_prefix_cache_disk_hits_total") == cached
    with serving(start_server, tmp_path / "empty", **settings) as http:
        _, cold, cached = respond(http, first, "Who was at sea?")
        assert (cold, cached) == (warm, 0)


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(50, marks=pytest.mark.wide)])
def test_kills_under_load_change_no_answer(tmp_path: Path, num_kills: int) -> None:
    """SIGKILL at any moment: what is found afterwards is what was computed."""
    rng = random.Random(num_kills)
    prompts = [
        f"{rng.random()} " * rng.randint(5, 8) + STORY[: rng.randint(0, 500)] for _ in "12345"
    ]
    arguments = ("--model", f"hybrid={HYBRID}", "--max-context", "512", "--prefix-cache-dir")
    plain = Process(*arguments[:-1])
    try:
        plain.wait_until_ready()
        wanted = {prompt: ask(plain.http, prompt)[0] for prompt in prompts}
    finally:
        plain.close()
    answers, cached_tokens = 0, 0

    def load(process: Process, end: threading.Event) -> None:
        nonlocal answers, cached_tokens
        mine = random.Random(rng.random())
        with process.client() as http:
            while not end.is_set():
                prompt = mine.choice(prompts)
                try:
                    answer, cached = ask(http, prompt)
                except httpx.TransportError:
                    return
                assert answer == wanted[prompt]
                answers += 1
                cached_tokens += cached

    failed: list[BaseException] = []

    def watched(process: Process, end: threading.Event) -> None:
        try:
            load(process, end)
        except BaseException as error:
            failed.append(error)

    for _ in range(num_kills):
        # So little room that blocks are evicted all the time, in memory and on disk.
        process = Process(
            *arguments,
            str(tmp_path),
            *("--prefix-cache-disk-bytes", "3000000", "--prefix-cache-bytes", "1000000"),
        )
        try:
            process.wait_until_ready()
            end = threading.Event()
            clients = [threading.Thread(target=watched, args=(process, end)) for _ in range(3)]
            for client in clients:
                client.start()
            time.sleep(rng.uniform(0, 1.5))
            process.process.kill()
            end.set()
            for client in clients:
                client.join(60)
        finally:
            process.close()
        assert not failed, failed
        size = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert size <= 3_000_000 + 300_000  # and a block that was being written
    assert answers > 0
    process = Process(*arguments, str(tmp_path))
    try:
        process.wait_until_ready()
        assert disk_of(process.http)["problem"] == ""
        assert disk_of(process.http)["blocks"] > 0
        cached = 0
        for prompt in prompts:
            answer, found = ask(process.http, prompt)
            assert answer == wanted[prompt]
            cached += found
        assert cached > 0
        assert process.stop() == 0
    finally:
        process.close()
