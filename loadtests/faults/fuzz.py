"""``python -m loadtests faults fuzz``: hostile inputs by the hundred thousand."""

import argparse
import asyncio
import contextlib
import json
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests import LoadTestError, add_number
from loadtests.faults.doors import BOUNDARY, form, http2, lines, live_call
from loadtests.faults.hostile import body, grammar, http_message, template
from loadtests.faults.mix import draw_questions, learn_answers
from loadtests.faults.outcome import Outcome, add_clients, busy_gauges
from loadtests.kinds import chatting_starters
from loadtests.measurement import Section
from loadtests.server import Connection, Reply, ServerProcess, post, running_server
from maskdial.causal.chat.template import ChatTemplate
from maskdial.errors import MaskdialError

DESCRIPTION = (
    "Send generated inputs to the starter models: bodies with faults on every route of the OpenAPI "
    "document, raw HTTP, grammars, forms with files, batches of hostile lines, and HTTP/2 of gRPC; "
    "and render generated chat templates. Every reply has to come in "
    "time, with a status that the document names, and no 5xx but the request's own timeout; "
    "afterwards the server has to answer as before."
)
_QUESTION = "what hostile inputs break"
_SHARES = {
    "body": 0.62,
    "http": 0.2,
    "grammar": 0.077,
    "template": 0.003,
    "form": 0.03,
    "batch": 0.01,
    "grpc": 0.06,
}
_NAMES = (
    *("hybrid", "sentiment", "hybrid:full", "hybrid:causal", "hybrid:prefix", "hybrid:block"),
    *(
        "sentiment:prefix",
        "sentiment:block",
        "hybrid:",
        "hybrid:latest",
        "..",
        "%2e%2e%2fx",
        "%00",
        "a%0d%0ab",
        "%c3%a9/x",
    ),
)
_HEADERS: tuple[Mapping[str, str], ...] = (
    *({}, {}, {}, {}, {"content-encoding": "gzip"}, {"content-type": "text/plain"}),
    *({"accept": "text/event-stream"}, {"x-request-id": "a" * 300}, {"x-api-key": "\xff"}),
    *({"authorization": "Bearer"}, {"x-forwarded-for": "1.2.3.4"}, {"x-session-id": "\x80" * 99}),
)
_FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
_SETTINGS: dict[str, Any] = {
    "log_format": "json",
    "admin_key": "loadtests-fuzz",
    "max_context": 96,
    "request_timeout": 20,
    "header_timeout": 10,  # more than a busy machine stands still, or replies are lost
    "body_timeout": 2,
    "keep_alive_timeout": 2,
    "grpc_port": 0,
}
_TIMEOUT = 90.0
_SETTLE_SECONDS = 5.0
_MAX_EXAMPLES = 20
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
_GRPC_PORT = re.compile(r"listening on grpc://\S+:(\d+)")
_FORM_STATUSES = frozenset({200, 400, 408, 413, 422, 429, 503})
_ENDED = {"completed", "failed", "cancelled", "expired"}
_POLL_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    add_number(parser, "--inputs", 10_000, "N")
    add_clients(parser, 16)


