"""Receipts, and `maskdial verify`: what is the model's, and what is wrong with what is not."""

import asyncio
import base64
import json
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest

from loadtests.kinds import KINDS, Kind
from maskdial import cli
from maskdial.bundle.bundle import read_manifests, write_manifest
from maskdial.config import load_config
from maskdial.offline.application import Application
from maskdial.offline.verify.entries import receipt_of_stream
from maskdial.offline.verify.verdict import Fault
from maskdial.receipts.content import lasting, reply_sha256, request_sha256
from maskdial.receipts.receipt import HEADER, Receipt, read_receipt
from maskdial.registry.catalog import STARTER_FOLDER
from tests.http.every_route import NEED_TORCH, TASKS, make_models

SETTINGS = {"threads": "1", "generation_config": "off"}
ASKS = {HEADER: "1"}
# Their replies are no model's: none is asked.
_NO_MODEL = {
    *("/tokenize", "/detokenize", "/decode", "/apply-template", "/v1/messages/count_tokens"),
    *("/api/show", "/v2/repository/index", "/models/load", "/models/unload", "/v1/prefill"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/api/pull"),
    *("/v2/repository/models/{name}/load", "/v2/repository/models/{name}/unload"),
}


def _chat(**fields: Any) -> Callable[[int], Any]:
    messages = [{"role": "user", "content": "Hello, you there. " * 30}]
    return lambda _: {"model": "hybrid", "messages": messages, "max_tokens": 50, **fields}


def _unmasked(stream: bool) -> Callable[[int], Any]:
    asked = {"model": "hybrid", "mask": "full", "prompt": "Once", "max_tokens": 12}
    return lambda _: {**asked, "temperature": 1, "stream": stream}


_LOOK = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {}},
}
_TOOLS = [{"type": "function", "function": _LOOK}]
_OWN_TOOLS = [{"name": "look", "input_schema": _LOOK["parameters"]}]
CALLS = tuple(
    Kind(f"{path} {stream}", path, _chat(stream=stream, **fields))
    for stream in (False, True)
    for path, fields in (
        ("/v1/chat/completions", {"tools": _TOOLS, "tool_choice": "required"}),
        ("/v1/messages", {"tools": _OWN_TOOLS, "tool_choice": {"type": "any"}}),
        ("/v2/chat", {"tools": _TOOLS, "tool_choice": "REQUIRED"}),
    )
)
DRAWN = (
    Kind("copies", "/v1/chat/completions", _chat(n=3, temperature=1, max_tokens=9, stream=True)),
    Kind(
        "prompts",
        "/v1/completions",
        lambda _: {"model": "hybrid", "prompt": ["A", "The"], "n": 2, "temperature": 1.0},
    ),
    Kind(
        "responses",
        "/v1/responses",
        lambda _: {"model": "hybrid", "input": "Hi " * 90, "temperature": 1, "stream": True},
    ),
    Kind(
        "joint",
        "/fill-mask",
        lambda _: {
            "model": "hybrid",
            "inputs": ["The [MASK] and the [MASK]"] * 2,
            "parameters": {"joint": True, "temperature": 1, "top_k": 3},
        },
    ),
    *(Kind(f"unmasked {stream}", "/v1/completions", _unmasked(stream)) for stream in (False, True)),
)


def receipt_of(headers: Any, body: bytes) -> str:
    return str(headers.get(HEADER) or receipt_of_stream(body.decode(errors="replace")))


