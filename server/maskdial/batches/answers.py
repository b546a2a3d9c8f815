"""Answers: what a line of a batch is replied, by the routes of the server.

A line of OpenAI's batches goes through its route. Texts of a native task are answered several at a
time, as one request with a list of them would be, and each gets its item of that reply.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from maskdial.ask import catalogue
from maskdial.ask import score as scoring
from maskdial.batches.lines import CustomIds, Line
from maskdial.batches.requests import BatchReply, Requests
from maskdial.dialects.body import TaskBody, parse_body
from maskdial.dialects.masked_body import MaskedBody
from maskdial.dialects.native import tasks
from maskdial.dialects.native.fill_mask_bodies import ScoreBody
from maskdial.engine.timing import Deadline
from maskdial.errors import (
    ConfigError,
    ForbiddenError,
    MaskdialError,
    UnavailableError,
    ValidationError,
    shortened,
)
from maskdial.http.replies import encode_json, error_content
from maskdial.masked import run
from maskdial.masked.model import MaskedModel
from maskdial.masked.tasks.embed import SimilarityRequest
from maskdial.masked.tasks.rerank import RerankRequest
from maskdial.receipts.receipt import HEADER
from maskdial.registry.choice import ModelChoice
from maskdial.registry.served import ServedModel, Task

DUPLICATE = "custom_id was given to a line before"

_GROUPED = {
    name: task
    for task in tasks.TASKS
    for name in (task.name, *(path.removeprefix("/") for path in task.aliases))
    # One of the others has no inputs, and those of the other are one sentence and many.
    if task.kind not in (RerankRequest, SimilarityRequest)
}
"""The tasks whose texts are answered several at a time, by the names of their routes."""

_TASK_NAMES = tuple(dict.fromkeys((*_GROUPED, *(task.name for task in catalogue.LISTED))))
_ENVELOPE = ("custom_id", "method", "url", "body")
_MAX_GROUP = 64
_MAX_GROUP_CHARACTERS = 20_000  # padding included, so that long texts are few


@dataclass(frozen=True, slots=True)
class Answer:
    """A line of the results, or of the failures."""

    content: bytes
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Failure:
    error: str
    error_type: str

    @classmethod
    def of(cls, error: MaskdialError) -> "_Failure":
        return cls(**error_content(error))


class Answers:
    """Answers the lines of one file.

    Args:
        requests: to the models.
        task: the route of lines that name none, such as ``embed``.
        parameters: of lines that have none.
        receipts: whether the answers to lines of OpenAI's batches have receipts.

    Raises:
        ConfigError: there is no such task.
    """

    def __init__(
        self,
        requests: Requests,
        task: str | None,
        parameters: Mapping[str, Any] | None,
        *,
        receipts: bool = False,
    ) -> None:
        self._requests = requests
        self._context = requests.context
        self._task = task
        self._parameters = parameters
        self._receipts = receipts
        self._ids = CustomIds()
        self._models: dict[ModelChoice, ServedModel] = {}
        if task is not None and task not in _TASK_NAMES:
            raise ConfigError(f"there is no task {task!r}; tasks are {', '.join(_TASK_NAMES)}")

    def fault_of(self, line: Line) -> str:
        """Why a line cannot be answered; empty if it can. Called for each line, in order."""
        content = line.content
        if line.fault:
            return line.fault
        if "custom_id" in content:
            return self._envelope_fault(content)
        if self._task is None:
            return (
                'the line has no "custom_id", "method", "url" and "body"; for other lines set '
                "--task"
            )
        if self._task != "rerank" and "inputs" not in content:
            return 'the line has no "inputs"'
        if content.get("stream"):
            return "stream: a batch has whole replies; leave it out"
        return ""

    def groups(self, lines: Sequence[Line]) -> list[list[Line]]:
        """Lines to be answered together, those of similar length; the others alone."""
        alike: dict[str, list[Line]] = {}
        groups: list[list[Line]] = []
        for line in lines:
            if (key := self._key(line)) is None:
                groups.append([line])
            else:
                alike.setdefault(key, []).append(line)
        for found in alike.values():
            found.sort(key=_length)
            group: list[Line] = []
            for line in found:
                num_characters = (len(group) + 1) * _length(line)
                if group and (len(group) == _MAX_GROUP or num_characters > _MAX_GROUP_CHARACTERS):
                    groups.append(group)
                    group = []
                group.append(line)
            groups.append(group)
        return groups

    async def answer(self, group: Sequence[Line]) -> list[Answer]:
        """The answers of a group.

        Raises:
            UnavailableError: no line can be answered any more.
        """
        (first, *others) = group
        if "custom_id" in first.content:
            return [await self._answer_envelope(first)]
        if self._key(first) is None:
            return [await self._answer_alone(first)]
        try:
            items = await self._items([line.content["inputs"] for line in group], first)
        except UnavailableError:
            raise
        except MaskdialError as error:
            if others:  # one of them is at fault; the others get their answers
                return [each for line in group for each in await self.answer([line])]
            return [_failed(first, _Failure.of(self._located(error, first)))]
        return [_succeeded(line, {"output": item}) for line, item in zip(group, items, strict=True)]

    def failure(self, line: Line, fault: str) -> Answer:
        """The answer to a line with a fault."""
        return _failed(line, _Failure(fault, "validation"))

    def _envelope_fault(self, content: Mapping[str, Any]) -> str:
        custom_id, url = content["custom_id"], content.get("url")
        if not (isinstance(custom_id, str) and custom_id):
            return "custom_id must be a text that is not empty"
        if not self._ids.add(custom_id):
            return DUPLICATE
        if content.get("method") != "POST":
            return 'method must be "POST"'
        if not isinstance(content.get("body"), dict):
            return "body must be an object"
        if not isinstance(url, str) or url not in self._requests.task_paths:
            return 'url must be the path of a task, such as "/v1/embeddings"'
        if self._requests.streams(url, content["body"]):
            how = "leave it out" if content["body"].get("stream") else "set it to false"
            return f"body.stream: a batch has whole replies; {how}"
        if content["body"].get("background"):
            return "body.background: all lines of a batch are in the background; leave it out"
        for name in content:
            if name not in _ENVELOPE:
                return f"{json.dumps(shortened(name))}: unknown field"
        return ""

    def _key(self, line: Line) -> str | None:
        """What texts have in common that are answered together; None: it is answered alone."""
        content = line.content
        if "custom_id" in content or not (self._task in _GROUPED or self._task == "score"):
            return None
        if isinstance(content.get("inputs"), list):
            return None
        rest = self._rest(line)
        return json.dumps(rest, sort_keys=True) if rest else ""

    def _rest(self, line: Line) -> dict[str, Any]:
        """The fields of a line's body beside its texts."""
        rest = {} if self._parameters is None else {"parameters": self._parameters}
        return rest | {
            name: value for name, value in line.content.items() if name not in ("inputs", "id")
        }

    async def _items(self, inputs: list[Any], line: Line) -> Sequence[object]:
        """The items of the reply to a body with a list."""
        if self._task == "score":
            score_body = _parse(ScoreBody, self._rest(line) | {"inputs": inputs})
            model = await self._model(score_body, catalogue.SCORE)
            config = self._context.config
            request, deadline = score_body.request(), Deadline(score_body.timeout, config)
            return (await scoring.score(request, model, config, deadline)).content
        task = _GROUPED[self._task or ""]
        body: MaskedBody = _parse(task.body, self._rest(line) | {"inputs": inputs})
        model = await self._model(body, catalogue.task_of(task.kind))
        assert isinstance(model, MaskedModel)
        config = self._context.config
        answer = await run.answer(body.request(), model, config, Deadline(body.timeout, config))
        items = task.render(body, answer.content)
        assert isinstance(items, list), "a list of texts has a list of answers"
        return items

    async def _model(self, body: TaskBody, task: Task) -> ServedModel:
        """The model that a body means, held until the application ends."""
        choice = body.choice()
        if choice not in self._models:
            models = self._context.models
            lease = await models.lease(choice, task)
            model = models.pick(lease, choice, task)
            try:
                if self._context.policies is not None:
                    self._context.policies.check_task(model.manifest, model.name, None, task)
            except ForbiddenError:
                lease.release()
                raise
            self._models[choice] = model
        return self._models[choice]

    def _located(self, error: MaskdialError, line: Line) -> MaskdialError:
        """An error in the words of the line's own body, whose text is no list."""
        body = ScoreBody if self._task == "score" else _GROUPED[self._task or ""].body
        content = self._rest(line) | {"inputs": line.content["inputs"]}
        try:
            own = _parse(body, content)
        except ValidationError as own_error:
            return own_error
        return own.locate(error) if isinstance(error, ValidationError) else error

    async def _answer_alone(self, line: Line) -> Answer:
        """A line of a native task, through its route."""
        body = self._rest(line)
        if "inputs" in line.content:
            body["inputs"] = line.content["inputs"]
        reply = await self._post(f"/{self._task}", body)
        content = json_of(reply.body)
        if reply.status != 200:
            known = isinstance(content, dict) and {"error", "error_type"} <= content.keys()
            if known:
                return _failed(line, _Failure(content["error"], content["error_type"]))
            return _failed(line, _Failure(f"status {reply.status}", "internal"))
        return _succeeded(line, {"output": content})

    async def _post(self, path: str, body: Mapping[str, Any]) -> BatchReply:
        reply = await self._requests.post(path, encode_json(body), receipt=self._receipts)
        if reply.comes_later:
            raise UnavailableError(sentence_of(json_of(reply.body)))
        return reply

    async def _answer_envelope(self, line: Line) -> Answer:
        """A line of OpenAI's batches, answered in their form."""
        content = line.content
        reply = await self._post(content["url"], content["body"])
        response = {
            "status_code": reply.status,
            "request_id": reply.headers.get("x-request-id", ""),
            "body": json_of(reply.body),
        }
        if HEADER in reply.headers:
            response["receipt"] = reply.headers[HEADER]
        return Answer(
            line_of(
                {
                    "id": f"batch_req_{uuid.uuid4().hex}",
                    "custom_id": content["custom_id"],
                    "response": response,
                    "error": None,
                }
            ),
            reply.status != 200,
        )


