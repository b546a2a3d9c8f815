"""Kinds of requests: each route of each dialect as its clients use it, with the status it gets."""

import asyncio
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests import LoadTestError
from loadtests.server import Connection, post
from maskdial.bundle.bundle import file_sha256, read_manifests, write_manifest
from maskdial.bundle.manifest import CHAT_TEMPLATE
from maskdial.registry.catalog import STARTER_FOLDER

Body = Callable[[int], Any]
"""The JSON value of the request with a number, or its bytes."""

KEY, ADMIN_KEY = "loadtests", "loadtests-admin"
SETTINGS: dict[str, Any] = {
    "api_key": KEY,
    "admin_key": ADMIN_KEY,
    "max_body_bytes": 400_000,
    "max_queue": 64,
    "body_timeout": 0.5,
    # Every text is new, so a larger cache takes hours to fill.
    "prefix_cache_bytes": 1_000_000,
}
"""What a server needs so that every kind gets its status, and its caches are soon full."""

_CLIENTS = 4
# The server ends the connection with such a reply.
_CLOSING_STATUSES = (408, 413, 431, 503)
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
_OPENINGS = ("Once upon a time", "The old king", "In the middle of the night", "She had never")


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request.

    Attributes:
        name: unique.
        path: as the OpenAPI document spells it.
        body: no two numbers have the same text. None: the request is a GET.
        status: of every reply.
        headers: beside the key's and those of JSON.
        target: the path that is asked, where ``path`` has parameters.
        leaves: the client closes the connection at the first piece of the reply's body.
        half: only a half of the body is sent.
        num_clients: requests that are open at once.
        then: a request that follows each of these on the same connection.
    """

    name: str
    path: str
    body: Body | None = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    target: str = ""
    leaves: bool = False
    half: bool = False
    num_clients: int = _CLIENTS
    then: "Kind | None" = None

    @property
    def closes(self) -> bool:
        """Whether either side closes the connection after a request."""
        return self.leaves or self.status in _CLOSING_STATUSES

    def encode(self, number: int) -> bytes:
        """The request with a number on the wire."""
        path = self.target or self.path
        headers = {"Authorization": f"Bearer {KEY}", **self.headers}
        if self.body is None:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\n".encode()
        body = self.body(number)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = post(path, content, headers)
        return request[: len(request) - len(content) // 2] if self.half else request


def chatting_starters(folder: Path) -> dict[str, Path]:
    """The starters, the ``hybrid`` with a chat template: a copy of it in the folder."""
    hybrid = Path(shutil.copytree(STARTER_FOLDER / "hybrid", folder / "hybrid"))
    (hybrid / CHAT_TEMPLATE).write_text(_TEMPLATE, encoding="utf-8")
    causal = read_manifests("hybrid", hybrid)[0]
    files = {**causal.files, CHAT_TEMPLATE: file_sha256(hybrid / CHAT_TEMPLATE)}
    write_manifest(hybrid, causal.model_copy(update={"files": files}))
    return {"hybrid": hybrid, "sentiment": STARTER_FOLDER / "sentiment"}


async def ask_kind(port: int, kind: Kind, numbers: Iterable[int]) -> None:
    """Sends requests of a kind, several at a time.

    Raises:
        LoadTestError: a reply had another status than the kind's, or did not come.
    """
    supply = iter(numbers)

    async def client() -> None:
        connection = await Connection.open(port)
        try:
            for number in supply:
                step: Kind | None = kind
                while step is not None:
                    if connection.closed or step.closes:
                        connection.close()
                        connection = await Connection.open(port)
                    await _ask(connection, step, number)
                    step = step.then
        finally:
            connection.close()

    await asyncio.gather(*(client() for _ in range(kind.num_clients)))


async def _ask(connection: Connection, kind: Kind, number: int) -> None:
    def leave(_: bytes) -> None:
        connection.close()

    try:
        reply = await connection.send(kind.encode(number), leave if kind.leaves else None)
    except LoadTestError as error:
        if not kind.leaves:
            raise LoadTestError(f"{kind.name}: {error}") from error
    else:
        if reply.status != kind.status:
            raise LoadTestError(f"{kind.name}: {reply}")


_WORDS = "bdfgklmnprst"
_VOWELS = "aeiou"


def word(number: int) -> str:
    """A made-up word of eight letters, the number's own."""
    digits = ((number // 60**place) % 60 for place in range(4))
    return "".join(_WORDS[digit // 5] + _VOWELS[digit % 5] for digit in digits)


def text(number: int) -> str:
    """A sentence that contains the number's word."""
    opening = _OPENINGS[number % len(_OPENINGS)]
    return f"{opening} there was a {word(number)} who lived in a house by the sea"


def inputs(model: str, **fields: Any) -> Body:
    """Bodies of the tasks that read one text."""
    return lambda number: {"inputs": text(number), "model": model, **fields}


def _generate(**parameters: Any) -> Body:
    return inputs("hybrid", parameters={"max_new_tokens": 4, "temperature": 0, **parameters})


def _constrained(kind: str, value: Body) -> Body:
    def body(number: int) -> Any:
        return _generate(max_new_tokens=8, grammar={"type": kind, "value": value(number)})(number)

    return body


def _completion(**fields: Any) -> Body:
    return lambda n: {"model": "hybrid", "prompt": text(n), "max_tokens": 4, **fields}


def _completion_with_unknown(number: int) -> dict[str, Any]:
    return {"model": "hybrid", "prompt": text(number), "max_tokens": 1, word(number): 1}


def _chat(**fields: Any) -> Body:
    return lambda number: {
        "model": "hybrid",
        "messages": [{"role": "user", "content": text(number)}],
        "max_tokens": 4,
        **fields,
    }


def _response(**fields: Any) -> Body:
    return lambda n: {"model": "hybrid", "input": text(n), "max_output_tokens": 16, **fields}


def _ollama(*, num_predict: int = 4, **fields: Any) -> Body:
    return lambda number: {
        "model": "hybrid:latest",
        "messages": [{"role": "user", "content": text(number)}],
        "options": {"num_predict": num_predict, "temperature": 0},
        **fields,
    }


def _ollama_prompt(number: int) -> Any:
    options = {"num_predict": 4, "temperature": 0}
    return {"model": "hybrid", "prompt": text(number), "raw": True, "options": options}


def _schema(number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"enum": [word(number), "Tom"]}, "age": {"enum": [3, 7]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }


def _with_tool(number: int) -> Any:
    schema = {"type": "object", "properties": {}, "title": word(number)}
    function = {"name": "look", "description": "Looks.", "parameters": schema}
    tools = [{"type": "function", "function": function}]
    return _chat(max_tokens=40, tool_choice="required", tools=tools)(number)


def _tensor(number: int) -> Any:
    tensor = {"name": "inputs", "shape": [1], "datatype": "BYTES", "data": [text(number)]}
    return {"inputs": [tensor]}


def _many_words(number: int) -> Any:
    return {"enum": [word(_MANY_WORDS * number + each) for each in range(_MANY_WORDS)]}


def _decision(number: int) -> Any:
    choices = [{"value": "POSITIVE"}, {"value": "NEGATIVE"}]
    question = {"type": "choice", "instructions": "What is it?", "choices": choices}
    return {"model": "sentiment", "input": text(number), "questions": [question]}


def _named_decision(number: int) -> Any:
    question = {"type": "choice", "criteria": {"POSITIVE": None, "NEGATIVE": None}}
    return {"model": "sentiment", "state": text(number), "questions": {"film": question}}


_MANY_WORDS = 600
_ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
_LONG = {"max_new_tokens": 200}

KINDS: tuple[Kind, ...] = (
    Kind("fill-mask", "/fill-mask", lambda n: {"inputs": f"[MASK] {text(n)}", "model": "hybrid"}),
    Kind(
        "fill-mask joint",
        "/fill-mask",
        lambda n: {
            "inputs": f"[MASK] {word(n)} [MASK]",
            "model": "hybrid",
            "parameters": {"joint": True, "num_beams": 2},
        },
    ),
    Kind(
        "infill",
        "/infill",
        # Each length that is tried is a text of its own in the queue.
        lambda n: {
            "input_prefix": word(n),
            "input_suffix": " sea",
            "n_predict": 2,
            "model": "hybrid",
        },
    ),
    Kind("classify", "/classify", inputs("sentiment")),
    Kind("classify many", "/classify", lambda n: {"inputs": [text(n)] * 4, "model": "sentiment"}),
    Kind("dispatched", "/models/{name}", lambda n: {"inputs": text(n)}, target="/models/sentiment"),
    Kind("score", "/score", inputs("hybrid")),
    Kind("pseudo score", "/score", lambda n: {"inputs": word(n), "model": "hybrid:full"}),
    Kind("tokenize", "/tokenize", inputs("hybrid")),
    Kind(
        "detokenize",
        "/detokenize",
        lambda n: {"ids": [*(300 + each for each in divmod(n, 10_000)), 607], "model": "hybrid"},
    ),
    Kind("generate", "/generate", _generate()),
    Kind("generate sampled", "/generate", _generate(temperature=1, top_k=20, top_p=0.9)),
    Kind("generate details", "/generate", _generate(details=True, top_n_tokens=3)),
    Kind("generate best of", "/generate", _generate(temperature=1, do_sample=True, best_of=2)),
    Kind("generate stop", "/generate", _generate(stop=["the", "."])),
    Kind("generate schema", "/generate", _constrained("json", _schema)),
    Kind("generate regex", "/generate", _constrained("regex", lambda n: f"{word(n)}( [a-z])+")),
    Kind("generate words", "/generate", _constrained("json", _many_words)),
    Kind("stream", "/generate_stream", _generate()),
    Kind("stream left", "/generate_stream", _generate(**_LONG), leaves=True),
    Kind("completions", "/v1/completions", _completion()),
    Kind("completions echo", "/v1/completions", _completion(echo=True, logprobs=2)),
    Kind("completions n", "/v1/completions", _completion(n=2, temperature=1)),
    Kind("completions stream", "/v1/completions", _completion(stream=True)),
    Kind("chat", "/v1/chat/completions", _chat()),
    Kind(
        "chat of a model",
        "/models/{name}/v1/chat/completions",
        _chat(),
        target="/models/hybrid/v1/chat/completions",
    ),
    Kind("chat without a version", "/chat/completions", _chat()),
    Kind("template", "/apply-template", _chat()),
    Kind(
        "completion",
        "/completion",
        lambda n: {"model": "hybrid", "prompt": text(n), "n_predict": 4},
    ),
    Kind("fim", "/v1/fim/completions", _completion()),
    Kind("props", "/props", target="/props?model=hybrid"),
    Kind("slots", "/slots", target="/slots?model=hybrid"),
    Kind("version", "/version"),
    Kind("studio models", "/api/v0/models"),
    Kind("studio model", "/api/v0/models/{name}", target="/api/v0/models/hybrid"),
    Kind("chat stream", "/v1/chat/completions", _chat(stream=True)),
    Kind("chat left", "/v1/chat/completions", _chat(stream=True, max_tokens=200), leaves=True),
    Kind("chat tools", "/v1/chat/completions", _with_tool),
    Kind("responses", "/v1/responses", _response()),
    Kind("responses stream", "/v1/responses", _response(stream=True)),
    Kind("compact", "/v1/responses/compact", _response()),
    Kind("response by id", "/v1/responses/{id}", status=404, target="/v1/responses/resp_1"),
    Kind(
        "cancel a response",
        "/v1/responses/{id}/cancel",
        lambda _: {},
        404,
        target="/v1/responses/resp_1/cancel",
    ),
    Kind("messages", "/v1/messages", _chat()),
    Kind("messages stream", "/v1/messages", _chat(stream=True)),
    Kind(
        "count tokens",
        "/v1/messages/count_tokens",
        lambda n: {"model": "hybrid", "messages": [{"role": "user", "content": text(n)}]},
    ),
    Kind("cohere chat", "/v2/chat", _chat()),
    Kind("cohere chat stream", "/v2/chat", _chat(stream=True)),
    Kind(
        "moderations",
        "/v1/moderations",
        lambda n: {"model": "sentiment", "input": [text(n), word(n)]},
    ),
    Kind("pooling", "/pooling", lambda n: {"model": "sentiment", "input": [text(n), word(n)]}),
    Kind("decisions", "/v1/decisions", _decision),
    Kind("systemone", "/v1/systemone", _named_decision),
    Kind("ollama chat", "/api/chat", _ollama(stream=False)),
    Kind("ollama chat stream", "/api/chat", _ollama()),
    Kind("ollama chat left", "/api/chat", _ollama(num_predict=200), leaves=True),
    Kind("ollama generate", "/api/generate", _ollama_prompt),
    Kind("ollama load", "/api/generate", lambda _: {"model": "hybrid"}),
    Kind("ollama show", "/api/show", lambda _: {"model": "hybrid"}),
    Kind("ollama pull", "/api/pull", lambda _: {"model": "hybrid"}),
    *(
        Kind(f"403 {path}", path, lambda n: {"model": word(n)}, 403, target=target)
        for path, target in (
            ("/api/push", ""),
            ("/api/create", ""),
            ("/api/copy", ""),
            ("/api/blobs/{digest}", "/api/blobs/sha256:a"),
        )
    ),
    *(  # without --batch-dir
        Kind(f"403 {path}", path, body, 403, target=target)
        for path, body, target in (
            ("/v1/files", lambda n: {"purpose": word(n)}, ""),
            ("/v1/files/{id}", None, "/v1/files/file-1"),
            ("/v1/files/{id}/content", None, "/v1/files/file-1/content"),
            ("/v1/batches", lambda n: {"endpoint": word(n)}, ""),
            ("/v1/batches/{id}", None, "/v1/batches/batch_1"),
            ("/v1/batches/{id}/cancel", lambda _: {}, "/v1/batches/batch_1/cancel"),
            ("/v1/messages/batches", lambda n: {"requests": word(n)}, ""),
            ("/v1/messages/batches/{id}", None, "/v1/messages/batches/msgbatch_1"),
            (
                "/v1/messages/batches/{id}/results",
                None,
                "/v1/messages/batches/msgbatch_1/results",
            ),
            (
                "/v1/messages/batches/{id}/cancel",
                lambda _: {},
                "/v1/messages/batches/msgbatch_1/cancel",
            ),
        )
    ),
    Kind("405 delete", "/api/delete", status=405),
    Kind("401 ollama unload", "/api/chat", lambda _: {"model": "hybrid", "keep_alive": 0}, 401),
    # Clients that ask at once share one reply, which takes long.
    Kind("/metrics", "/metrics", num_clients=32),
    *(
        Kind(path, path)
        for path in (
            *("/models", "/info", "/health/live", "/health/ready", "/v1/models"),
            *("/api/version", "/api/tags", "/api/ps"),
            *("/v2", "/v2/health/live", "/v2/health/ready", "/openapi.json"),
        )
    ),
    Kind("model", "/v1/models/{name}", target="/v1/models/hybrid"),
    Kind("/v2 model", "/v2/models/{name}", target="/v2/models/hybrid"),
    Kind("/v2 model ready", "/v2/models/{name}/ready", target="/v2/models/hybrid/ready"),
    Kind("/v2 statistics", "/v2/models/stats"),
    *(
        Kind(f"/v2 {what}", f"/v2/models/{{name}}/{what}", target=f"/v2/models/hybrid/{what}")
        for what in ("config", "stats")
    ),
    *(
        Kind(
            f"/v2 version {what}",
            f"/v2/models/{{name}}/versions/{{version}}/{what}",
            target=f"/v2/models/hybrid/versions/1/{what}",
        )
        for what in ("config", "stats")
    ),
    Kind("infer", "/v2/models/{name}/infer", _tensor, target="/v2/models/sentiment/infer"),
    Kind(
        "infer a version",
        "/v2/models/{name}/versions/{version}/infer",
        _tensor,
        target="/v2/models/sentiment/versions/1/infer",
    ),
    Kind(
        "/v2 version",
        "/v2/models/{name}/versions/{version}",
        target="/v2/models/hybrid/versions/1",
    ),
    Kind(
        "/v2 version ready",
        "/v2/models/{name}/versions/{version}/ready",
        target="/v2/models/hybrid/versions/1/ready",
    ),
    *(
        Kind(
            f"triton {name}",
            f"/v2/models/{{name}}/{name}",
            lambda n: {"text_input": text(n), "parameters": {"max_new_tokens": 4}},
            target=f"/v2/models/hybrid/{name}",
        )
        for name in ("generate", "generate_stream")
    ),
    Kind(
        "predict instances",
        "/v1/models/{name}:predict",
        lambda n: {"instances": [text(n), word(n)]},
        target="/v1/models/sentiment:predict",
    ),
    Kind("tokenizer info", "/tokenizer_info", target="/tokenizer_info?model=hybrid"),
    Kind("index", "/v2/repository/index", lambda _: {}),
    Kind("400", "/v1/completions", lambda n: {"model": "hybrid", "prompt": [word(n), 1]}, 400),
    Kind("ignored", "/v1/completions", _completion_with_unknown),
    Kind("401", "/classify", inputs("sentiment"), 401, {"Authorization": "Bearer x"}),
    Kind(
        "prefill",
        "/v1/prefill",
        _chat(key="admin"),
        headers=_ADMIN,
    ),
    Kind("401 admin", "/models/load", lambda n: {"model": word(n)}, 401),
    Kind("404", "/classify", lambda n: {"inputs": "x", "model": word(n)}, 404, {}),
    Kind("404 load", "/models/load", lambda n: {"model": word(n)}, 404, _ADMIN),
    Kind("404 unload", "/models/unload", lambda n: {"model": word(n)}, 404, _ADMIN),
    Kind(
        "404 adapter",
        "/v1/unload_lora_adapter",
        lambda n: {"lora_name": word(n)},
        404,
        _ADMIN,
    ),
    Kind(
        "400 adapter",
        "/v1/load_lora_adapter",
        lambda n: {"lora_name": word(n), "lora_path": f"../{word(n)}"},
        400,
        _ADMIN,
    ),
    Kind("404 path", "/nowhere", inputs("sentiment"), 404),
    Kind("405", "/classify", status=405),
    Kind("408", "/classify", inputs("sentiment"), 408, half=True, num_clients=32),
    Kind("413", "/classify", lambda _: b" " * 400_001, 413),
    Kind("422 JSON", "/classify", lambda n: b"{" + word(n).encode(), 422),
    Kind("422 field", "/classify", lambda n: {"inputs": "x", word(n): 1}, 422),
    Kind("422 grammar", "/generate", _constrained("regex", lambda n: f"({word(n)}"), 422),
    Kind("431", "/info", status=431, headers={f"x-{n}": "x" * 1000 for n in range(80)}),
    Kind("504", "/generate", lambda n: {**_generate(**_LONG)(n), "timeout": 0.001}, 504),
)
"""What a server of the starters answers, its ``hybrid`` with a chat template."""