def test_whatever_is_asked_again_with_its_seed_has_the_same_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every route of every dialect, streams and calls included; the clock goes on meanwhile."""
    models = [f"{name}={path}" for name, path in make_models(tmp_path).items()]
    kinds = [
        kind
        for kind in (*KINDS, *TASKS, *CALLS, *DRAWN)
        if kind.body is not None and kind.status == 200 and not (kind.leaves or kind.half)
        if kind.path not in NEED_TORCH | _NO_MODEL
    ]

    async def ask_all() -> int:
        num_asked = 0
        async with Application.start(load_config({"model": models, "threads": 1})) as application:
            for kind in kinds:
                assert kind.body is not None
                body = kind.body(5)
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                path = kind.target or kind.path
                first = await application.repeat(path, content, None)
                if b"no room for a receipt" in first.body or kind.name == "ollama load":
                    continue
                assert first.status == 200, (kind.name, first.body)
                one = read_receipt(receipt_of(first.headers, first.body)).receipt
                assert one.reply == reply_sha256(first.body)
                assert one.request == request_sha256(path, content, one.seed)
                again = await application.repeat(path, content, one.seed)
                other = read_receipt(receipt_of(again.headers, again.body)).receipt
                assert lasting(first.body) == lasting(again.body), kind.name
                assert one == other.model_copy(update={"time": one.time}), kind.name
                num_asked += 1
        return num_asked

    ticks = count(int(time.time()), 7)
    monkeypatch.setattr("time.time", lambda: float(next(ticks)))
    assert asyncio.run(ask_all()) > 70


@pytest.fixture(scope="module")
def log() -> list[dict[str, Any]]:
    """Replies of the starters, drawn without a seed but for the second, with receipts."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "Once", "temperature": 1, "max_tokens": 8}),
        ("/v1/completions", {"prompt": "Once", "temperature": 1, "max_tokens": 8, "seed": 5}),
        ("/v1/completions", {"prompt": "One", "temperature": 1, "max_tokens": 8, "stream": True}),
        ("/classify", {"inputs": "A fine film."}),
    ]

    async def ask() -> list[dict[str, Any]]:
        lines = []
        async with Application.start(load_config(SETTINGS)) as application:
            for path, fields in asked:
                model = "sentiment" if path == "/classify" else "hybrid"
                body = {"model": model, **fields}
                reply = await application.repeat(path, json.dumps(body).encode(), None)
                told: dict[str, Any] = {"body": reply.body.decode()}
                if not body.get("stream"):
                    told = {"body": json.loads(reply.body), "receipt": reply.headers[HEADER]}
                lines.append({"url": path, "body": body, "response": told})
        return lines

    return asyncio.run(ask())


Verify = Callable[..., list[list[str]]]