class Expired(Answers):
    """What the lines get of a batch that has no time left, as OpenAI has it."""

    def __init__(self, requests: Requests) -> None:
        super().__init__(requests, None, None)

    def fault_of(self, line: Line) -> str:
        super().fault_of(line)
        return "this request could not be executed before the completion window expired"

    def failure(self, line: Line, fault: str) -> Answer:
        return _failed(line, _Failure(fault, "batch_expired"))


def _succeeded(line: Line, content: Mapping[str, Any]) -> Answer:
    return Answer(line_of({**_place(line), **content}))


def _failed(line: Line, failure: _Failure) -> Answer:
    if "custom_id" in line.content:
        custom_id = line.content["custom_id"]
        content = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": custom_id if isinstance(custom_id, str) else None,
            "response": None,
            "error": {"code": failure.error_type, "message": failure.error},
            "line": line.number,
        }
        return Answer(line_of(content), failed=True)
    content = {**_place(line), "error": failure.error, "error_type": failure.error_type}
    return Answer(line_of(content), failed=True)


def _place(line: Line) -> dict[str, Any]:
    """Which line a result belongs to."""
    place: dict[str, Any] = {"line": line.number}
    if "id" in line.content:
        place["id"] = line.content["id"]
    return place


def line_of(content: object) -> bytes:
    return encode_json(content) + b"\n"


def json_of(body: bytes) -> Any:
    try:
        return from_json(body)
    except ValueError:
        return body.decode("utf-8", "replace")


def sentence_of(content: Any) -> str:
    """That of an error's body, in any dialect."""
    while isinstance(content, dict):
        content = content.get("error", content.get("message"))
    return str(content)


def _parse(schema: type[Any], body: Mapping[str, Any]) -> Any:
    return parse_body(schema, encode_json(body))


def _length(line: Line) -> int:
    inputs = line.content["inputs"]
    if isinstance(inputs, str):
        return len(inputs)
    if isinstance(inputs, dict):
        return sum(len(each) for each in inputs.values() if isinstance(each, str))
    return 0