def run(args: argparse.Namespace) -> Outcome:
    """Sends the inputs."""
    tracebacks: list[str] = []
    ports: list[int] = []

    def read(line: str) -> None:
        if "Traceback" in line:
            tracebacks.append(line)
        if match := _GRPC_PORT.search(line):
            ports.append(int(match[1]))

    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory() as batches,
        running_server(
            chatting_starters(Path(folder)), on_line=read, batch_dir=batches, **_SETTINGS
        ) as server,
    ):
        fuzz = Fuzz(server, args.seed, ports[0])
        asyncio.run(fuzz.run(args.inputs, args.clients))
    findings = (*fuzz.findings, f"tracebacks in the log: {len(tracebacks)}", *tracebacks[:3])
    section = Section("fuzz", _QUESTION, 1, fuzz.rows(), findings)
    broken = any(row.failed or row.undocumented or row.late or row.lost for row in fuzz.rows())
    return Outcome(section, broken or fuzz.is_different or bool(tracebacks))


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of input. ``failed``: 5xx other than 504; ``undocumented``: a status that the
    document does not name for the route; ``late``: not answered in time; ``lost``: closed without a
    reply where one is due.
    """

    kind: str
    inputs: int
    ok: int
    refused: int
    failed: int
    undocumented: int
    late: int
    lost: int
    slowest_s: float


class Fuzz:
    """The inputs and what came of them."""

    def __init__(self, server: ServerProcess, seed: int, grpc_port: int) -> None:
        self.findings: list[str] = []
        self.is_different = False
        self._server = server
        self._seed = seed
        self._grpc_port = grpc_port
        self._counts = {kind: Counter[str]() for kind in _SHARES}
        self._slowest = dict.fromkeys(_SHARES, 0.0)
        self._operations: list[tuple[str, Any, frozenset[int]]] = []
        self._served: list[tuple[str, Any, frozenset[int]]] = []
        self._fields: list[str] = []

    async def run(self, num_inputs: int, num_clients: int) -> None:
        """Sends so many inputs, and looks whether the server is as it was."""
        questions = draw_questions(self._seed)
        answers = await learn_answers(self._server.port, questions)
        await self._read_document()
        before = self._server.resident_bytes() // 1_000_000
        started = time.perf_counter()
        send: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "body": self._body,
            "http": self._http,
            "grammar": self._grammar,
            "template": self._template,
            "form": self._form,
            "batch": self._batch,
            "grpc": self._grpc,
        }
        kinds = random.Random(self._seed).choices(
            list(_SHARES), list(_SHARES.values()), k=num_inputs
        )
        supply = iter(enumerate(kinds))

        async def client() -> None:
            for number, kind in supply:
                # Each input can be had again from its number.
                await self._timed(kind, number, send[kind])

        await asyncio.gather(*(client() for _ in range(num_clients)))
        took = time.perf_counter() - started
        await asyncio.sleep(_SETTLE_SECONDS)
        self.is_different = await learn_answers(self._server.port, questions) != answers
        after = self._server.resident_bytes() // 1_000_000
        busy = await busy_gauges(self._server)
        self.is_different |= bool(busy)
        if b"grpc-status" not in await self._sent(self._grpc_port, live_call()):
            self.is_different = True
            self.findings.append("the gRPC port answers no more")
        self.findings.append(
            f"{num_inputs:,} inputs in {took:.0f} s; resident MB: {before} to {after}; gauges "
            f"above zero: {len(busy)}; answers afterwards "
            f"{'DIFFER' if self.is_different else 'as before'}"
        )

    async def _read_document(self) -> None:
        async with httpx.AsyncClient(base_url=self._server.url) as http:
            document = (await http.get("/openapi.json")).json()
        schemas = document["components"]["schemas"]
        fields = {name for schema in schemas.values() for name in schema.get("properties", ())}
        self._fields = sorted(fields)
        for path, operations in document["paths"].items():
            if "post" not in operations:
                continue
            described = operations["post"]
            statuses = frozenset(int(each) for each in described["responses"])
            body = described.get("requestBody", {"content": {}})
            content = body["content"].get("application/json")
            if content is None:  # a form with a file, or nothing
                continue
            schema = content["schema"]
            for choice in schema.get("anyOf", [schema]):
                examples = schemas[choice["$ref"].rpartition("/")[2]].get("examples", [{}])
                operation = path, examples[0], statuses
                self._operations.append(operation)
                if await self._is_served(path, examples[0]):
                    self._served.append(operation)

    async def _is_served(self, path: str, example: Any) -> bool:
        connection = await Connection.open(self._server.port)
        reply = await connection.send(post(path, json.dumps(example).encode()))
        connection.close()
        return reply.ok

    async def _timed(
        self, kind: str, number: int, send: Callable[[random.Random], Awaitable[None]]
    ) -> None:
        counts = self._counts[kind]
        counts["inputs"] += 1
        begun = time.perf_counter()
        try:
            async with asyncio.timeout(_TIMEOUT):
                await send(random.Random(f"{self._seed}-{number}"))
        except TimeoutError:
            self._note(kind, "late", f"input {number}")
        except (LoadTestError, OSError, httpx.TransportError) as error:
            self._note(kind, "lost", f"input {number}: {error}")
        self._slowest[kind] = max(self._slowest[kind], time.perf_counter() - begun)

    async def _body(self, source: random.Random) -> None:
        operations = self._served if source.random() < 0.7 else self._operations
        path, example, statuses = source.choice(operations)
        if isinstance(example, dict) and source.random() < 0.25:
            example = {**example, "model": source.choice(("hybrid", "sentiment", "hybrid:full"))}
        content = body(example, self._fields, source)
        target = path.replace("{name}", source.choice(_NAMES))
        if target != path:
            statuses |= {404, 405}  # such a name may belong to no route
        await self._ask("body", target, content, statuses, source.choice(_HEADERS))

    async def _grammar(self, source: random.Random) -> None:
        parameters = {"max_new_tokens": source.randrange(1, 12), "grammar": grammar(source)}
        content = json.dumps({"inputs": "It was", "model": "hybrid", "parameters": parameters})
        statuses = next(each for path, _, each in self._operations if path == "/generate")
        await self._ask("grammar", "/generate", content.encode(), statuses, {})

    async def _ask(
        self,
        kind: str,
        path: str,
        content: bytes,
        statuses: frozenset[int],
        headers: Mapping[str, str],
    ) -> None:
        connection = await Connection.open(self._server.port)
        try:
            reply = await connection.send(post(path, content, headers))
        finally:
            connection.close()
        what = f"{path} {headers} {content[:600]!r}: {reply}"
        self._count(kind, reply.status, what)
        if reply.status not in statuses:
            self._note(kind, "undocumented", what)
        elif not is_well_formed(reply):
            self._note(kind, "undocumented", f"no JSON: {what}")

    async def _http(self, source: random.Random) -> None:
        message = b"".join(http_message(source) for _ in range(source.choice((1, 1, 2))))
        reply = await self._sent(self._server.port, message)
        statuses = [int(each) for each in _STATUS.findall(reply)]
        if not statuses:
            self._counts["http"]["refused"] += 1
        for status in statuses[:1] + [each for each in statuses[1:] if each >= 500]:
            self._count("http", status, f"{message[:600]!r}: {reply[:300]!r}")

    async def _sent(self, port: int, message: bytes) -> bytes:
        """What comes of a message, to the end of its connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reply = b""
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(message)
                while piece := await reader.read(65_536):
                    reply += piece
        finally:
            writer.close()
        return reply

    async def _form(self, source: random.Random) -> None:
        content = form(source)
        async with self._client() as http:
            reply = await http.post("/v1/files", content=content, headers=_FORM)
        self._count("form", reply.status_code, f"{content[:600]!r}: {reply.text[:300]}")
        if reply.status_code not in _FORM_STATUSES:
            self._note("form", "undocumented", f"{content[:600]!r}: {reply.text[:300]}")

    async def _batch(self, source: random.Random) -> None:
        content = lines(source)
        async with self._client() as http:
            files = {"file": ("a.jsonl", content)}
            reply = await http.post("/v1/files", data={"purpose": "batch"}, files=files)
            if reply.is_success:
                endpoint = source.choice(("/v1/completions", "/classify", "/nowhere"))
                wanted = {"input_file_id": reply.json()["id"], "endpoint": endpoint}
                batch = await http.post("/v1/batches", json=wanted | {"completion_window": "24h"})
                self._count("batch", batch.status_code, f"{content[:600]!r}: {batch.text[:300]}")
                while batch.is_success and batch.json()["status"] not in _ENDED:
                    await asyncio.sleep(_POLL_SECONDS)
                    batch = await http.get(f"/v1/batches/{batch.json()['id']}")
                await http.delete(f"/v1/files/{reply.json()['id']}")
            else:
                self._count("batch", reply.status_code, f"{content[:600]!r}: {reply.text[:300]}")

    async def _grpc(self, source: random.Random) -> None:
        message = http2(source)
        reply = await self._sent(self._grpc_port, message)
        if b"internal error" in reply:
            self._note("grpc", "failed", f"{message[:600]!r}: {reply[:300]!r}")
        else:
            self._counts["grpc"]["ok" if b"grpc-status" in reply else "refused"] += 1

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._server.url, timeout=_TIMEOUT, trust_env=False)

    async def _template(self, source: random.Random) -> None:
        text = template(source)
        try:
            await asyncio.to_thread(_render, text)
        except MaskdialError:
            self._counts["template"]["refused"] += 1
        except Exception as error:  # any other type is a finding
            self._note("template", "failed", f"{text[:600]!r}: {error!r}")
        else:
            self._counts["template"]["ok"] += 1

    def _count(self, kind: str, status: int, what: str) -> None:
        if status >= 500 and status != httpx.codes.GATEWAY_TIMEOUT:
            self._note(kind, "failed", what)
        else:
            self._counts[kind]["ok" if status < 400 else "refused"] += 1

    def _note(self, kind: str, fault: str, what: str) -> None:
        self._counts[kind][fault] += 1
        if len(self.findings) < _MAX_EXAMPLES:
            self.findings.append(f"{kind} {fault}: {what}")

    def rows(self) -> tuple[Row, ...]:
        """The counts."""
        return tuple(
            Row(
                kind,
                counts["inputs"],
                counts["ok"],
                counts["refused"],
                counts["failed"],
                counts["undocumented"],
                counts["late"],
                counts["lost"],
                self._slowest[kind],
            )
            for kind, counts in self._counts.items()
        )


def is_well_formed(reply: Reply) -> bool:
    """Whether it is JSON, lines of it, or an event stream that ends with an event; errors are
    objects.
    """
    if reply.body.startswith((b"data:", b"event:", b":")):
        return reply.body.endswith(b"\n\n")
    is_stream = reply.status < 400 and reply.body.endswith(b"}\n")
    try:
        values = [
            json.loads(each) for each in (reply.body.splitlines() if is_stream else [reply.body])
        ]
    except ValueError:
        return False
    return reply.status < 400 or isinstance(values[0], dict)


def _render(text: str) -> None:
    chat = ChatTemplate(text, name="fuzz")
    try:
        chat.render([{"role": "user", "content": "Hi"}])
    finally:
        chat.close()