@pytest.fixture
def verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Verify:
    """Runs the command over lines; gives the faults of each, and leaves the sentences in `said`."""
    for name, value in SETTINGS.items():
        monkeypatch.setenv(f"MASKDIAL_{name.upper()}", value)

    def run(lines: list[Any], *arguments: str) -> list[list[str]]:
        (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        out = tmp_path / "verdicts.jsonl"
        status = cli.main(["verify", str(tmp_path / "log.jsonl"), *arguments, "--json", str(out)])
        found = [json.loads(line)["faults"] for line in out.read_text().splitlines()]
        assert status == (1 if any(found) else 0)
        said = capsys.readouterr().out.splitlines()
        assert said[-1].startswith(f"{len(lines)} lines, {sum(map(bool, found))} at fault")
        assert len(said) == 1 + sum(map(len, found))
        return [[each["fault"] for each in faults] for faults in found]

    return run


def altered(line: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A line whose receipt says something else, as anybody can write one that is not signed."""
    receipt = read_receipt(line["response"]["receipt"]).receipt.model_copy(update=changes)
    return {**line, "response": {**line["response"], "receipt": receipt.encode(None)}}


def replied(line: dict[str, Any], text: str, *, as_text: bool = False) -> dict[str, Any]:
    """A line with another text in its reply, perhaps as an access log has it."""
    body = json.loads(json.dumps(line["response"]["body"]))
    body["choices"][0]["text"] = text
    body = json.dumps(body, indent=1) if as_text else body
    return {**line, "response": {**line["response"], "body": body}}


def asked(line: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**line, "body": {**line["body"], **fields}}


def test_every_change_is_told_apart(log: list[dict[str, Any]], verify: Verify) -> None:
    drawn, seeded, streamed, classified = log
    text = drawn["response"]["body"]["choices"][0]["text"]
    stream = streamed["response"]["body"]
    forged = replied(drawn, f"{text}!")
    receipt = seeded["response"]["receipt"]
    cases: list[tuple[dict[str, Any], list[str]]] = [
        *((line, []) for line in log),
        # Written otherwise, with another id and another time
        (replied(drawn, text) | {"custom_id": "x"}, []),
        (asked({**seeded, "body": dict(reversed(seeded["body"].items()))}), []),
        (replied(drawn, text, as_text=True), []),
        # A character of the reply
        (forged, ["reply"]),
        (replied(drawn, text[:-1]), ["reply"]),
        (
            {**streamed, "response": {"body": stream.replace('"text":"', '"text":"x', 1)}},
            ["reply"],
        ),
        # ... with the receipt made to fit
        (
            altered(forged, reply=reply_sha256(json.dumps(forged["response"]["body"]).encode())),
            ["output"],
        ),
        # Of the request
        (asked(seeded, prompt="Twice"), ["request"]),
        (asked(seeded, user="someone else"), ["request"]),
        ({**classified, "url": "/models/sentiment"}, ["request"]),
        # The seed, in the request or in the receipt
        (asked(seeded, seed=6), ["seed"]),
        (altered(drawn, seed=6), ["seed"]),
        # The model, or the version of its bits
        (altered(drawn, bundle="0" * 64), ["bundle"]),
        (
            altered(drawn, bundle=read_receipt(classified["response"]["receipt"]).receipt.bundle),
            ["bundle"],
        ),
        (altered(drawn, numerics="0-onnxruntime-1.2.3"), ["numerics"]),
        (altered(drawn, asked="0" * 64), ["settings"]),
        # A receipt that is none
        ({**seeded, "response": {**seeded["response"], "receipt": receipt[:-9]}}, ["receipt"]),
        ({**seeded, "response": {**seeded["response"], "receipt": "x"}}, ["receipt"]),
        # No receipt: what is drawn without a seed cannot be had again
        ({**seeded, "response": {"body": seeded["response"]["body"]}}, []),
        ({**replied(seeded, "x"), "response": {"body": {}}}, ["output"]),
        ({**drawn, "response": {"body": drawn["response"]["body"]}}, ["unseeded"]),
        # What the server refuses
        (asked({**drawn, "response": {"body": {}}}, prompt=None), ["failed"]),
        (asked({**drawn, "response": {"body": {}}}, stream=f"\n\n: {HEADER} x\n\n"), ["failed"]),
        (asked(drawn, stream=f"\n\n: {HEADER} x\n\n"), ["failed"]),
        ({**drawn, "url": "/v1/nothing", "response": {"body": {}}}, ["failed"]),
        # Lines with faults
        ({**drawn, "body": "text"}, ["line"]),
        ({**drawn, "url": 3}, ["line"]),
        ({"url": "/classify", "body": {}}, ["line"]),
        ({**drawn, "response": {"body": {}, "receipt": 3}}, ["line"]),
    ]
    found = verify([line for line, _ in cases])
    assert found == [faults for _, faults in cases]


def test_without_a_model_receipts_say_what_was_changed(
    log: list[dict[str, Any]], verify: Verify
) -> None:
    drawn, seeded, *_ = log
    lines = [
        *(*log, replied(drawn, "x"), asked(seeded, seed=6), altered(drawn, seed=6)),
        {**drawn, "response": {"body": {}}},
    ]
    expected = [*[[]] * 4, ["reply"], ["request"], ["request"], ["receipt"]]
    assert verify(lines, "--no-run") == expected


def test_settings_of_the_server_are_told_from_the_model(
    log: list[dict[str, Any]], verify: Verify, tmp_path: Path
) -> None:
    """A default that a setting changes; the other lines do not depend on it."""
    config = tmp_path / "config.toml"
    config.write_text("max_context = 64\n")
    asked_for = {"model": "hybrid", "prompt": "The king said", "temperature": 0, "max_tokens": 80}

    async def ask() -> Any:
        async with Application.start(load_config(SETTINGS, config)) as application:
            body = json.dumps(asked_for).encode()
            return await application.repeat("/v1/completions", body, None)

    reply = asyncio.run(ask())
    told = {"body": json.loads(reply.body), "receipt": reply.headers[HEADER]}
    line = {"url": "/v1/completions", "body": asked_for, "response": told}
    assert verify([*log, line]) == [[], [], [], [], ["settings"]]
    assert verify([line], "--config", str(config)) == [[]]


def test_another_bundle_answers_otherwise(
    log: list[dict[str, Any]], verify: Verify, tmp_path: Path
) -> None:
    """Whatever in its manifest makes it another one."""
    shutil.copytree(STARTER_FOLDER / "sentiment", tmp_path / "sentiment")
    same = verify(log[3:], "--bundle", str(tmp_path / "sentiment"))
    (manifest,) = read_manifests("sentiment", tmp_path / "sentiment")
    labels = tuple(reversed(manifest.labels))
    write_manifest(tmp_path / "sentiment", manifest.model_copy(update={"labels": labels}))
    assert (same, verify(log[3:], "--bundle", str(tmp_path / "sentiment"))) == ([[]], [["bundle"]])


def test_signatures(
    log: list[dict[str, Any]], verify: Verify, tmp_path: Path, start_server: Callable[..., Any]
) -> None:
    """A key that the server signs with, and what is not signed by it."""
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as how
    from cryptography.hazmat.primitives.asymmetric import ed25519

    for name in ("key", "other"):
        (tmp_path / name).write_bytes(
            ed25519.Ed25519PrivateKey.generate().private_bytes(
                how.Encoding.PEM, how.PrivateFormat.PKCS8, how.NoEncryption()
            )
        )
    models = {name: STARTER_FOLDER / name for name in ("hybrid", "sentiment")}
    server = start_server(models=models, receipt_key=tmp_path / "key")
    body = {"model": "sentiment", "inputs": "A fine film."}
    reply = httpx.post(f"{server.url}/classify", json=body, headers=ASKS, timeout=60)
    server.stop()
    told = {"body": reply.json(), "receipt": reply.headers[HEADER]}
    signed = {"url": "/classify", "body": body, "response": told}
    header, content, signature = told["receipt"].split(".")
    fields = json.loads(base64.urlsafe_b64decode(content + "=="))
    later = json.dumps({**fields, "time": fields["time"] + 1}).encode()
    content = base64.urlsafe_b64encode(later).rstrip(b"=").decode()
    postdated = {**told, "receipt": f"{header}.{content}.{signature}"}
    lines = [signed, {**signed, "response": postdated}, altered(signed), log[3]]
    key = ("--public-key", str(tmp_path / "key"))
    assert verify(lines, *key) == [[], ["signature"], ["signature"], ["signature"]]
    assert verify([signed, {**signed, "response": {"body": []}}], *key) == [[], ["receipt"]]
    assert verify([signed], "--public-key", str(tmp_path / "other")) == [["signature"]]


def test_files_of_a_batch(
    verify: Verify, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `maskdial batch` takes and writes them, with receipts and without."""
    requests = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "hybrid", "prompt": f"The {i}", "temperature": 1, "max_tokens": 4},
        }
        for i in range(4)
    ]
    (tmp_path / "in").write_text("".join(f"{json.dumps(each)}\n" for each in requests))
    out = tmp_path / "out"
    jsonl = ("--format", "jsonl")
    assert cli.main(["batch", str(tmp_path / "in"), str(out), "--receipts", *jsonl]) == 0
    assert verify(requests, str(out)) == [[]] * 4
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    answers[1]["response"]["body"]["choices"][0]["text"] += "?"
    del answers[2]["response"]["receipt"]
    answers[3]["custom_id"] = "another"
    out.write_text("".join(f"{json.dumps(each)}\n" for each in reversed(answers)))
    assert verify(requests, str(out)) == [[], ["reply"], ["unseeded"], ["line"]]

    texts = [{"inputs": text} for text in ("good", "bad", "A dull film.", "x")]
    (tmp_path / "in").write_text("".join(f"{json.dumps(each)}\n" for each in texts))
    run = ["batch", str(tmp_path / "in"), str(out), "--task", "classify", *jsonl, "--overwrite"]
    assert cli.main(run) == 0
    assert verify(texts, str(out), "--task", "classify") == [[]] * 4
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    answers[2]["output"][0]["score"] += 1e-7
    out.write_text("".join(f"{json.dumps(each)}\n" for each in answers))
    assert verify(texts, str(out), "--task", "classify") == [[], [], ["output"], []]
    capsys.readouterr()
    for content, why in (("{}\n", "no answer of a batch"), (out.read_text() * 2, "alone")):
        out.write_text(content)
        assert cli.main(["verify", str(tmp_path / "in"), str(out)]) == 1
        assert why in capsys.readouterr().err


