"""Server: what is asked of a server over HTTP, and its answers in one form."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from maskdial_client.sse import EventParser

NUM_TOP = 2
"""Likeliest tokens at each position: the gap between them tells how near a tie was."""


class NotAskedError(Exception):
    """The server cannot be asked this, in a sentence: it has no such route or field."""


class FailedError(Exception):
    """The server should have answered and did not, in a sentence."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a reply.

    Attributes:
        text: as the server shows it.
        logprob: its natural log-probability; None if the server tells none.
        gap: between the log-probabilities of the two likeliest tokens; None if unknown.
    """

    text: str
    logprob: float | None
    gap: float | None


@dataclass(frozen=True, slots=True)
class Written:
    """A text that the server wrote. ``tokens`` is empty where it describes none."""

    text: str
    tokens: tuple[Token, ...]
    finish: str


@dataclass(frozen=True, slots=True)
class Numbers:
    """An answer that is no text: its labels in order, and its numbers."""

    labels: tuple[str, ...]
    values: tuple[float, ...]


class Server:
    """Asks one model of a server.

    Args:
        http: has the server's address, its key and the timeout.
        model: its name; empty if the requests name none.
        chat: whether texts come from `/v1/chat/completions`, otherwise from `/v1/completions`.
        max_tokens: of each text.
    """

    def __init__(self, http: httpx.AsyncClient, model: str, *, chat: bool, max_tokens: int) -> None:
        self._http = http
        self.named: dict[str, Any] = {"model": model} if model else {}
        self.path = "/v1/chat/completions" if chat else "/v1/completions"
        self.chat = chat
        self._max_tokens = max_tokens
        self.describes_tokens = True
        """Whether requests ask for log-probabilities."""

    def body(self, question: str, **fields: Any) -> dict[str, Any]:
        """A request that asks for a greedy text, unless ``fields`` say otherwise."""
        asked: dict[str, Any] = self.named | {"max_tokens": self._max_tokens, "temperature": 0}
        if self.chat:
            asked["messages"] = [{"role": "user", "content": question}]
        else:
            asked["prompt"] = question
        if self.describes_tokens:
            asked |= (
                {"logprobs": True, "top_logprobs": NUM_TOP} if self.chat else {"logprobs": NUM_TOP}
            )
        return asked | fields

    async def write(self, question: str, **fields: Any) -> Written:
        """The text that a question gets.

        Raises:
            NotAskedError: the server has no such route, or refuses a field.
            FailedError: it failed.
        """
        reply = await self.post(self.path, self.body(question, **fields))
        return self.written(reply)

    async def stream(self, question: str, **fields: Any) -> Written:
        """The same, from a stream. Raises as `write`."""
        text, finish = "", ""
        tokens: list[Token] = []
        async for chunk in self._chunks(self.body(question, stream=True, **fields)):
            for choice in chunk.get("choices") or ():
                part = self._written(choice, choice.get("delta") or {})
                text += part.text
                tokens += part.tokens
                finish = part.finish or finish
        return Written(text, tuple(tokens), finish)

    async def leave(self, question: str) -> None:
        """Begins a stream and leaves it after its first event."""
        async for _ in self._chunks(self.body(question, stream=True)):
            return

    def written(self, reply: Mapping[str, Any]) -> Written:
        """The text of a whole reply. Raises FailedError if there is none."""
        choices = reply.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            raise FailedError("a reply has no choices")
        return self._written(choices[0], choices[0].get("message") or {})

    async def numbers(self, path: str, body: Mapping[str, Any]) -> list[Numbers]:
        """The answers of a route for vectors or labels, one for each input. Raises as `write`."""
        reply = await self.post(path, self.named | dict(body))
        if isinstance(reply, dict):  # OpenAI's embeddings
            items = reply.get("data")
            if isinstance(items, list):
                items = [item.get("embedding") for item in items if isinstance(item, dict)]
        else:
            items = reply
        if not isinstance(items, list):
            raise FailedError(f"the reply of {path} is no list")
        return [flat(item) for item in items]

    async def batch(
        self, lines: Sequence[Mapping[str, Any]], seconds: float, poll_seconds: float
    ) -> dict[str, Mapping[str, Any]]:
        """Has a batch of OpenAI's answer some lines; the replies, by the lines' ``custom_id``.

        Args:
            lines: of its file, all for one route.
            seconds: how long it is waited for.
            poll_seconds: how often it is asked whether it is done.
        """
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()
        file = await self._json(
            "POST", "/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}
        )
        asked = {
            "input_file_id": file["id"],
            "endpoint": self.path,
            "completion_window": "24h",
        }
        batch = await self.post("/v1/batches", asked)
        waited = 0.0
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            if waited > seconds:
                raise FailedError(f"a batch was not done after {seconds:g} seconds")
            await asyncio.sleep(poll_seconds)
            waited += poll_seconds
            batch = await self._json("GET", f"/v1/batches/{batch['id']}")
        if not batch.get("output_file_id"):
            raise FailedError(f"a batch ended as {batch['status']} without answers")
        reply = await self._send("GET", f"/v1/files/{batch['output_file_id']}/content")
        return {
            each["custom_id"]: each["response"]["body"]
            for each in map(json.loads, reply.text.splitlines())
            if each.get("response")
        }

    async def models(self) -> list[str]:
        """The names of the server's models, as far as it lists them. Raises as `write`."""
        reply = await self._json("GET", "/v1/models")
        listed = reply.get("data") if isinstance(reply, dict) else None
        return [str(each["id"]) for each in listed or () if isinstance(each, dict) and "id" in each]

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of a reply. Raises as `write`."""
        return await self._json("POST", path, json=body)

    async def _json(self, method: str, path: str, **content: Any) -> Any:
        reply = await self._send(method, path, **content)
        try:
            return reply.json()
        except ValueError as error:
            raise FailedError(f"the reply of {path} is no JSON") from error

    async def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            reply = await self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise _lost(path, error) from error
        _check(path, reply.status_code, reply.text)
        return reply

    async def _chunks(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        parser = EventParser()
        try:
            async with self._http.stream("POST", self.path, json=body) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                    _check(self.path, reply.status_code, reply.text)
                async for part in reply.aiter_bytes():
                    for data in parser.feed(part):
                        if data == "[DONE]":
                            return
                        yield _chunk(data)
        except httpx.HTTPError as error:
            raise _lost(self.path, error) from error

    def _written(self, choice: Mapping[str, Any], message: Mapping[str, Any]) -> Written:
        described = choice.get("logprobs") or {}
        if self.chat:
            text = "".join(
                message.get(name) or "" for name in ("reasoning_content", "reasoning", "content")
            )
            tokens = [_chat_token(each) for each in described.get("content") or ()]
        else:
            text = choice.get("text") or ""
            tokens = _tokens(described)
        return Written(text, tuple(tokens), choice.get("finish_reason") or "")


def _chunk(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except ValueError as error:
        raise FailedError("an event of a stream is no JSON") from error
    if not isinstance(chunk, dict) or "error" in chunk:
        raise FailedError(f"a stream ended with an error: {data[:200]}")
    return chunk


def _check(path: str, status: int, text: str) -> None:
    if status == 200:
        return
    sentence = f"{path} answers {status}: {' '.join(text.split())[:160]}"
    if status in (400, 403, 404, 405, 415, 422, 501):
        raise NotAskedError(sentence)
    raise FailedError(sentence)


def _lost(path: str, error: httpx.HTTPError) -> FailedError:
    if isinstance(error, httpx.TimeoutException):
        return FailedError(f"{path} sent nothing within the timeout; allow more by --timeout")
    return FailedError(f"{path}: the connection failed ({str(error) or type(error).__name__})")


def _chat_token(token: Mapping[str, Any]) -> Token:
    top = [each.get("logprob") for each in token.get("top_logprobs") or ()]
    return Token(str(token.get("token")), token.get("logprob"), _gap(top))


def _tokens(described: Mapping[str, Any]) -> list[Token]:
    """The tokens as `/v1/completions` describes them: a list for each of their properties."""
    texts = described.get("tokens") or ()
    logprobs = described.get("token_logprobs") or [None] * len(texts)
    tops = described.get("top_logprobs") or [None] * len(texts)
    return [
        Token(str(text), logprob, _gap(list((top or {}).values())))
        for text, logprob, top in zip(texts, logprobs, tops, strict=False)
    ]


def _gap(logprobs: Sequence[float | None]) -> float | None:
    known = sorted((each for each in logprobs if each is not None), reverse=True)
    return known[0] - known[1] if len(known) > 1 else None


def flat(item: object) -> Numbers:
    """The texts and the numbers of any JSON, in the order in which they stand there."""
    labels: list[str] = []
    values: list[float] = []
    pending = [item]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            pending.extend(reversed(list(part.values())))
        elif isinstance(part, list):
            pending.extend(reversed(part))
        elif isinstance(part, str):
            labels.append(part)
        elif isinstance(part, int | float) and not isinstance(part, bool):
            values.append(float(part))
    return Numbers(tuple(labels), tuple(values))
