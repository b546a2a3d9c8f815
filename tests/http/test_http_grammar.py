"""Constrained output over HTTP: texts are as their grammar says, and no grammar holds up others."""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from maskdial.registry.catalog import STARTER_FOLDER
from tests.held import HOUR, HeldTimers
from tests.servers import metric, wait_for

PROMPT = "Here is what we know of the king:"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["glad", "sad", None]},
        "friends": {
            "type": "array",
            "maxItems": 2,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["name", "age", "mood", "friends"],
    "additionalProperties": False,
}
LARK = 'start: " The " animal " and the " animal "."\nanimal: "cat" | "dog" | /[a-z]{3,5}/\n'
# About two seconds of a core, then it is refused: 401 * 409 * 419 states.
ENDLESS = {"allOf": [{"multipleOf": n} for n in (401, 409, 419)], "type": "integer"}


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


GRAMMARS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"type": "json", "value": SCHEMA}, is_person),
    ({"type": "json", "value": json.dumps(SCHEMA)}, is_person),
    ({"type": "json_schema", "value": SCHEMA}, is_person),
    ({"type": "json_schema", "value": {"name": "person", "schema": SCHEMA}}, is_person),
    (
        {"type": "regex", "value": r" (\d{1,3}\.){3}\d{1,3}"},
        lambda text: re.fullmatch(r" ([0-9]{1,3}\.){3}[0-9]{1,3}", text),
    ),
    ({"type": "regex", "value": "(ja|nein|ä{2}|日本)"}, {"ja", "nein", "ää", "日本"}.__contains__),
    (
        {"type": "lark", "value": LARK},
        lambda text: re.fullmatch(" The [a-z]{3,5} and the [a-z]{3,5}[.]", text),
    ),
]


def generate(http: httpx.Client, grammar: object, **parameters: object) -> httpx.Response:
    parameters = {"grammar": grammar, "max_new_tokens": 400, "details": True} | parameters
    return http.post("/generate", json={"inputs": PROMPT, "parameters": parameters})


@pytest.mark.parametrize(
    ("grammar", "fits"), GRAMMARS, ids=[str(grammar)[:60] for grammar, _ in GRAMMARS]
)
def test_texts_are_as_the_grammar_says(
    http: httpx.Client, grammar: dict[str, Any], fits: Callable[[str], object]
) -> None:
    greedy = generate(http, grammar)
    assert greedy.status_code == 200, greedy.text
    sampled = generate(http, grammar, n=8, temperature=1.5, seed=1)
    assert sampled.status_code == 200, sampled.text
    for reply in (greedy.json(), *sampled.json()):
        assert fits(reply["generated_text"]), reply["generated_text"]
        assert reply["details"]["finish_reason"] == "eos_token"
    assert len({reply["generated_text"] for reply in sampled.json()}) > 1
    alone = generate(http, grammar, temperature=1.5, seed=4).json()
    assert alone == sampled.json()[3]

    parameters = {"grammar": grammar, "max_new_tokens": 400, "temperature": 1.5, "seed": 4}
    body = {"inputs": PROMPT, "parameters": parameters}
    with http.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["token"] for event in events] == alone["details"]["tokens"]
    assert "".join(event["token"]["text"] for event in events) == alone["generated_text"]


def test_json_without_a_schema_is_an_object(http: httpx.Client) -> None:
    body = {"inputs": "}", "model": "hybrid", "add_special_tokens": False}
    ((brace,),) = http.post("/tokenize", json=body).json()
    values: list[dict[str, Any]] = [
        {},
        {"value": None},
        {"value": {}},
        {"value": {"type": "object"}},
    ]
    for value in values:
        # A brace that is made likely ends the object soon.
        parameters = {"logit_bias": {str(brace["id"]): 14.0}, "temperature": 1.0, "seed": 3, "n": 4}
        replies = generate(http, {"type": "json"} | value, max_new_tokens=150, **parameters).json()
        assert all(reply["generated_text"].startswith("{") for reply in replies)
        ended = [r for r in replies if r["details"]["finish_reason"] == "eos_token"]
        assert ended
        assert all(is_object(reply["generated_text"]) for reply in ended)