@pytest.fixture(scope="module")
def url(start_server: Callable[..., Any]) -> Iterator[str]:
    models = {name: STARTER_FOLDER / name for name in ("hybrid", "sentiment")}
    server = start_server(models=models)
    yield server.url
    server.stop()


def test_concurrent_texts_of_openais_client(url: str, verify: Verify) -> None:
    """Drawn at a temperature of 1, every other one streamed, all at once."""

    async def ask(number: int, client: openai.AsyncOpenAI) -> dict[str, Any]:
        body: Any = {"model": "hybrid", "prompt": f"No. {number}", "max_tokens": 12}
        body |= {"temperature": 1.0, "n": 1 + number % 2, "stream": number % 4 > 1}
        api = client.completions.with_streaming_response
        async with api.create(**body, extra_headers=ASKS) as reply:
            content = (await reply.read()).decode()
        told = {"body": content if body["stream"] else json.loads(content)}
        if not body["stream"]:
            told["receipt"] = reply.headers[HEADER]
        return {"url": "/v1/completions", "body": body, "response": told}

    async def ask_all() -> tuple[list[dict[str, Any]], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            lines = await asyncio.gather(*(ask(number, client) for number in range(16)))
            stream = await client.completions.create(
                model="hybrid", prompt="Once", max_tokens=3, stream=True, extra_headers=ASKS
            )
            return lines, [each.choices[0].text async for each in stream]

    lines, texts = asyncio.run(ask_all())
    assert len(texts) == 3  # the client passes over the receipt
    assert verify(lines) == [[]] * 16


def test_who_gets_no_receipt(url: str) -> None:
    good = {"model": "sentiment", "inputs": "good"}
    with httpx.Client(base_url=url, timeout=60) as http:
        assert HEADER not in http.post("/classify", json=good).headers
        assert HEADER not in http.post("/classify", json=good, headers={HEADER: "0"}).headers
        assert HEADER not in http.post("/tokenize", json=good, headers=ASKS).headers
        assert HEADER not in http.get("/models", headers=ASKS).headers
        refused = http.post("/classify", json={"model": "sentiment"}, headers=ASKS)
        assert (refused.status_code, HEADER in refused.headers) == (422, False)
        wrong = http.post("/classify", json=good, headers={HEADER: "yes"})
        assert wrong.status_code == 422
        assert wrong.json()["error"] == f"{HEADER} must be 1, which asks for a receipt, or 0"
        body = {"model": "hybrid", "prompt": "x", "options": {"num_predict": 2}}
        lines = http.post("/api/generate", json=body, headers=ASKS)
        assert lines.status_code == 400
        assert "no room for a receipt; set stream to false" in lines.json()["error"]
        whole = http.post("/api/generate", json={**body, "stream": False}, headers=ASKS)
        assert read_receipt(whole.headers[HEADER]).receipt.reply == reply_sha256(whole.content)


def test_fields_are_as_the_documentation_has_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "receipts.md").read_text(encoding="utf-8")
    assert [name for name in Receipt.model_fields if f"| `{name}` |" not in page] == []
    assert [name for name in get_args(Fault) if f"| `{name}` |" not in page] == []


