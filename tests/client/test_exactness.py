"""``maskdial exactness``: servers that are exact, drift, flip, fail or lack things."""

import argparse
import asyncio
import json
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from maskdial_client.exactness.command import add_arguments, run

Json = Mapping[str, Any]


class Stand(httpx.AsyncBaseTransport):
    """A server that writes words which depend on the prompt only, but for its faults.

    Args:
        faults: what is wrong with it: a function of the number of open requests and the body,
            which returns a fault's name.
        lacks: fields of bodies that it refuses.
        routes: paths that it has beside `/v1/models`.
    """

    def __init__(
        self,
        faults: Callable[[int, Json], str] = lambda *_: "",
        lacks: frozenset[str] = frozenset(),
        routes: frozenset[str] = frozenset({"/v1/completions"}),
    ) -> None:
        self._faults = faults
        self._lacks = lacks
        self._routes = routes
        self._num_open = 0
        self.num_asked = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "stand"}]})
        if path not in self._routes:
            return httpx.Response(404, json={"error": "there is no such route"})
        body = json.loads(await request.aread())
        self.num_asked += 1
        for name in body:
            if name in self._lacks:
                return httpx.Response(422, json={"error": f"{name}: unknown field"})
        self._num_open += 1
        try:
            await asyncio.sleep(0.001)
            fault = self._faults(self._num_open, body)
        finally:
            self._num_open -= 1
        if fault == "error":
            return httpx.Response(500, json={"error": "no slot"})
        if fault == "slow":
            raise httpx.ReadTimeout("", request=request)
        if path == "/v1/embeddings":
            vectors = list(map(self._vector, body["input"]))
            return httpx.Response(200, json={"data": vectors[:1] if fault == "short" else vectors})
        return _reply(body, fault, path)

    @staticmethod
    def _vector(text: str) -> Json:
        return {"object": "embedding", "index": 0, "embedding": [len(text) / 7, 0.25]}


def _reply(body: Json, fault: str, path: str) -> httpx.Response:
    prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    # What follows depends on the last word, so that a prompt in two parts gets the same.
    number = zlib.crc32(re.split(r"[ \n]", prompt)[-1].encode()) + body.get("seed", 0)
    words = []
    for _ in range(body["max_tokens"]):
        number = number * 1_103_515_245 % 2**31
        words.append(f" w{'abcdefgh'[number % 8]}")
        number = zlib.crc32(words[-1].strip().encode()) + body.get("seed", 0)
    if fault == "flip":
        words[3] = " other"
    if "response_format" in body:
        words = ['{"title":"a","year":1,"kind":"poem"}' if fault != "schema" else '{"title":']
    # Log-probabilities depend on the token
    logprobs = [-len(word) / 9 - (1e-6 if fault == "drift" else 0) for word in words]
    described: Any = {
        "tokens": words,
        "token_logprobs": logprobs,
        "top_logprobs": [{word: -0.5, "x": -0.75} for word in words],
    }
    if path.endswith("/chat/completions"):
        described = {
            "content": [
                {"token": word, "logprob": logprob, "top_logprobs": []}
                for word, logprob in zip(words, logprobs, strict=True)
            ]
        }
    choice: dict[str, Any] = {"finish_reason": "stop"}
    if body.get("logprobs"):
        choice["logprobs"] = described
    text = "".join(words)
    if path.endswith("/chat/completions"):
        choice["delta" if body.get("stream") else "message"] = {"content": text}
    else:
        choice["text"] = text
    if not body.get("stream"):
        return httpx.Response(200, json={"choices": [choice]})
    events = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    return httpx.Response(200, content=events.encode())


def exactness(
    server: Stand, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, dict[str, Any]]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(
        ["http://127.0.0.1:1", "--requests", "4", "--concurrency", "4", "--json", *arguments]
    )
    status = run(options, server)
    captured = capsys.readouterr()
    return status, json.loads(captured.out) if captured.out else {"error": captured.err}


def check(report: Json, name: str) -> Json:
    (found,) = (each for each in report["checks"] if each["check"] == name)
    return dict(found)


def test_an_exact_server_has_nothing_to_report(capsys: pytest.CaptureFixture[str]) -> None:
    server = Stand(routes=frozenset({"/v1/completions", "/v1/embeddings"}))
    status, report = exactness(server, capsys)
    assert (status, report["severity"]) == (0, 0)
    assert (report["model"], report["route"]) == ("stand", "/v1/completions")
    asked = {each["check"]: each["asked"] for each in report["checks"]}
    assert asked["alone, once more"] == asked["streamed"] == asked["2 at once"] == 4
    assert asked["4 at once"] == 8
    assert asked["in two requests"] == 4
    assert asked["/v1/embeddings, in one list"] == 4
    assert "404" in check(report, "in a batch")["not_checked"]
    assert all(each["severity"] == 0 for each in report["checks"])