def test_a_grammar_with_other_parameters(http: httpx.Client) -> None:
    grammar = {"type": "regex", "value": "[ab]{20}"}
    few = generate(http, grammar, max_new_tokens=3).json()
    assert few["details"]["finish_reason"] == "length"
    assert re.fullmatch("[ab]{1,20}", few["generated_text"])
    # The grammar goes before what else is asked for.
    whole = generate(http, grammar, ignore_eos=True, logit_bias={"0": 100}, min_new_tokens=30)
    assert re.fullmatch("[ab]{20}", whole.json()["generated_text"])
    penalized = generate(http, grammar, repetition_penalty=2.0, presence_penalty=2, seed=2, top_p=1)
    assert re.fullmatch("[ab]{20}", penalized.json()["generated_text"])
    stopped = generate(http, {"type": "regex", "value": "(ab)+c"}, stop=["b"], top_k=1).json()
    assert stopped["details"]["finish_reason"] == "stop_sequence"
    assert stopped["generated_text"] == "ab"
    batch = http.post(
        "/generate", json={"inputs": ["a", "b", "c"], "parameters": {"grammar": grammar}}
    )
    assert all(re.fullmatch("[ab]{20}", text["generated_text"]) for text in batch.json())


def test_a_text_with_a_grammar_does_not_depend_on_company(http: httpx.Client) -> None:
    bodies = [
        {
            "inputs": PROMPT,
            "parameters": {"grammar": grammar, "max_new_tokens": 60, "details": True}
            | {"seed": seed, "temperature": 1.2},
        }
        for grammar, _ in GRAMMARS
        for seed in (1, 2)
    ]
    alone = [http.post("/generate", json=body).content for body in bodies]
    with ThreadPoolExecutor(10) as pool:
        together = list(
            pool.map(lambda body: http.post("/generate", json=body).content, bodies * 2)
        )
    assert together == alone * 2


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"type": "xml", "value": "a"}, "'json', 'json_schema', 'regex' or 'lark'"),
        ({"value": "a"}, "type: this field is required"),
        ({"type": "regex"}, "must be a string"),
        ({"type": "regex", "value": ""}, "must be a string"),
        ({"type": "regex", "value": 5}, "must be an object, a string"),
        ({"type": "regex", "value": "("}, "unclosed group"),
        ({"type": "regex", "value": "(?=a)a"}, "look-around"),
        ({"type": "regex", "value": "(" * 5000 + "a" + ")" * 5000}, "nest"),
        ({"type": "regex", "value": "a" * 17_000}, "17000 bytes"),
        ({"type": "lark", "value": "start: other"}, "unknown name"),
        ({"type": "lark", "value": 'start: start "a"'}, "no text matches it"),
        ({"type": "json", "value": "{"}, "not valid JSON"),
        ({"type": "json", "value": []}, "must be an object"),
        ({"type": "json", "value": False}, "no value satisfies"),
        ({"type": "json_schema"}, "must be an object"),
        ({"type": "json", "value": {"type": "unknown"}}, "Invalid type"),
        ({"type": "json", "value": {"$ref": "#"}}, "infinitely recursive"),
        ({"type": "json", "value": {"$ref": "file:///etc/hostname"}}, "does not fetch"),
        ({"type": "json", "value": "[" * 100_000}, "levels deep"),
        ({"type": "json", "value": json.loads('{"items": ' * 120 + "{}" + "}" * 120)}, "100 lev"),
        ({"type": "json", "value": {"enum": ["x" * 180] * 5000}}, "the limit is"),
        ({"type": "json", "value": {"required": [f"{i:x}" for i in range(30_000)]}}, "too "),
        ({"type": "regex", "value": "a", "extra": 1}, "extra: unknown field"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_grammars_that_cannot_be_used_are_refused(
    http: httpx.Client, grammar: dict[str, Any], words: str
) -> None:
    for route in ("/generate", "/generate_stream"):
        body = {"inputs": PROMPT, "parameters": {"grammar": grammar}}
        reply = http.post(route, json=body)
        assert reply.status_code == 422, reply.text
        assert set(reply.json()) == {"error", "error_type"}
        error = reply.json()["error"]
        assert error.startswith("parameters.grammar")
        assert words in error
        assert len(error) < 500


def test_a_grammar_that_becomes_too_complex_on_the_way(http: httpx.Client) -> None:
    grammar = {"type": "regex", "value": "((a{1,1000}){1,1000}){1,1000}☃"}  # no model ends it
    reply = generate(http, grammar)
    assert reply.status_code == 422, reply.text
    error = reply.json()
    assert error["error"].startswith("parameters.grammar: the grammar cannot be used")
    body = {"inputs": PROMPT, "parameters": {"grammar": grammar, "max_new_tokens": 400}}
    with http.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    *tokens, last = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert last == error
    assert {event["token"]["text"] for event in tokens} <= {"a" * n for n in range(1, 9)}


@pytest.mark.parametrize(
    "value",
    [
        "start: /[xy]/ /a+/ /a+/",
        'start: /[xy]/ /a+/ /a+/ // "\n',
        '%llguidance {"no_forcing": false}\nstart: /[xy]/ T*\nT: /a+/',
        "start: NAME NAME\nNAME: /[a-z]+/",
    ],
)
def test_a_text_that_can_only_go_on_ends_at_its_limit(http: httpx.Client, value: str) -> None:
    """The first of two greedy parts takes everything, so the text never ends by itself."""
    parameters = {"max_new_tokens": 20, "logit_bias": {"0": -100}}
    reply = generate(http, {"type": "lark", "value": value}, **parameters).json()
    assert reply["details"]["finish_reason"] == "length"
    assert re.fullmatch("[xy]a+|[a-z]+", reply["generated_text"])


@pytest.mark.slow
def test_hostile_grammars_hold_up_nobody_else(start_server: Callable[..., Any]) -> None:
    """While they are compiled the server answers, also what needs a thread, and keeps deadlines."""
    server = start_server(models={"hybrid": STARTER_FOLDER / "hybrid"})
    grammars = server.server.config.app.state.context.models.named("hybrid")[0].grammars
    go_on, check = threading.Event(), grammars._checker.check

    def wait_and_check(source: str) -> None:
        assert go_on.wait(60)
        check(source)

    grammars._checker.check = wait_and_check
    hostile = [{"type": "json", "value": ENDLESS | {"title": str(i)}} for i in range(12)]
    plain = {"type": "regex", "value": "a"}
    left = {"model": "hybrid", "outcome": "cancelled", "route": "/generate"}
    leaving_body = json.dumps({"inputs": "a", "parameters": {"grammar": plain}}).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(leaving_body)}\r\n\r\n"
    with (
        httpx.Client(base_url=server.url, timeout=60) as http,
        ThreadPoolExecutor(20) as pool,
        HeldTimers(server.server._loop) as timers,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(go_on.set)
        patient = pool.submit(generate, http, hostile[0])
        wait_for(lambda: grammars.num_compiling == 1)
        # The others wait for the compiler until their own time is over.
        hurried = [
            pool.submit(
                http.post,
                "/generate",
                json={"inputs": "a", "timeout": HOUR, "parameters": {"grammar": grammar}},
            )
            for grammar in hostile[1:]
        ]
        wait_for(lambda: grammars.num_compiling == len(hostile))
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as leaving:
            leaving.sendall(head.encode() + leaving_body)
            wait_for(lambda: grammars.num_compiling == len(hostile) + 1)
        wait_for(lambda: metric(http, "maskdial_requests_total", **left) == 1)
        assert http.get("/health/live").status_code == 200
        long = {"inputs": "the " * 1200, "parameters": {"truncate": 50, "max_new_tokens": 2}}
        assert http.post("/generate", json=long).status_code == 200
        assert http.get("/health/ready").status_code == 200
        timers.go_off()
        assert {request.result().status_code for request in hurried} == {504}
        assert not patient.done()
        go_on.set()
        refusal = patient.result()
        assert refusal.status_code == 422
        assert "too complex" in refusal.json()["error"]
        assert generate(http, plain).json()["generated_text"] == "a"
    server.stop()