def test_a_policys_model_is_told_also_where_its_verdict_is_remembered(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    rule = (
        '[[policies.mood.rules]]\nname = "{0}"\non = "{0}"\nmodel = "sentiment"\naction = "flag"\n'
    )
    labels = "labels = {NEGATIVE = 0.5}\n"
    rules = "".join(rule.format(side) + labels for side in ("input", "output"))
    policy.write_text(f'[policies.mood]\nmodels = ["hybrid"]\n{rules}')

    async def told(prompts: list[str], *, stream: bool) -> list[Receipt]:
        body = {"model": "hybrid", "prompt": prompts, "max_tokens": 40, "stream": stream}
        asked = json.dumps(body | {"temperature": 1, "seed": 3}).encode()
        async with Application.start(load_config(SETTINGS | {"policy": str(policy)})) as server:
            await server.repeat("/v1/completions", json.dumps(body | {"prompt": "A"}).encode(), 3)
            replies = [await server.repeat("/v1/completions", asked, None) for _ in range(2)]
        return [
            read_receipt(
                reply.headers.get(HEADER) or receipt_of_stream(reply.body.decode())
            ).receipt
            for reply in replies
        ]

    for stream in (False, True):
        first, second = asyncio.run(told(["A", "The"], stream=stream))
        assert first.bundle.count("+") == 1
        assert (first.bundle, first.asked) == (second.bundle, second.asked)
        assert first.reply == second.reply