def test_numbers_that_drift_in_company(capsys: pytest.CaptureFixture[str]) -> None:
    server = Stand(lambda num_open, _: "drift" if num_open > 1 else "")
    status, report = exactness(server, capsys)
    assert status == 10
    assert check(report, "alone, once more")["severity"] == 0
    found = check(report, "4 at once")
    assert found["severity"] == 10
    assert found["other_texts"] == 0
    assert found["other_numbers"] >= 4
    assert found["largest_difference"] == pytest.approx(1e-6)


def test_texts_that_flip_name_the_token_and_the_gap(capsys: pytest.CaptureFixture[str]) -> None:
    server = Stand(lambda num_open, body: "flip" if "cache_salt" in body else "")
    status, report = exactness(server, capsys)
    assert status == 20
    found = check(report, "with a cold prefix (cache_salt)")
    assert found["other_texts"] == 4
    assert re.fullmatch(
        r"question 1, token 4 \(gap to the second 0\.2500\): ' w.' became ' other'",
        found["first_difference"],
    )
    assert check(report, "4 at once")["severity"] == 0


def test_a_schema_that_is_broken_in_company(capsys: pytest.CaptureFixture[str]) -> None:
    server = Stand(
        lambda num_open, body: "schema" if "response_format" in body and num_open > 1 else ""
    )
    status, report = exactness(server, capsys)
    assert status == 30
    assert check(report, "under a JSON schema, once more")["severity"] == 0
    (first, *_) = check(report, "under a JSON schema, 4 at once")["broken"]
    assert first.endswith("the reply under a schema is no JSON: '{\"title\":'")


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("error", "/v1/completions answers 500"), ("slow", "allow more by --timeout")],
)
def test_a_server_that_fails_under_load(
    fault: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Stand(lambda num_open, _: fault if num_open > 2 else "")
    status, report = exactness(server, capsys)
    assert status == 30
    assert check(report, "2 at once")["broken"] == []
    broken = check(report, "4 at once")["broken"]
    assert broken
    assert all(sentence in each for each in broken)


def test_what_a_server_lacks_is_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    lacks = frozenset({"logprobs", "cache_salt", "response_format", "seed"})
    server = Stand(lacks=lacks)
    status, report = exactness(server, capsys)
    assert status == 0
    assert report["log_probabilities"] is False
    for name in ("with the prefix cached", "under a JSON schema", "seeded, temperature 0.8"):
        assert "unknown field" in check(report, name)["not_checked"]
    assert "no text has tokens" in check(report, "in two requests")["not_checked"]
    assert check(report, "4 at once")["largest_difference"] is None


def test_a_server_that_only_chats(capsys: pytest.CaptureFixture[str]) -> None:
    server = Stand(routes=frozenset({"/v1/chat/completions"}))
    status, report = exactness(server, capsys)
    assert (status, report["route"]) == (0, "/v1/chat/completions")
    assert check(report, "streamed")["asked"] == 4
    assert "no prompt" in check(report, "in two requests")["not_checked"]


def test_a_server_of_vectors(capsys: pytest.CaptureFixture[str]) -> None:
    server = Stand(routes=frozenset({"/v1/embeddings"}))
    status, report = exactness(server, capsys)
    assert (status, report["route"]) == (0, None)
    assert check(report, "/v1/embeddings, 4 at once")["asked"] == 8


def test_a_list_with_too_few_answers(capsys: pytest.CaptureFixture[str]) -> None:
    server = Stand(lambda *_: "short", routes=frozenset({"/v1/embeddings"}))
    status, report = exactness(server, capsys)
    assert status == 30
    found = check(report, "/v1/embeddings, in one list")
    assert len(found["broken"]) == 3
    assert found["broken"][0].endswith("/v1/embeddings gives 1 answers to 4 texts")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--route", "chat"), "/v1/chat/completions answers 404"),
        (("--route", "none"), "no route that could be asked"),
    ],
)
def test_a_server_that_cannot_be_asked(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = exactness(Stand(), capsys, *arguments)
    assert status == 1
    assert sentence in report["error"]


@pytest.mark.parametrize("url", ["http://example.org", "http://10.0.0.7:8000", "ftp://x", "x"])
def test_another_machine_is_not_asked_by_mistake(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Stand()
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args([url]), server) == 1
    assert server.num_asked == 0
    assert "--remote" in (said := capsys.readouterr().err) or "not an http" in said


def test_what_it_asks_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    server = Stand()
    exactness(server, capsys, "--requests", "2", "--concurrency", "2")
    assert server.num_asked < 80
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["http://127.0.0.1", "--concurrency", "1000"])


def test_the_table_has_a_row_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["http://127.0.0.1:1", "--requests", "2", "--concurrency", "2"])
    server = Stand(lambda num_open, body: "flip" if body.get("stream") else "")
    assert run(options, server) == 20
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "http://127.0.0.1:1, model stand, /v1/completions"
    (streamed,) = (line for line in lines if line.startswith("streamed"))
    assert streamed.split() == ["streamed", "2", "2", "0", "0"]
    assert "became ' other'" in lines[lines.index(streamed) + 1]
    assert lines[-1].startswith("Of ")
